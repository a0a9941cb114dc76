"""What a checkpoint costs the training, and what of it is the copy that the training must wait for.

Two workers over shared memory, each with four 1024 x 1024 linear layers under SGD with momentum: 33.6 MB of weights and
moments per stage, 67 MB per checkpoint, one after every 10 updates. Forward and backward sleep 20 and 40 ms first, so
that two cores have room for what is written meanwhile. A checkpoint's cost is what the six updates from it on take
longer than six usual ones of the same run, which are those 6 to 8 behind the last checkpoint.

Rivals: the same run in which every stage copies its state at the same places, and nothing is sent or written; what
torch's `async_save` keeps its caller waiting for one stage's state; a loop that stops and writes.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict_saver import async_save

import roundelay
from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.schedule.run import B, F, asleep
from roundelay.actor.machine import Run
from roundelay.env import better_malloc
from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.handlers import Context, do_backward, do_forward, do_update
from roundelay.session.checkpointing import Saving
from roundelay.session.training import Length, Session

WIDTH, LAYERS, EVERY = 1024, 8, 10
BEHIND = 6
"""Updates of which a checkpoint's cost is told."""


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


def copying_too(context: Context, run: Run) -> MicroBatch | None:
    """An update; with every tenth, a copy of the stage's state, as it is made for a checkpoint."""
    header = do_update(context, run)
    if (run.version + 1) % EVERY == 0:
        context.stage.state()
    return header


def ours(updates: int, saves: bool, longer: list[float]) -> float:
    """Milliseconds that one checkpoint, or the copies alone, cost: median of all checkpoints and both stages.

    Args:
        updates: of the run.
        saves: write checkpoints; otherwise the states are copied and dropped.
        longer: takes what the updates themselves took longer that handed over or copied a state.
    """
    handlers = {"forward": asleep(F, do_forward), "backward": asleep(B, do_backward)}
    os.sync()  # what the others have written
    own = handlers if saves else handlers | {"update": copying_too}
    with tempfile.TemporaryDirectory() as folder:
        saving = Saving(path=Path(folder) / "checkpoint", every=EVERY) if saves else None
        run = session(updates).run(notify=lambda event: None, saving=saving, handlers=dict.fromkeys(range(2), own))
    costs: list[float] = []
    for events in run.events.values():
        steps = [(event[5], event[6]) for event in events if event[0] == "update"]
        costs += excess([1e3 * end for _, end in steps])
        took = [1e3 * (end - start) for start, end in steps]
        longer.append(statistics.median(took[EVERY - 1 : -1 : EVERY]) - statistics.median(took))
    return statistics.median(costs)


def excess(ends: list[float]) -> list[float]:
    """What every checkpoint cost, from the times at which the updates of a stage ended, but for the first two.

    Until the second is written beside the first, the machine has not yet given the run all of the memory that it needs.
    """
    took = [later - earlier for earlier, later in itertools.pairwise(ends)]  # took[i]: of update i + 1
    saved = range(3 * EVERY - 2, len(took) - EVERY, EVERY)
    usual = statistics.median(took[at + behind] for at in saved for behind in (6, 7, 8))
    return [sum(took[at : at + BEHIND]) - BEHIND * usual for at in saved]


def state() -> dict[str, torch.Tensor]:
    """As many bytes as one stage's weights and moments."""
    return {str(i): torch.randn(WIDTH, WIDTH) for i in range(LAYERS)}


def copying(mine: Mapping[str, torch.Tensor]) -> float:
    """Milliseconds of copying one stage's state."""
    start = time.perf_counter()
    copies = [tensor.clone() for tensor in mine.values()]
    took = time.perf_counter() - start
    del copies
    return 1e3 * took


def torchs(mine: dict[str, torch.Tensor]) -> float:
    """Milliseconds for which torch's asynchronous checkpoint keeps its caller, by one process and its own thread."""
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        for name in ("warm-up", "state"):
            start = time.perf_counter()
            written = async_save(mine, checkpoint_id=Path(folder) / name)
            took = time.perf_counter() - start
            written.result()  # type: ignore[union-attr]
        distributed.destroy_process_group()  # here: nothing is forked beside its threads
    return 1e3 * took


def stopping(both: list[dict[str, torch.Tensor]]) -> float:
    """Milliseconds of writing both stages' states to a disk."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "state.pt").open("wb") as file:
        start = time.perf_counter()
        torch.save(both, file)
        file.flush()
        os.fsync(file.fileno())
        return 1e3 * (time.perf_counter() - start)


def main() -> None:
    if (environment := better_malloc()) is not None:  # as the command itself does
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    what = asked(__doc__ or "", 5)
    updates = 52 if what.short else 112
    handing: list[float] = []
    copied: list[float] = []
    candidates: dict[str, Callable[[], float]] = {
        "one checkpoint": functools.partial(ours, updates, True, handing),
        "the copies alone, nothing sent or written": functools.partial(ours, updates, False, copied),
        "one copy of one stage's state, alone": functools.partial(copying, state()),
        "torch's `async_save` of one stage's state, until it returns": functools.partial(torchs, state()),
        "a loop that stops and writes, per checkpoint": functools.partial(stopping, [state(), state()]),
    }
    found = alternate(candidates, what.repeats)
    found["an update that hands over its state, longer than others by"] = handing[2:]
    found["an update that copies it, longer by"] = copied[2:]
    report(what, table(["", "ms"], [[name, spread(values, 1)] for name, values in found.items()]), {"ms": found})


if __name__ == "__main__":
    main()
