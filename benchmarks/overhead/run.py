"""What the runtime itself costs: CPU time per worker and micro-batch with stages of next to no work.

D = 2 and D = 4 stages of one 16 x 16 linear layer each, 8 micro-batches of 4 rows, SGD; ours over memory, shm and gloo,
torch's over gloo. CPU time is that of the processes, user and system, as a slope over the number of steps, so that
start and end do not count. Beside ours and torch's stand loops written out by hand for this model (`bare.py`,
`kept.py`), what is left when all else is; and our own worker with only its computing written out by hand (`ours.py`).
"""

from __future__ import annotations

import functools
import resource
import statistics
from collections.abc import Callable

import torch
from torch import nn

from benchmarks import rival
from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.overhead import bare, kept
from benchmarks.overhead.ours import handlers
from benchmarks.schedule.run import WIDTH, M, job
from roundelay import capture, plan
from roundelay.session.training import Length, Session

TRANSPORTS = ("memory", "shm", "gloo")
# forked ones first: a thread that is just ending may hold a lock, which a child would then wait for
BY_HAND = {
    "gloo": bare.over_gloo,
    "pipes": bare.over_pipes,
    "threads": bare.over_threads,
    "threads, with what is owed": kept.over_threads,
}


def theirs(size: int, steps: int) -> float:
    """Milliseconds of CPU time per worker and micro-batch."""
    found = rival.run("1F1B", size, M, steps, WIDTH, lambda stage, count: nn.Linear(WIDTH, WIDTH))
    return 1e3 * statistics.fmean(rank["cpu_s"] for rank in found) / (steps * M)


@functools.cache
def session(rule: str, transport: str, size: int, updates: int) -> Session:
    made = job(size)
    captured = capture(made)
    cuts = [(op.name,) for op in captured.graph.ops if "linear" in op.target]
    chosen = plan(made, captured=captured, cuts=cuts, workers=size, rule=rule, transport=transport, micro_batches=M)
    return Session(made, captured, chosen, 0, Length(steps=updates))


def ours(rule: str, transport: str, size: int, steps: int, *, by_hand: bool = False) -> float:
    """Milliseconds of CPU time per worker and micro-batch."""
    used = []
    for updates in (steps // 4, steps):
        own = handlers(size, M, WIDTH) if by_hand else None
        before = _cpu(transport)
        session(rule, transport, size, updates).run(notify=lambda event: None, handlers=own)
        used.append(_cpu(transport) - before)
    return 1e3 * (used[1] - used[0]) / ((steps - steps // 4) * M * size)


def _cpu(transport: str) -> float:
    """Workers are our children, or threads of our own, whose launcher then counts as well."""
    used = resource.getrusage(resource.RUSAGE_SELF if transport == "memory" else resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    what = asked(__doc__ or "", 5)
    torch.manual_seed(0)
    steps = 40 if what.short else 100
    candidates: dict[str, Callable[[], float]] = {}
    for size in (4,) if what.short else (2, 4):
        candidates[f"D = {size}: torch 1F1B"] = functools.partial(theirs, size, steps)
        for name, least in BY_HAND.items():
            candidates[f"D = {size}: by hand, {name}"] = functools.partial(least, size, M, steps, WIDTH)
        for transport in TRANSPORTS:
            mine = functools.partial(ours, "1f1b", transport, size, 2 * steps)
            candidates[f"D = {size}: ours, {transport}"] = mine
            candidates[f"D = {size}: ours, {transport}, computing by hand"] = functools.partial(mine, by_hand=True)
    found = alternate(candidates, what.repeats)
    rows = []
    for name, values in found.items():
        base = statistics.median(found[name.split(":")[0] + ": torch 1F1B"])
        rows.append([name, spread(values, 2), f"{statistics.median(values) / base:.2f}"])
    report(what, table(["", "ms of CPU per worker and micro-batch", "x torch"], rows), {"ms": found})


if __name__ == "__main__":
    main()
