"""Cases of runs on devices: a rule, an option, a model and where the workers compute. Each must equal its reference."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch.optim import SGD, AdamW, Optimizer

from roundelay.api.train_job import train
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.job import Named
from roundelay.planning.planning import plan as planned
from roundelay.schedules import LAYOUTS, schedule_named
from tests.equivalence.cells import DEADLINE_S, VARIANTS, Bench, Variant
from tests.equivalence.pairwise import covering
from tests.standin.own_models import OWN
from tests.zoo import MODELS, ZOO

STEPS, MICRO_BATCHES, STAGES = 3, 3, 2

LINES = (
    "gpipe",
    "1f1b",
    "zb-h1",
    "zb-h1 recompute",
    "interleaved-1f1b",
    "zb-v",
    "pipedream",
    "pipedream-vertical",
    "pipedream-2bw",
    "cdp-v1",
    "cdp-v2",
    "async mixed",
    "spectrain improved mixed",
    "spectrain paper recompute",
    "lookahead mixed",
    "rehearse mixed",
    "pipeoptim improved stash",
    "pipeoptim paper mixed",
    "pipeoptim released-code recompute",
)
"""Every rule, each predictor and each backward mode."""

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16", "loss_scale": "dynamic:4194304:2"},
    "clip stage": {"clip": "stage:0.05"},
    "clip previous": {"clip": "previous:0.05"},
    "clip global": {"clip": "global:0.05"},
    "ema": {"ema": 0.9},
    "recompute": {"recompute": "all"},
    "replicas": {"data_parallel": 2},
    "zero": {"data_parallel": 2, "zero": 1},
    "zero 3": {"data_parallel": 2, "zero": 3},
    "mesh": {"tensor_parallel": 2},
    "all": {"data_parallel": 2, "zero": 1, "tensor_parallel": 2, "clip": "previous:0.05", "ema": 0.9},
}
"""Choices of a plan. The loss scale of fp16 overflows at first."""

PLACES = {"one": ("cuda:0",), "two": ("cuda:0", "cuda:1"), "mixed": ("cpu", "cuda:0")}
"""The devices that workers take by turns."""

OPTIMIZERS: dict[str, Callable[[Named], Optimizer]] = {
    "adamw": partial(AdamW, lr=2e-3),
    "fused": partial(AdamW, lr=2e-3, fused=True),
    "momentum": partial(SGD, lr=0.05, momentum=0.9),
}
ALIKE: Callable[[Named], Optimizer] = partial(AdamW, lr=2e-3, foreach=False)
"""One that computes on the CPU as on a device, for stages on both."""

SMALL = ("mlp", "token_mean", "batchnorm", "dropout_heavy", "buffer_reader", "views", "lstm", "tied_head")
ON_MESH = ("mlp", "token_mean")
"""Models of which a mesh can have parts: a perceptron and attention."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run.

    Args:
        line: a key of :data:`VARIANTS`, or a layout and a rule.
        option: a key of :data:`OPTIONS`.
        model: of the zoo, or of our own.
        place: a key of :data:`PLACES`.
        optimizer: a key of :data:`OPTIMIZERS`.
    """

    line: str
    option: str = "nothing"
    model: str = "mlp"
    place: str = "one"
    optimizer: str = "adamw"

    def __str__(self) -> str:
        return " | ".join(dataclasses.astuple(self))


@cache
def bench(model: str) -> Bench:
    """A model of the zoo or of our own, captured once."""
    return Bench((MODELS | OWN)[model])


def plan_of(case: Case) -> Plan:
    """The plan of a case, as planned and read from a file."""
    place, devices = bench(case.model), PLACES[case.place]
    always: dict[str, Any] = {"captured": place.captured, "deadline_s": DEADLINE_S, "cuts": "roofline"}
    layout, _, rule = case.line.partition(" ")
    if layout in LAYOUTS:
        made = planned(place.job(), layout=layout, rule=rule, stages=STAGES, micro_batches=MICRO_BATCHES, **always)
        workers = [dataclasses.replace(w, device=devices[k % len(devices)]) for k, w in enumerate(made.workers)]
        return Plan.parse(dataclasses.replace(made, workers=tuple(workers), **OPTIONS[case.option]).text())
    variant, asked = VARIANTS[case.line], OPTIONS[case.option]
    workers_each = 1 if case.option == "all" else STAGES
    parts = asked.get("tensor_parallel", 1)
    count = workers_each * asked.get("data_parallel", 1) * parts
    each = parts if case.place == "mixed" else 1  # all that hold a stage are of one kind
    named = ",".join(devices[k // each % len(devices)] for k in range(count))
    chosen: dict[str, Any] = {"micro_batches": MICRO_BATCHES, "backward": variant.backward} | asked
    if variant.predictor != "none":
        chosen["predictor"] = variant.predictor
    made = planned(place.job(), workers=workers_each, rule=variant.rule, devices=named, **chosen, **always)
    return Plan.parse(made.text())


def run(case: Case) -> str:
    """What differs between the run and its reference; empty if nothing does."""
    place = bench(case.model)
    optimizer = ALIKE if case.place == "mixed" else OPTIMIZERS[case.optimizer]
    found = place.verify(plan_of(case), place.job(optimizer), steps=STEPS)
    return "" if found.equal else found.difference or "not equal"


def races_of(case: Case) -> list[str]:
    """Uses of memory in a run that the stand-in saw not to be ordered between streams; on a real GPU none are seen.

    The run is no verification, whose host reads everything and so waits for everything.
    """
    device = sys.modules.get("tests.standin.device")
    place = bench(case.model)
    place.restore()
    before = len(device.races()) if device else 0
    optimizer = ALIKE if case.place == "mixed" else OPTIMIZERS[case.optimizer]
    train(place.job(optimizer), plan=plan_of(case), steps=STEPS)
    return list(device.races(before)) if device else []


def possible(row: Mapping[str, str]) -> Case:
    """The case of a row, with what its rule cannot have replaced by what is next to it."""
    case = Case(**row)
    option = _possible_option(case.option, VARIANTS[case.line])
    place = "two" if option == "all" and case.place == "mixed" else case.place  # it has one stage
    fits = option not in ("mesh", "all") or case.model in ON_MESH
    model = case.model if fits else ON_MESH[LINES.index(case.line) % len(ON_MESH)]
    return dataclasses.replace(case, option=option, model=model, place=place)


def _possible_option(option: str, variant: Variant) -> str:
    if option == "recompute" and variant.backward == "recompute":
        return "nothing"
    if option == "clip global" and schedule_named(rule_named(variant.rule).schedule).window != "batch":
        return "clip previous"
    if option in ("mesh", "all") and (variant.backward == "recompute" or variant.predictor == "partial"):
        return "replicas"
    if option == "all" and variant.rule == "lookahead":  # it predicts on a single stage too, without its states
        return "mesh"
    flushes = schedule_named(rule_named(variant.rule).schedule).window == "batch"
    if option == "zero 3" and (not flushes or variant.backward == "recompute"):
        option = "zero"
    return "replicas" if option == "zero" and variant.predictor != "none" else option


def pairs() -> list[Case]:
    """Each line, option, small model, place and optimizer with each value of every other."""
    factors = {"line": LINES, "option": tuple(OPTIONS), "model": SMALL, "place": tuple(PLACES)}
    rows = covering(factors | {"optimizer": tuple(OPTIMIZERS)})
    return list(dict.fromkeys(possible(row) for row in rows))


def each_once(cases: Iterable[Case]) -> list[Case]:
    """Of some cases enough to meet every line, option, model, place and optimizer that they have."""
    met: set[tuple[int, str]] = set()
    kept = []
    for case in cases:
        values = set(enumerate(dataclasses.astuple(case)))
        if values - met:
            met |= values
            kept.append(case)
    return kept


def models(names: tuple[str, ...] = (*ZOO, *OWN)) -> Iterator[Case]:
    """Each model under two rules."""
    for name in names:
        yield Case("1f1b", model=name)
        yield Case("pipeoptim improved stash", model=name, place="two", optimizer="fused")


def layouts() -> Iterator[Case]:
    """Each form of cyclic data parallelism under its rules."""
    for k, layout in enumerate(LAYOUTS):
        for rule in ("cdp-v1", "cdp-v2"):
            yield Case(f"{layout} {rule}", model=("mlp", "batchnorm")[k % 2], place=("one", "two")[k % 2])
    for layout in ("single", "dp"):
        for rule in ("gpipe", "1f1b"):
            yield Case(f"{layout} {rule}", option="clip global", model="mlp", place="two")
