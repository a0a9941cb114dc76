"""What planning costs once a model has been examined: seconds to price candidates, and to simulate and prove a plan.

A GPT of 12 layers is captured and examined; from then on there are only facts. Priced are 500 candidates, drawn from
all combinations of 1 to 4 stages, 1 to 4 replicas, 1 to 4 workers of a mesh, every level of ZeRO, 1 to 8 micro-batches,
five rules, and recomputation of nothing or all; nothing is kept from one round to the next. Simulated over four batches
and proved are plans of 2 stages and 2 replicas: with 2 workers of a mesh each, and with ZeRO 3. Told are seconds of CPU
time of one thread.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import roundelay
from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.tensor_parallel.run import data, loss_of, model
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.planner import prove_plan
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_options import Choices
from roundelay.planner.price import BATCHES, priced
from roundelay.planner.source import Hardware
from roundelay.planning.collect_facts import collect_facts
from roundelay.planning.examined import Examined
from roundelay.simulator import simulate

WIDTH, LAYERS, ROWS = 128, 12, 16
CANDIDATES = 500
MACHINE = Hardware(2, 1)

SPACE: dict[str, tuple[Any, ...]] = {
    "workers": (1, 2, 3, 4),
    "data_parallel": (None, 2, 4),
    "tensor_parallel": (None, 2, 4),
    "zero": (None, 1, 2, 3),
    "micro_batches": (1, 2, 4, 8),
    "rule": ("1f1b", "gpipe", "zb-h1", "pipedream", "pipeoptim"),
    "recompute": ("none", "all"),
}
"""By choice what candidates are made of."""

HALVED: dict[str, Any] = {"workers": 2, "data_parallel": 2, "micro_batches": 4}
PLANS = {"data 2 x tensor 2 x 2 stages": HALVED | {"tensor_parallel": 2}, "2 stages x ZeRO 3": HALVED | {"zero": 3}}


def facts() -> ModelFacts:
    """Of the model."""
    job = roundelay.Job(
        model=model(WIDTH, LAYERS),
        loss=lambda outputs, batch: loss_of(outputs, batch[1]),
        batches=lambda epoch: [data(ROWS)],
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    )
    return collect_facts(Examined(job, roundelay.capture(job), 0, lambda *_: None))


def candidates(count: int) -> Iterator[Choices]:
    """So many that are not refused, the same each time."""
    every = list(itertools.product(*SPACE.values()))
    random.Random(0).shuffle(every)
    for values in every:
        choices = Choices(**dict(zip(SPACE, values, strict=True)))
        if count and (choices.zero is None or choices.data_parallel is not None):
            count -= 1
            yield choices


def seconds(run: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def price_all(data_of: bytes, every: list[Choices]) -> None:
    examined = ModelFacts.decode(data_of)
    for choices in every:
        priced(examined, choices, MACHINE)


def simulate_all(plan: Plan) -> None:
    simulate(plan, emit(read(plan)), stream([plan.micro_batches] * BATCHES))


def prove_anew(plan: Plan) -> None:
    prove_plan._prove.cache_clear()
    prove_plan.prove(plan)


def main() -> None:
    what = asked(__doc__ or "")
    examined = facts()
    every = list(candidates(CANDIDATES // 10 if what.short else CANDIDATES))
    plans = {name: priced(examined, Choices(**choices), MACHINE).plan for name, choices in PLANS.items()}
    runs: dict[str, Callable[[], object]] = {
        f"{len(every)} candidates priced": partial(price_all, examined.encode(), every)
    }
    for name, plan in plans.items():
        runs |= {f"{name}: simulated": partial(simulate_all, plan), f"{name}: proved": partial(prove_anew, plan)}
    found = alternate({name: partial(seconds, run) for name, run in runs.items()}, what.repeats)
    rows = [[name, spread(values, 3)] for name, values in found.items()]
    report(what, table(["", "CPU seconds"], rows), {"seconds": found})


if __name__ == "__main__":
    main()
