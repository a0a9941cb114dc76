"""What a rule's predictions take: CPU time of an update on a pipeline of eight stages, beside `1f1b`.

The simulator's throughput (`run.py`) counts no arithmetic of predictions. A prediction passes over all weights of a
stage once, whatever the rows, and a forward and a backward take time for each row: so few rows are the worst case.
Eight processes share the cores, and what counts is the time of all of them together, as a slope over the
number of updates.
"""

from __future__ import annotations

import functools
import resource
import statistics
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

import roundelay
from benchmarks.common import alternate, asked, report, spread, table
from roundelay.session.training import Length, Session

D, WIDTH, HIDDEN = 8, 128, 512
RULES = {
    "1f1b": ("1f1b", None, None),
    "async mixed": ("async", None, "mixed"),
    "pipeoptim mixed": ("pipeoptim", "improved", "mixed"),
    "lookahead mixed": ("lookahead", None, "mixed"),
    "rehearse mixed": ("rehearse", None, "mixed"),
}


class Block(nn.Module):
    """Two layers beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows x WIDTH, to the same."""
        return x + self.down(functional.gelu(self.up(x)))


def job(rows: int) -> roundelay.Job:
    """A block for each stage; so many rows in each of D micro-batches."""

    def batches(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield torch.randn(D * rows, WIDTH), torch.randn(D * rows, WIDTH)

    return roundelay.Job(
        model=nn.Sequential(*(Block() for _ in range(D))),
        loss=lambda outputs, batch: functional.mse_loss(outputs, batch[1]),
        batches=batches,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    )


@functools.cache
def session(rows: int, name: str, updates: int) -> Session:
    made, (rule, predictor, backward) = job(rows), RULES[name]
    captured = roundelay.capture(made)
    plan = roundelay.plan(
        made,
        captured=captured,
        workers=D,
        rule=rule,
        predictor=predictor,
        backward=backward,
        micro_batches=D,
        transport="shm",
        cuts="equal",
    )
    return Session(made, captured, plan, 0, Length(steps=updates))


def cpu_ms(rows: int, name: str, updates: int) -> float:
    """Milliseconds of CPU time per update, of all workers together."""
    used = []
    for count in (updates // 4, updates):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        session(rows, name, count).run(notify=lambda event: None)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return 1e3 * (used[1] - used[0]) / (updates - updates // 4)


def main() -> None:
    what = asked(__doc__ or "", 5)
    updates = 16
    sizes = (2,) if what.short else (2, 16)
    rows, numbers = [], {}
    for size in sizes:
        found = alternate({name: functools.partial(cpu_ms, size, name, updates) for name in RULES}, what.repeats)
        base = statistics.median(found["1f1b"])
        rows += [[f"{size}", n, spread(v), f"{statistics.median(v) / base:.2f}"] for n, v in found.items()]
        numbers[str(size)] = found
    report(what, table(["rows of a micro-batch", "rule", "ms of CPU per update", "x 1f1b"], rows), {"ms": numbers})


if __name__ == "__main__":
    main()
