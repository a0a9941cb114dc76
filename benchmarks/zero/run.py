"""ZeRO on two processes: milliseconds of an update, beside torch's FSDP2 over gloo.

Perceptrons of square layers with AdamW. Ours is ``--workers 1 --data-parallel 2 --zero 0|1|2|3 --rule 1f1b
--micro-batches 1`` over shm and over gloo; torch's is ``fully_shard`` of every layer and of the whole, as its
documentation shows. Every process has one thread and half of the rows.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.data_parallel.run import data, model, step
from benchmarks.two_processes import WARM, of_two_ranks, planned, update_ms
from roundelay import Job
from roundelay.env import better_malloc
from roundelay.session.training import Session

SIZES = ((512, 6, 64), (1024, 6, 64))
"""Width, layers, rows of a batch."""


def theirs(width: int, layers: int, rows: int, steps: int) -> float:
    """Torch's on two ranks."""

    def measure(rank: int) -> float:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        x, y = data(width, rows)
        own, mesh = model(width, layers), init_device_mesh("cpu", (2,))
        for layer in own.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(own, mesh=mesh)
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-4)
        took = []
        for _ in range(steps):
            start = time.perf_counter()
            step(own, optimizer, x[rank::2], y[rank::2])
            took.append(1e3 * (time.perf_counter() - start))
        return statistics.median(took[WARM:])

    return of_two_ranks(measure)


@functools.cache
def session(zero: int, transport: str, width: int, layers: int, rows: int, steps: int) -> Session:
    batch = data(width, rows)
    job = Job(
        model=model(width, layers),
        loss=lambda outputs, batch: cross_entropy(outputs, batch[1]),
        batches=lambda epoch: [batch] * steps,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
    )
    return planned(job, steps, data_parallel=2, transport=transport, zero=zero)


def ours(zero: int, transport: str, width: int, layers: int, rows: int, steps: int) -> float:
    """Median milliseconds from one update to the next."""
    return update_ms(session(zero, transport, width, layers, rows, steps))


def main() -> None:
    if (environment := better_malloc()) is not None:  # as the command itself does
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    what = asked(__doc__ or "", 5)
    steps = 25 if what.short else 60
    candidates: dict[str, Callable[[], float]] = {}
    for size in SIZES[1:] if what.short else SIZES:
        name = "width {}, {} layers, {} rows".format(*size)
        candidates[f"{name}: FSDP2, gloo"] = functools.partial(theirs, *size, steps)
        for transport in ("shm", "gloo"):
            for zero in (0, 1, 2, 3):
                candidates[f"{name}: ours, ZeRO {zero}, {transport}"] = functools.partial(
                    ours, zero, transport, *size, steps
                )
    found = alternate(candidates, what.repeats)
    rows = []
    for name, values in found.items():
        base = statistics.median(found[name.split(":")[0] + ": FSDP2, gloo"])
        rows.append([name, spread(values), f"{base / statistics.median(values):.2f}"])
    report(what, table(["", "ms per update", "times as fast as FSDP2"], rows), {"ms": found})


if __name__ == "__main__":
    main()
