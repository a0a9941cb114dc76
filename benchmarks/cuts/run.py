"""Stage cuts: a model whose second half is 3 x as heavy as its first, cut in equal parts and by measurement.

16 residual blocks, the second eight of them 3 x as heavy, so that both halves have as many operations. Twice: blocks
that sleep, so that nothing but the cut matters, and blocks of two linear layers, the inner width 3 x as large from the
ninth on, whose workers share the machine's caches. Two workers, threads of one process with one thread each,
`pipedream` with one micro-batch of 128 rows per batch. Predicted is the slowest stage, measured the time from one
backward of the last stage to the next.
"""

from __future__ import annotations

import functools
import itertools
import os
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

FORWARD_S, BACKWARD_S = 0.0008, 0.0016  # of a light block that sleeps
KINDS = ("sleeping", "computing")

Handler = Callable[[Context, Run], MicroBatch | None]


@torch.library.custom_op("roundelay_bench::rest", mutates_args=())
def rest(x: Tensor, forward_s: float, backward_s: float) -> Tensor:
    """The identity, which sleeps; in its backward, too."""
    time.sleep(forward_s)
    return x.clone()


@rest.register_fake
def _(x: Tensor, forward_s: float, backward_s: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.backward_s = inputs[2]


def _back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return rest(grad, ctx.backward_s, 0.0), None, None


rest.register_autograd(_back, setup_context=_keep)


class Sleeper(nn.Module):
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
    blocks = [Sleeper(weight) if kind == "sleeping" else Block(2 * WIDTH * weight) for weight in weights]
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
def prices(kind: str) -> Prices:
    made, captured = captured_job(kind)
    latency_s, bytes_per_s = LINKS[TRANSPORT]
    terms = Terms(backward="stash", micro_batches=1, latency_s=latency_s, bytes_per_s=bytes_per_s)
    profile, _ = profiled(captured, next(iter(made.batches(0))))
    return priced(captured.graph, profile, terms)


def predicted(kind: str, cuts: str) -> float:
    """Milliseconds of the slowest stage."""
    graph = captured_job(kind)[1].graph
    stops = [graph.index(stage.segments[-1]) + 1 for stage in planned(kind, cuts).stages]
    return 1e3 * prices(kind).slowest_s((0, *stops[:-1], stops[-1] + 1))


def timed(handler: Handler, spent: dict[int, float], worker: int) -> Handler:
    """A handler that counts the seconds for which its thread had a core, from the second batch on."""

    def count(context: Context, run: Run) -> MicroBatch | None:
        start = time.thread_time()
        result = handler(context, run)
        spent[worker] += time.thread_time() - start if run.g else 0.0
        return result

    return count


def measured(kind: str, cuts: str, updates: int, cores: dict[str, list[float]]) -> float:
    """Milliseconds per micro-batch, from the middle of the run, where it is steady."""
    made, captured = captured_job(kind)
    spent: dict[int, float] = defaultdict(float)
    handlers = {k: {n: timed(HANDLERS[n], spent, k) for n in ("forward", "backward", "update")} for k in range(D)}
    session = Session(made, captured, planned(kind, cuts), 0, Length(steps=updates))
    trained = session.run(notify=lambda event: None, handlers=handlers)
    cores[cuts].append(1e3 * max(spent.values()) / (updates - 1))
    ends = [event[6] for event in trained.events[D - 1] if event[0] == "backward"]
    steps = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return 1e3 * statistics.median(steps[len(steps) // 4 :])


def compared(kind: str, updates: int, repeats: int) -> tuple[list[list[str]], dict[str, object]]:
    """Rows of the table, and their numbers."""
    cores: dict[str, list[float]] = {cuts: [] for cuts in WAYS}
    expected = {cuts: predicted(kind, cuts) for cuts in WAYS}
    found = alternate({cuts: functools.partial(measured, kind, cuts, updates, cores) for cuts in WAYS}, repeats)
    middle, own = ({cuts: statistics.median(v) for cuts, v in numbers.items()} for numbers in (found, cores))
    rows: list[list[str]] = []
    for cuts, values in found.items():
        factors = [f"{numbers['equal'] / numbers[cuts]:.2f}" for numbers in (expected, middle)]
        end: Any = planned(kind, cuts).stages[0].segments[-1]
        of_core = spread(cores[cuts]) if kind == "computing" else ""
        rows.append([f"{kind}, {cuts}", end, f"{expected[cuts]:.1f}", spread(values), of_core, *factors])
    return rows, {"predicted_ms": expected, "measured_ms": found, "core_ms": cores, "core_median_ms": own}


def slower_together(seconds: float = 1.0) -> float:
    """How much slower a heavy block's product is on one core while the other one does the same."""
    x, weight = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, 2 * WIDTH * HEAVIER)

    def rate() -> float:
        until, count = time.perf_counter() + seconds, 0
        while time.perf_counter() < until:
            torch.tanh(x @ weight)
            count += 1
        return count / seconds

    alone = rate()
    if not (child := os.fork()):
        rate()
        os._exit(0)
    both = rate()
    os.waitpid(child, 0)
    return alone / both


def main() -> None:
    what = asked(__doc__ or "", 7)
    torch.manual_seed(0)
    together = slower_together()
    found = {kind: compared(kind, 60 if what.short else 150, what.repeats) for kind in KINDS}
    columns = ["blocks and cuts", "stage 0 ends at", "predicted, ms", "measured, ms", "of a core, ms"]
    columns += ["x faster than equal: predicted", "measured"]
    text = table(columns, [row for rows, _ in found.values() for row in rows])
    text += f"\n\nA core computes {together:.2f} x slower while the other one computes."
    report(what, text, {"slower_together": together, **{kind: numbers for kind, (_, numbers) in found.items()}})


if __name__ == "__main__":
    main()
