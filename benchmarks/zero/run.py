"""ZeRO on two processes: milliseconds of an update, beside torch's FSDP2 over gloo.

Perceptrons of square layers with AdamW. Ours is ``--workers 1 --data-parallel 2 --zero 0|1|2|3 --rule 1f1b
--micro-batches 1`` over shm and over gloo; torch's is ``fully_shard`` of every layer and of the whole, as its
documentation shows. Every process has one thread and half of the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.data_parallel.run import compare, data, job, model, times
from benchmarks.two_processes import of_two_ranks, planned, update_ms
from roundelay.session.training import Session

SIZES = ((512, 6, 64), (1024, 6, 64))
"""Width, layers, rows of a batch."""

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-4)


def sharded(whole: nn.Module, layers: Iterable[nn.Module], size: int) -> nn.Module:
    """The model with each layer, and the rest of it, sharded over so many ranks by FSDP2."""
    mesh = init_device_mesh("cpu", (size,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    return whole


def theirs(width: int, layers: int, rows: int, steps: int) -> float:
    """Torch's on two ranks."""

    def measure(rank: int) -> float:
        x, y = data(width, rows)
        own = model(width, layers)
        linear = [layer for layer in own.children() if isinstance(layer, nn.Linear)]
        return times(sharded(own, linear, 2), x[rank::2], y[rank::2], steps, ADAMW)

    return of_two_ranks(measure)


@functools.cache
def session(zero: int, transport: str, width: int, layers: int, rows: int, steps: int) -> Session:
    return planned(job((width, layers, rows), steps, ADAMW), steps, data_parallel=2, transport=transport, zero=zero)


def ours(zero: int, transport: str, width: int, layers: int, rows: int, steps: int) -> float:
    """Median milliseconds from one update to the next."""
    return update_ms(session(zero, transport, width, layers, rows, steps))


def candidates(size: tuple[int, int, int], steps: int) -> dict[str, Callable[[], float]]:
    found = {"FSDP2, gloo": functools.partial(theirs, *size, steps)}
    for transport in ("shm", "gloo"):
        for zero in (0, 1, 2, 3):
            found[f"ours, ZeRO {zero}, {transport}"] = functools.partial(ours, zero, transport, *size, steps)
    return found


if __name__ == "__main__":
    compare(__doc__ or "", SIZES, "FSDP2, gloo", candidates)
