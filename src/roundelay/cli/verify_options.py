"""Options of ``roundelay verify``. No torch is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from roundelay.cli import options as o
from roundelay.proof.tamper_ways import ALL_WAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Options of ``verify`` other than its plan's choices, one for each field."""

    steps: Annotated[int | None, typer.Option(help="Updates to compare. [default: 8]")] = None
    epochs: o.Epochs = None
    seed: o.Seed = 0
    plan_file: o.PlanFile = None
    resume: o.Resume = None
    tamper: Annotated[str | None, typer.Option(help="Break the run on purpose: " + ", ".join(ALL_WAYS) + ".")] = None
