"""How much memory a training's processes take for each further update: ``python -m tests.runtime.growth [UPDATES]``.

A tiny job, so that what grows is the run's own accounts. Counted from the update by which the trace has as many
instructions as it keeps. The bound, :data:`BOUND`, holds for the launcher and each worker; exit code 1 if it is broken.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn import functional

import roundelay

BOUND = 1024
"""Bytes for each update, in each process: the launcher keeps every update's loss, rates and time for its caller."""

FROM = 2_500
"""The update from which is counted."""

DATA = [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(50)]


def job() -> roundelay.Job:
    """Two layers on four rows; an epoch that never ends, for checkpoints and evaluations are not what is measured."""
    return roundelay.Job(
        model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: itertools.cycle(DATA),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
    )


def grown(transport: str, updates: int) -> list[float]:
    """Bytes for each update of this process and of its workers."""
    plan = roundelay.plan(job(), workers=2, rule="1f1b", transport=transport, cuts="equal")
    seen: dict[int, list[int]] = {}

    def note(updated: roundelay.Updated) -> None:
        if updated.update in (FROM, updates - 10):
            own = psutil.Process(os.getpid())
            seen[updated.update] = [p.memory_full_info().uss for p in (own, *own.children())]

    roundelay.train(job(), plan=plan, steps=updates, on_update=note)
    first, last = seen[FROM], seen[updates - 10]
    return [(b - a) / (updates - 10 - FROM) for a, b in zip(first, last, strict=True)]


def main(arguments: list[str]) -> int:
    """Print a line for each transport."""
    updates, worst = int(arguments[0]) if arguments else 10_000, 0.0
    torch.set_num_threads(1)
    for transport in ("memory", "shm", "gloo"):
        found: list[Any] = grown(transport, updates)
        worst = max(worst, *found)
        told = ", ".join(f"{one:.0f}" for one in found)
        sys.stdout.write(f"{transport:6} {updates} updates; bytes for each: {told} (launcher, then workers)\n")
    sys.stdout.write(f"bound {BOUND}: {'kept' if worst <= BOUND else 'broken'}\n")
    return int(worst > BOUND)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
