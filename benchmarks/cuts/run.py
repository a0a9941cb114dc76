"""Stage cuts: a model whose second half is 3 x as heavy as its first, cut in equal parts and by measurement.

16 residual blocks of two linear layers, the inner width 3 x as large from the ninth on, so that both halves have as
many operations. Two workers, processes over gloo with one thread each, `pipedream` with one micro-batch of 128 rows per
batch. Predicted is the slowest stage, measured the time from one backward of the last stage to the next.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import roundelay
from benchmarks.common import alternate, asked, report, spread, table
from roundelay.actor.machine import Run
from roundelay.api.cutting import WAYS, profiled
from roundelay.api.planning import LINKS
from roundelay.api.training import Length, Session
from roundelay.frontend import Captured
from roundelay.ir.micro_batch import MicroBatch
from roundelay.planner.price import Prices, Terms, priced
from roundelay.runtime.handlers import HANDLERS, Context

WIDTH, DEPTH, ROWS, HEAVIER, D, TRANSPORT = 256, 16, 128, 3, 2, "memory"

Handler = Callable[[Context, Run], MicroBatch | None]


class Block(nn.Module):
    """A residual perceptron."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, inner)
        self.out = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(torch.tanh(self.into(x)))
        return x


def job() -> roundelay.Job:
    inner = [2 * WIDTH * (HEAVIER if i >= DEPTH // 2 else 1) for i in range(DEPTH)]
    data = [{"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, WIDTH)} for _ in range(64)]
    return roundelay.Job(
        model=nn.Sequential(*(Block(width) for width in inner)),
        loss=lambda outputs, batch: nn.functional.mse_loss(outputs, batch["y"]),
        batches=lambda epoch: data,
        inputs=lambda batch: ((batch["x"],), {}),
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )


@functools.cache
def captured_job() -> tuple[roundelay.Job, Captured]:
    made = job()
    return made, roundelay.capture(made)


@functools.cache
def planned(cuts: str) -> roundelay.Plan:
    made, captured = captured_job()
    return roundelay.plan(made, captured=captured, workers=D, rule="pipedream", transport=TRANSPORT, cuts=cuts)


@functools.cache
def prices() -> Prices:
    made, captured = captured_job()
    latency_s, bytes_per_s = LINKS[TRANSPORT]
    terms = Terms(backward="stash", micro_batches=1, latency_s=latency_s, bytes_per_s=bytes_per_s)
    profile, _ = profiled(captured, next(iter(made.batches(0))))
    return priced(captured.graph, profile, terms)


def predicted(plan: roundelay.Plan) -> float:
    """Milliseconds of the slowest stage."""
    captured = captured_job()[1]
    stops = [captured.graph.index(stage.segments[-1]) + 1 for stage in plan.stages]
    return 1e3 * prices().slowest_s((0, *stops[:-1], stops[-1] + 1))


def timed(handler: Handler, spent: dict[int, float], worker: int) -> Handler:
    """A handler that counts the seconds for which its thread had a core, from the second batch on."""

    def count(context: Context, run: Run) -> MicroBatch | None:
        start = time.thread_time()
        result = handler(context, run)
        spent[worker] += time.thread_time() - start if run.g else 0.0
        return result

    return count


def measured(cuts: str, updates: int, cores: dict[str, list[float]]) -> float:
    """Milliseconds per micro-batch, from the middle of the run, where it is steady."""
    made, captured = captured_job()
    spent: dict[int, float] = defaultdict(float)
    handlers = {k: {n: timed(HANDLERS[n], spent, k) for n in ("forward", "backward", "update")} for k in range(D)}
    session = Session(made, captured, planned(cuts), 0, Length(steps=updates))
    trained = session.run(notify=lambda event: None, handlers=handlers)
    cores[cuts].append(1e3 * max(spent.values()) / (updates - 1))
    ends = [event[6] for event in trained.events[D - 1] if event[0] == "backward"]
    steps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return 1e3 * statistics.median(steps[len(steps) // 4 :])


def main() -> None:
    what = asked(__doc__ or "", 7)
    torch.manual_seed(0)
    updates = 60 if what.short else 150
    cores: dict[str, list[float]] = {cuts: [] for cuts in WAYS}
    expected = {cuts: predicted(planned(cuts)) for cuts in WAYS}
    found = alternate({cuts: functools.partial(measured, cuts, updates, cores) for cuts in WAYS}, what.repeats)
    middle, own = ({cuts: statistics.median(v) for cuts, v in numbers.items()} for numbers in (found, cores))
    rows: list[list[str]] = []
    for cuts, values in found.items():
        factors = [f"{numbers['equal'] / numbers[cuts]:.2f}" for numbers in (expected, middle, own)]
        end: Any = planned(cuts).stages[0].segments[-1]
        rows.append([cuts, end, f"{expected[cuts]:.1f}", spread(values), spread(cores[cuts]), *factors])
    columns = ["cuts", "stage 0 ends at", "predicted, ms", "measured, ms", "of a core, ms"]
    columns += ["x faster than equal: predicted", "measured", "of a core"]
    report(what, table(columns, rows), {"predicted_ms": expected, "measured_ms": found, "core_ms": cores})


if __name__ == "__main__":
    main()
