"""Data parallelism on two processes: milliseconds of an update, beside torch's DistributedDataParallel over gloo.

Perceptrons of square layers, so large for their few rows that exchanging gradients takes longer than computing them.
Ours is ``--workers 1 --data-parallel 2 --rule 1f1b --micro-batches 1`` over shm and over gloo; cyclic is ``--layout dp
--rule cdp-v1 --micro-batches 2`` with a stage for each layer; torch's is the loop that its documentation shows. Every
process has one thread and half of the rows; plain PyTorch with that half, alone, is what computing takes. All run with
the C library's memory settings that the command uses.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.two_processes import WARM, of_two_ranks, planned, update_ms
from roundelay import Job
from roundelay.env import better_malloc
from roundelay.session.training import Session

SIZES = ((512, 3, 8), (1024, 4, 16), (2048, 4, 32))
"""Width, layers, rows of a batch."""


def model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.ReLU())))


def data(width: int, rows: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=made), torch.randint(width, (rows,), generator=made)


def step(module: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    cross_entropy(module(x), y).backward()
    optimizer.step()


SGD = functools.partial(torch.optim.SGD, lr=0.01)


def job(size: tuple[int, int, int], steps: int, optimizer: Callable[..., torch.optim.Optimizer]) -> Job:
    """The perceptron of a size as a job."""
    width, layers, rows = size
    batch = data(width, rows)
    return Job(
        model=model(width, layers),
        loss=lambda outputs, batch: cross_entropy(outputs, batch[1]),
        batches=lambda epoch: [batch] * steps,
        optimizer=optimizer,
    )


def times(
    module: nn.Module, x: Tensor, y: Tensor, steps: int, optimizer: Callable[..., torch.optim.Optimizer] = SGD
) -> float:
    """Median milliseconds of an update in a loop of plain PyTorch."""
    made = optimizer(module.parameters())
    took = []
    for _ in range(steps):
        start = time.perf_counter()
        step(module, made, x, y)
        took.append(1e3 * (time.perf_counter() - start))
    return statistics.median(took[WARM:])


def alone(width: int, layers: int, rows: int, steps: int) -> float:
    """Half of the rows in one process."""
    x, y = data(width, rows)
    return times(model(width, layers), x[::2], y[::2], steps)


def theirs(width: int, layers: int, rows: int, steps: int) -> float:
    """Torch's on two ranks."""

    def measure(rank: int) -> float:
        x, y = data(width, rows)
        return times(DistributedDataParallel(model(width, layers)), x[rank::2], y[rank::2], steps)

    return of_two_ranks(measure)


@functools.cache
def session(layout: str, transport: str, width: int, layers: int, rows: int, steps: int) -> Session:
    own = job((width, layers, rows), steps, SGD)
    if layout == "dp":
        in_layout = {"layout": "dp", "rule": "cdp-v1", "micro_batches": 2, "stages": layers, "cuts": "equal"}
        return planned(own, steps, workers=None, transport=transport, **in_layout)
    return planned(own, steps, data_parallel=2, transport=transport)


def ours(layout: str, transport: str, width: int, layers: int, rows: int, steps: int) -> float:
    """Median milliseconds from one update to the next."""
    return update_ms(session(layout, transport, width, layers, rows, steps))


def compare(
    description: str,
    sizes: Sequence[tuple[int, int, int]],
    torchs: str,
    candidates: Callable[[tuple[int, int, int], int], Mapping[str, Callable[[], float]]],
) -> None:
    """Measure candidates for every size, in their short form for the second, and print a table beside torch's.

    Args:
        description: of the benchmark.
        sizes: width, layers, rows of a batch.
        torchs: name of the candidate that the others are held against.
        candidates: from a size and a number of updates to milliseconds of an update, by name.
    """
    if (environment := better_malloc()) is not None:  # as the command itself does
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    what = asked(description, 5)
    every = {
        "width {}, {} layers, {} rows: {}".format(*size, name): measure
        for size in (sizes[1:2] if what.short else sizes)
        for name, measure in candidates(size, 25 if what.short else 60).items()
    }
    found = alternate(every, what.repeats)
    rows = []
    for name, values in found.items():
        base = statistics.median(found[f"{name.split(':')[0]}: {torchs}"])
        rows.append([name, spread(values), f"{base / statistics.median(values):.2f}"])
    report(what, table(["", "ms per update", f"times as fast as {torchs.split(',')[0]}"], rows), {"ms": found})


def candidates(size: tuple[int, int, int], steps: int) -> dict[str, Callable[[], float]]:
    found = {
        "DistributedDataParallel, gloo": functools.partial(theirs, *size, steps),
        "computing alone": functools.partial(alone, *size, steps),
    }
    for transport in ("shm", "gloo"):
        found[f"ours, {transport}"] = functools.partial(ours, "pipeline", transport, *size, steps)
        found[f"cyclic, {transport}"] = functools.partial(ours, "dp", transport, *size, steps)
    return found


if __name__ == "__main__":
    compare(__doc__ or "", SIZES, "DistributedDataParallel, gloo", candidates)
