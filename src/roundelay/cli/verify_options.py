"""Options of ``roundelay verify``. No torch is needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from roundelay.cli import options as o
from roundelay.errors import UsageError
from roundelay.proof.tamper_ways import ALL_WAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Options of ``verify`` other than its plan's choices, one for each field."""

    steps: Annotated[int | None, typer.Option(help="Updates to compare. [default: 8]")] = None
    epochs: o.Epochs = None
    seed: o.Seed = 0
    plan_file: o.PlanFile = None
    resume: o.Resume = None
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Replay what the run in this folder has written down; with --from a checkpoint of it, what follows.",
            metavar="RUN",
        ),
    ] = None
    window: Annotated[
        int | None,
        typer.Option(help="Replay at most so many actions of each stage; a digest is at every 256th.", min=1),
    ] = None
    tamper: Annotated[str | None, typer.Option(help="Break the run on purpose: " + ", ".join(ALL_WAYS) + ".")] = None


def check_window(options: VerifyOptions) -> None:
    """Refuse a window of nothing.

    Raises:
        UsageError: there is a window, and no trace.
    """
    if options.window is not None:
        raise UsageError(
            "--window",
            got="no --trace",
            expected="a run whose trace is replayed",
            remedy="Give --trace RUN, or leave --window out.",
        )
