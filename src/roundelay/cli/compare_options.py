"""Options of ``roundelay compare``. No torch is needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from roundelay.comparison.comparison_variants import OPTIMIZERS

Rules = Annotated[
    str,
    typer.Option(help="Rules separated by commas, each RULE[:PREDICTOR][:MODE]; `all` for every known rule."),
]
Optimizers = Annotated[
    str | None,
    typer.Option(
        help=f"Any of {', '.join(OPTIMIZERS)}, in place of the job's own optimizer and its parameter groups; the "
        "scheduler is kept. [default: the job's]"
    ),
]
Rates = Annotated[list[str] | None, typer.Option("--lr", help="Learning rate of an optimizer: adamw=1e-3.")]
TimeTo = Annotated[
    list[str] | None, typer.Option(help="Show updates and time until a metric reaches a value: loss=0.5.")
]
Better = Annotated[
    list[str] | None,
    typer.Option(help="Whether high or low values of a metric are better: score=low. [default: by its name]"),
]
Steps = Annotated[int | None, typer.Option(help="Updates of every run. [default: the job's own number; one epoch]")]
Epochs = Annotated[int | None, typer.Option(help="Epochs of every run, instead of --steps.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the comparison; finished runs in it are not repeated. [default: compare/JOB]"),
]
Seeds = Annotated[int, typer.Option(help="Seeds 0, 1, ...: weights, data and random numbers.", min=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """Options of ``compare`` other than the plans' choices, one for each field."""

    rules: Rules = "all"
    seeds: Seeds = 5
    optimizers: Optimizers = None
    rates: Rates = None
    time_to: TimeTo = None
    better: Better = None
    steps: Steps = None
    epochs: Epochs = None
    out: Out = None

    @property
    def rule_texts(self) -> list[str]:
        """The rules, one by one."""
        return _split(self.rules)

    @property
    def optimizer_names(self) -> list[str]:
        """The optimizers, one by one."""
        return _split(self.optimizers or "")


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
