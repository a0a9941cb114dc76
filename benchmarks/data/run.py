"""Samples per second when a batch costs ten milliseconds to load, beside data that lie in memory.

Two workers over shm, rule pipedream, M = 1, four pairs of wide layers. The loader sleeps for 8 ms per batch, as a disk
would have it wait, and works on arrays of NumPy for about 2 ms: a DataLoader without processes, and with two. Plain
PyTorch loads and computes in turn.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import alternate, asked, report, spread, table
from roundelay import Job, capture, plan
from roundelay.session.training import Length, Session

WIDTH, ROWS = 512, 64
SLEEP_S = 0.008
KINDS = ("data in memory", "loader, in line by plain PyTorch", "loader, no process", "loader, two processes")


class Slow(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Whole batches, each after a sleep and some arithmetic."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(SLEEP_S)
        rows = np.random.default_rng(index).standard_normal((ROWS, WIDTH), dtype=np.float32)
        for _ in range(6):
            rows = np.tanh(rows)
        return torch.from_numpy(rows), torch.zeros(ROWS, dtype=torch.long)


def _in_memory(epoch: int) -> Iterator[Any]:
    batch = torch.randn(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)
    for _ in range(10_000):
        yield batch


def _loaded(processes: int, epoch: int) -> DataLoader[Any]:
    return DataLoader(Slow(), batch_size=None, num_workers=processes)


def job(kind: str) -> Job:
    """The job with one of :data:`KINDS` of data."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.ReLU(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(4)]
    )
    batches = _in_memory if kind == KINDS[0] else functools.partial(_loaded, 2 if kind == KINDS[3] else 0)
    return Job(
        model=model,
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=batches,
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )


@functools.cache
def session(kind: str, updates: int) -> Session:
    """Two workers on that data."""
    made = job(kind)
    captured = capture(made)
    chosen = plan(made, captured=captured, workers=2, rule="pipedream", micro_batches=1, transport="shm", cuts="equal")
    return Session(made, captured, chosen, 0, Length(steps=updates))


def plain(updates: int) -> float:
    """Samples per second of a loop that loads, then computes."""
    made = job(KINDS[1])
    optimizer = made.optimizer(list(made.model.named_parameters()))
    times = []
    for _, batch in zip(range(updates), made.batches(0), strict=False):
        times.append(time.perf_counter())
        made.loss(made.model(batch[0]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    skip = max(1, updates // 10)
    return ROWS * (len(times) - 1 - skip) / (times[-1] - times[skip])


def ours(kind: str, updates: int) -> float:
    """Samples per second of a run."""
    return session(kind, updates).run(notify=lambda event: None).samples_per_second


def main() -> None:
    what = asked(__doc__ or "", 5)
    torch.set_num_threads(1)
    updates = 24 if what.short else 200
    candidates: dict[str, Callable[[], float]] = {
        kind: functools.partial(plain, updates) if kind == KINDS[1] else functools.partial(ours, kind, updates)
        for kind in KINDS
    }
    found = alternate(candidates, what.repeats)
    base = sorted(found[KINDS[0]])[len(found[KINDS[0]]) // 2]
    rows = [[n, spread(v, 0), f"{sorted(v)[len(v) // 2] / base:.2f}"] for n, v in found.items()]
    report(what, table(["", "samples/s", "x data in memory"], rows), {"samples_per_second": found})


if __name__ == "__main__":
    main()
