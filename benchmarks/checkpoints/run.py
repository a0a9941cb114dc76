"""What a checkpoint costs the training: time per update with one after every 10 updates, and without.

Two workers over shared memory, each with four 1024 x 1024 linear layers under SGD with momentum: 33.6 MB of weights and
moments per stage, 67 MB per checkpoint. Forward and backward sleep 20 and 40 ms first, so that the cores have room for
what is written meanwhile. Beside it, alone: a copy of one stage's state, which is all that the training should
wait for, and what a loop pays that stops and writes: `torch.save` of both stages' states and `fsync`.
"""

from __future__ import annotations

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import roundelay
from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.schedule.run import B, F, asleep
from roundelay.api.gathering import Event, Updated
from roundelay.api.keeping import Saving
from roundelay.api.training import Length, Session
from roundelay.runtime.handlers import do_backward, do_forward

WIDTH, LAYERS, EVERY = 1024, 8, 10


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@functools.cache
def session(updates: int) -> Session:
    batch = {"x": torch.randn(4, WIDTH)}
    job = roundelay.Job(
        model=model(),
        loss=lambda outputs, batch: outputs.square().mean(),
        batches=lambda epoch: [batch] * 10_000,
        inputs=lambda batch: ((batch["x"],), {}),
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3, momentum=0.9),
    )
    captured = roundelay.capture(job)
    plan = roundelay.plan(job, captured=captured, cuts="equal", workers=2, rule="pipedream", transport="shm")
    return Session(job, captured, plan, 0, Length(steps=updates))


def ours(updates: int, every: int) -> float:
    """Milliseconds per update, from the first to the last but the one that the run's own end waits for."""
    ends: list[float] = []

    def notify(event: Event) -> None:
        if isinstance(event, Updated):
            ends.append(time.perf_counter())

    handlers = {"forward": asleep(F, do_forward), "backward": asleep(B, do_backward)}
    with tempfile.TemporaryDirectory() as folder:
        saving = Saving(path=Path(folder) / "checkpoint", every=every) if every else None
        session(updates).run(notify=notify, saving=saving, handlers=dict.fromkeys(range(2), handlers))
    return 1e3 * (ends[-1] - ends[0]) / (len(ends) - 1)


def states() -> list[dict[str, torch.Tensor]]:
    """Weights and moments, by stage."""
    return [{str(i): torch.randn(WIDTH, WIDTH) for i in range(LAYERS)} for _ in range(2)]


def copying() -> float:
    """Milliseconds of copying one stage's state."""
    mine, start = states()[0], time.perf_counter()
    copies = [tensor.clone() for tensor in mine.values()]
    took = time.perf_counter() - start
    del copies
    return 1e3 * took


def writing() -> float:
    """Milliseconds of writing both stages' states to a disk."""
    both = states()
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "state.pt").open("wb") as file:
        start = time.perf_counter()
        torch.save(both, file)
        file.flush()
        os.fsync(file.fileno())
        return 1e3 * (time.perf_counter() - start)


def main() -> None:
    what = asked(__doc__ or "", 5)
    updates = 31 if what.short else 101
    candidates: dict[str, Callable[[], float]] = {
        "per update, without": functools.partial(ours, updates, 0),
        f"per update, with one after every {EVERY}": functools.partial(ours, updates, EVERY),
        "a copy of one stage's state": copying,
        "a loop that stops and writes, per checkpoint": writing,
    }
    found = alternate(candidates, what.repeats)
    without, with_them = (statistics.median(found[name]) for name in list(candidates)[:2])
    rows = [[name, spread(values, 1)] for name, values in found.items()]
    rows.append(["so one checkpoint costs", f"{EVERY * (with_them - without):.0f}"])
    report(what, table(["", "ms"], rows), {"ms": found})


if __name__ == "__main__":
    main()
