"""The real benchmark of jitter: four workers, processes over `shm`, whose forwards and backwards sleep.

Sleeping gives the core away, so four workers run at their own speed on two cores. A forward or a backward takes its
factor times a time step, from its start to its end, with what the handler itself computes in it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

import roundelay
from benchmarks.cdp.jitter_durations import RULES, Factors, Variation, counted, factor_of, factors, step_s
from benchmarks.cdp.jitter_simulated import plan_of, run_of
from benchmarks.cdp.jitter_simulated import step_of as simulated_step
from benchmarks.common import Asked, alternate, report, spread, table
from roundelay.actor.machine import Run
from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.handlers import Context, Handler, do_backward, do_forward
from roundelay.session.run_record import ExecutedInstruction
from roundelay.session.stop_condition import Length
from roundelay.session.training import Session

SIZE, WIDTH, SEED = 4, 16, 0
BATCHES = 24
TIME_STEP_S = 0.040

SHORT = (Variation(), Variation("batch", 0.2))
FULL = (Variation(), *(Variation(kind, sigma) for kind in ("action", "batch") for sigma in (0.1, 0.2, 0.3)))

Means = list[tuple[float, float]]
"""Of each repetition, of 2N time steps: the largest of the workers' own means, and the mean of all."""


def job() -> roundelay.Job:
    """Four equal layers, so small that computing them is next to nothing."""

    def batches(epoch: int) -> Any:
        while True:
            yield {"x": torch.randn(SIZE, WIDTH), "y": torch.randn(SIZE, WIDTH)}

    return roundelay.Job(
        model=nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(SIZE))),
        loss=lambda outputs, batch: nn.functional.mse_loss(outputs, batch["y"]),
        batches=batches,
        inputs=lambda batch: ((batch["x"],), {}),
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3),
    )


@functools.cache
def session(rule: str, batches: int = BATCHES) -> Session:
    """A run of the layout `dp`."""
    made = job()
    captured = roundelay.capture(made)
    plan = roundelay.plan(
        made,
        captured=captured,
        cuts="equal",
        layout="dp",
        rule=rule,
        stages=SIZE,
        micro_batches=SIZE,
        transport="shm",
    )
    return Session(made, captured, plan, 0, Length(steps=batches))


def lasting(handler: Handler, varied: Factors, time_step_s: float) -> Handler:
    """A handler that sleeps until its duration is over."""

    def slow(context: Context, run: Run) -> MicroBatch | None:
        end = time.perf_counter() + time_step_s * factor_of(varied, context.worker, run)
        header = handler(context, run)
        time.sleep(max(0.0, end - time.perf_counter()))
        return header

    return slow


def trained(rule: str, varied: Factors, time_step_s: float) -> dict[int, list[ExecutedInstruction]]:
    """Train; the executed instructions of every worker."""
    chosen = {name: lasting(do, varied, time_step_s) for name, do in HANDLERS.items()}
    run = session(rule, len(varied))
    return run.run(notify=lambda event: None, handlers=dict.fromkeys(range(SIZE), chosen)).events


HANDLERS: dict[str, Handler] = {"forward": do_forward, "backward": do_backward}


def step_of(rule: str, variation: Variation, means: Means) -> float:
    """The time of a step, of 2N time steps; adds the workers' own means to those of earlier repetitions."""
    events = trained(rule, factors(variation, SIZE, BATCHES, SEED), TIME_STEP_S)
    own = [_own_mean(of_worker) for of_worker in events.values()]
    means.append((max(own), statistics.fmean(own)))
    return step_s(events.values(), BATCHES) / (2 * SIZE * TIME_STEP_S)


def _own_mean(of_worker: Iterable[ExecutedInstruction]) -> float:
    """What a worker's forwards and backwards have taken in a batch, of 2N time steps."""
    chosen = counted(BATCHES)
    took = sum(one.end_s - one.start_s for one in of_worker if one.opcode in HANDLERS and one.g in chosen)
    return took / (len(chosen) * 2 * SIZE * TIME_STEP_S)


def simulated(rule: str, variation: Variation) -> float:
    """The same on the simulator's clock, with messages that take no time."""
    varied = factors(variation, SIZE, BATCHES, SEED)
    return simulated_step(run_of(plan_of(SIZE, rule), varied), BATCHES)


def measure(what: Asked) -> None:
    """Run everything, and print the table."""
    means: dict[str, Means] = defaultdict(list)
    cells = {f"{v}: {title}": (v, rule) for v in (SHORT if what.short else FULL) for title, rule in RULES.items()}
    candidates: dict[str, Callable[[], float]] = {
        name: functools.partial(step_of, rule, variation, means[name]) for name, (variation, rule) in cells.items()
    }
    steps = alternate(candidates, what.repeats)
    rows = [_row(name, variation, rule, steps, means[name][1:]) for name, (variation, rule) in cells.items()]
    report(what, table(COLUMNS, rows), {"step": steps, "own": means, "time step, s": TIME_STEP_S})


COLUMNS = ("variation: rule", "step / 2N", "of synchronous", "simulated", "slowest worker's own", "waiting")


def _row(name: str, variation: Variation, rule: str, steps: dict[str, list[float]], means: Means) -> Sequence[str]:
    own = statistics.median(slowest for slowest, _ in means)
    waits = statistics.median(1.0 - mean / step for (_, mean), step in zip(means, steps[name], strict=True))
    middle = statistics.median(steps[name])
    base = statistics.median(steps[f"{variation}: synchronous"])
    numbers = [f"{middle / base:.3f}", f"{simulated(rule, variation):.3f}", f"{own:.3f}", f"{waits:.1%}"]
    return [name, spread(steps[name], 3), *numbers]
