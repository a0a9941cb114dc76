"""Tensor parallelism on two processes: milliseconds of an update, beside one process and torch's parallelize_module.

A GPT of plain modules. Ours is ``--workers 1 --tensor-parallel 2 --rule 1f1b --micro-batches 1`` over shm and over
gloo; torch's is ``parallelize_module`` with columns and rows of the same layers over gloo, the loop that its tutorial
shows. Every process has one thread. All run with the C library's memory settings that the command uses.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.two_processes import WARM, of_two_ranks, planned, update_ms
from roundelay import Job
from roundelay.env import better_malloc
from roundelay.session.training import Session

SIZES = ((256, 4, 8), (512, 4, 8))
"""Width, layers, rows of a batch."""

LENGTH, SYMBOLS, HEAD = 128, 256, 32


class Block(nn.Module):
    """A layer of a transformer decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Rows x tokens x width."""
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A small GPT over bytes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rows x tokens to rows x tokens x symbols."""
        hidden = self.symbols(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def model(width: int, layers: int) -> Gpt:
    torch.manual_seed(0)
    return Gpt(width, layers)


def data(rows: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    text = torch.randint(SYMBOLS, (rows, LENGTH + 1), generator=made)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), y.flatten())


def times(module: nn.Module, rows: int, steps: int) -> float:
    """Median milliseconds of an update in a loop of plain PyTorch."""
    optimizer, (x, y), took = torch.optim.SGD(module.parameters(), lr=0.01), data(rows), []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss_of(module(x), y).backward()
        optimizer.step()
        took.append(1e3 * (time.perf_counter() - start))
    return statistics.median(took[WARM:])


def alone(width: int, layers: int, rows: int, steps: int) -> float:
    """One process."""
    return times(model(width, layers), rows, steps)


def theirs(width: int, layers: int, rows: int, steps: int) -> float:
    """Torch's on two ranks."""

    def measure(rank: int) -> float:
        mesh, module = init_device_mesh("cpu", (2,)), model(width, layers)
        columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
        rows_of = dict.fromkeys(("out", "down"), RowwiseParallel())
        for block in module.blocks:
            parallelize_module(block, mesh, columns | rows_of)
        return times(module, rows, steps)

    return of_two_ranks(measure)


@functools.cache
def session(transport: str, width: int, layers: int, rows: int, steps: int) -> Session:
    batch = data(rows)
    job = Job(
        model=model(width, layers),
        loss=lambda outputs, batch: loss_of(outputs, batch[1]),
        batches=lambda epoch: [batch] * steps,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
    )
    return planned(job, steps, tensor_parallel=2, transport=transport)


def ours(transport: str, width: int, layers: int, rows: int, steps: int) -> float:
    """Median milliseconds from one update to the next."""
    return update_ms(session(transport, width, layers, rows, steps))


def main() -> None:
    if (environment := better_malloc()) is not None:  # as the command itself does
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    what = asked(__doc__ or "", 5)
    torch.set_num_threads(1)
    steps = 12 if what.short else 25
    candidates: dict[str, Callable[[], float]] = {}
    for size in SIZES[:1] if what.short else SIZES:
        name = "width {}, {} layers, {} rows".format(*size)
        candidates[f"{name}: one process"] = functools.partial(alone, *size, steps)
        candidates[f"{name}: parallelize_module, gloo"] = functools.partial(theirs, *size, steps)
        for transport in ("shm", "gloo"):
            candidates[f"{name}: ours, {transport}"] = functools.partial(ours, transport, *size, steps)
    found = alternate(candidates, what.repeats)
    rows = []
    for name, values in found.items():
        base = statistics.median(found[name.split(":")[0] + ": one process"])
        rows.append([name, spread(values), f"{base / statistics.median(values):.2f}"])
    report(what, table(["", "ms per update", "times as fast as one process"], rows), {"ms": found})


if __name__ == "__main__":
    main()
