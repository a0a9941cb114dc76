"""Faults on purpose, by name: each breaks the product in the process that calls it, so that a check must fail."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

planted = ""
"""The fault of this process, which its children get too."""


def plant(name: str) -> None:
    """Break the product in this process, and in those that the checks start from it."""
    global planted
    planted = name
    if name:
        FAULTS[name]()


def _unequal() -> None:
    from roundelay.proof import run_vs_reference

    run_vs_reference._is_equal = lambda one, two: False


def _around_run(behind: Callable[[Any], None]) -> None:
    from roundelay.session.training import Session

    run = Session.run

    def planted_run(self: Any, **how: Any) -> Any:
        trained = run(self, **how)
        behind(self)
        return trained

    Session.run = planted_run


def _weights() -> None:
    """The weights are a little off, differently every time."""

    def disturb(session: Any) -> None:
        with torch.no_grad():
            next(iter(session.job.model.parameters())).add_(1e-3 * (1 + time.monotonic() % 1))

    _around_run(disturb)


def _raises() -> None:
    from roundelay.session.training import Session

    def planted_run(self: Any, **how: Any) -> Any:
        raise RuntimeError("planted")

    Session.run = planted_run
    Session.run_follower = planted_run


def _around_forward(ahead: Callable[[], None]) -> None:
    from roundelay.runtime.stage_state import Stage

    forward = Stage.forward

    def planted_forward(self: Any, *args: Any, **how: Any) -> Any:
        ahead()
        return forward(self, *args, **how)

    Stage.forward = planted_forward


def _slow() -> None:
    _around_forward(lambda: time.sleep(0.2))


def _stuck() -> None:
    _around_forward(lambda: time.sleep(600))


def _reads() -> None:
    def read() -> None:
        for _ in range(8):
            warnings.warn("called a synchronizing CUDA operation (planted)", stacklevel=1)

    _around_forward(read)


def _leaks() -> None:
    kept: list[torch.Tensor] = []
    _around_forward(lambda: kept.append(torch.ones(4 << 20)))


def _one_worker() -> None:
    from roundelay import api

    plan = api.plan

    def planted_plan(job: Any, **how: Any) -> Any:
        how["devices"] = how["devices"].split(",")[0]
        return plan(job, **how | {"workers": 1})

    api.plan = planted_plan


def _no_checkpoint() -> None:
    from roundelay.session.checkpointing import Checkpointer

    Checkpointer._complete = lambda self, snapshot, parts, at: None


def _deaf() -> None:
    from roundelay.cli.signals import Signals

    Signals._raise = lambda self, number, frame: None


def _mute() -> None:
    from roundelay.cli import screen

    def show(error: BaseException, as_json: bool, traced: bool) -> None:
        screen.stderr.print("Traceback (most recent call last): planted")

    screen.show_error = show


def _ill() -> None:
    from roundelay import doctor

    examine = doctor.examine
    doctor.examine = lambda machine: (*examine(machine), doctor.Finding("planted", "a fault", "problem", "None."))


FAULTS: dict[str, Callable[[], None]] = {
    "unequal": _unequal,
    "weights": _weights,
    "raises": _raises,
    "slow": _slow,
    "stuck": _stuck,
    "reads": _reads,
    "leaks": _leaks,
    "one worker": _one_worker,
    "no checkpoint": _no_checkpoint,
    "deaf": _deaf,
    "mute": _mute,
    "ill": _ill,
}
