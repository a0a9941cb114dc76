"""Stage cuts: a model whose second half is 3 x as heavy as its first, cut in equal parts and by measurement.

16 residual blocks, the second eight of them 3 x as heavy, so that both halves have as many operations. Twice: blocks
that keep a core busy for a fixed time, so that nothing but the cut matters, and blocks of two linear layers, the inner
width 3 x as large from the ninth on, whose workers share the machine's caches. Two workers, processes of one thread
over shared memory, `pipedream` with one micro-batch of 128 rows per batch. Predicted is the slowest stage, measured
the time from one backward of the last stage to the next.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import Tensor, nn

import roundelay
from benchmarks.common import Asked, alternate, asked, report, spread, table
from roundelay.frontend import Captured
from roundelay.ir.transports import TRANSPORTS
from roundelay.planner.choose_cuts import WAYS
from roundelay.planner.cost_model import CostParameters, StageCosts, stage_costs
from roundelay.planning.profiling import profiled
from roundelay.session.training import Length, Session

WIDTH, DEPTH, ROWS, HEAVIER, D, TRANSPORT = 256, 16, 128, 3, 2, "shm"

FORWARD_S, BACKWARD_S = 0.0008, 0.0016  # of a light block that only takes time
KINDS = ("timed", "computing")


@torch.library.custom_op("roundelay_bench::rest", mutates_args=())
def rest(x: Tensor, forward_s: float, backward_s: float) -> Tensor:
    """The identity, which keeps its core busy; in its backward, too."""
    until = time.perf_counter() + forward_s
    while time.perf_counter() < until:
        pass
    return x.clone()


@rest.register_fake
def _(x: Tensor, forward_s: float, backward_s: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.backward_s = inputs[2]


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return rest(grad, ctx.backward_s, 0.0), None, None


rest.register_autograd(_back, setup_context=_keep)


class Timed(nn.Module):
    """A block that has next to nothing to compute, and takes its time."""

    def __init__(self, weight: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return rest(x + self.shift, FORWARD_S * self.weight, BACKWARD_S * self.weight)


class Block(nn.Module):
    """A residual perceptron."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, inner)
        self.out = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(torch.tanh(self.into(x)))
        return x


def job(kind: str) -> roundelay.Job:
    weights = [HEAVIER if i >= DEPTH // 2 else 1 for i in range(DEPTH)]
    blocks = [Timed(weight) if kind == "timed" else Block(2 * WIDTH * weight) for weight in weights]
    data = [{"x": torch.randn(ROWS, WIDTH), "y": torch.randn(ROWS, WIDTH)} for _ in range(64)]
    return roundelay.Job(
        model=nn.Sequential(*blocks),
        loss=lambda outputs, batch: nn.functional.mse_loss(outputs, batch["y"]),
        batches=lambda epoch: data,
        inputs=lambda batch: ((batch["x"],), {}),
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )


@functools.cache
def captured_job(kind: str) -> tuple[roundelay.Job, Captured]:
    made = job(kind)
    return made, roundelay.capture(made)


@functools.cache
def planned(kind: str, cuts: str) -> roundelay.Plan:
    made, captured = captured_job(kind)
    return roundelay.plan(made, captured=captured, workers=D, rule="pipedream", transport=TRANSPORT, cuts=cuts)


@functools.cache
def prices(kind: str) -> StageCosts:
    made, captured = captured_job(kind)
    link = TRANSPORTS[TRANSPORT]
    terms = CostParameters(micro_batches=1, latency_s=link.latency_s, bytes_per_s=link.bytes_per_s)
    profile, _ = profiled(captured, next(iter(made.batches(0))), threads=1)
    return stage_costs(captured.graph, profile, terms)


def predicted(kind: str, cuts: str) -> float:
    """Milliseconds of the slowest stage."""
    graph = captured_job(kind)[1].graph
    stops = [graph.index(stage.segments[-1]) + 1 for stage in planned(kind, cuts).stages]
    return 1e3 * prices(kind).slowest_s((0, *stops[:-1], stops[-1] + 1))


def measured(kind: str, cuts: str, updates: int) -> float:
    """Milliseconds per micro-batch, from the middle of the run, where it is steady."""
    made, captured = captured_job(kind)
    session = Session(made, captured, planned(kind, cuts), 0, Length(steps=updates))
    trained = session.run(notify=lambda event: None)
    ends = [event[6] for event in trained.events[D - 1] if event[0] == "backward"]
    steps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return 1e3 * statistics.median(steps[len(steps) // 4 :])


def compared(kind: str, updates: int, repeats: int) -> tuple[list[list[str]], dict[str, object]]:
    """Rows of the table, and their numbers."""
    expected = {cuts: predicted(kind, cuts) for cuts in WAYS}
    found = alternate({cuts: functools.partial(measured, kind, cuts, updates) for cuts in WAYS}, repeats)
    middle = {cuts: statistics.median(values) for cuts, values in found.items()}
    rows: list[list[str]] = []
    for cuts, values in found.items():
        factors = [f"{numbers['equal'] / numbers[cuts]:.2f}" for numbers in (expected, middle)]
        end: Any = planned(kind, cuts).stages[0].segments[-1]
        rows.append([f"{kind}, {cuts}", end, f"{expected[cuts]:.1f}", spread(values), *factors])
    return rows, {"predicted_ms": expected, "measured_ms": found}


def slower_together(seconds: float = 1.0) -> float:
    """How much slower a heavy block's product is on one core while the other one does the same."""
    x, weight = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, 2 * WIDTH * HEAVIER)

    def rate() -> float:
        until, count = time.perf_counter() + seconds, 0
        while time.perf_counter() < until:
            torch.tanh(x @ weight)
            count += 1
        return count / seconds

    rate()  # warm
    factors = []
    for _ in range(3):
        alone = rate()
        if not (child := os.fork()):
            rate()
            os._exit(0)
        factors.append(alone / rate())
        os.waitpid(child, 0)
    return statistics.median(factors)


def main() -> None:
    what = asked(__doc__ or "", 7)
    with tempfile.TemporaryDirectory() as fresh:
        os.environ["ROUNDELAY_CACHE"] = fresh  # what an earlier run has measured says nothing of today
        compare(what)


def compare(what: Asked) -> None:
    torch.manual_seed(0)
    together = slower_together()
    found = {kind: compared(kind, 40 if what.short else 80, what.repeats) for kind in KINDS}
    columns = ["blocks and cuts", "stage 0 ends at", "predicted, ms", "measured, ms"]
    columns += ["x faster than equal: predicted", "measured"]
    text = table(columns, [row for rows, _ in found.values() for row in rows])
    text += f"\n\nA core computes {together:.2f} x slower while the other one computes."
    report(what, text, {"slower_together": together, **{kind: numbers for kind, (_, numbers) in found.items()}})


if __name__ == "__main__":
    main()
