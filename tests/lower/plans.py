"""Plans made by hand, for tests that need no model: equal stages in a chain, and whatever edges skip some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from roundelay.ir.clip import NO_CLIP
from roundelay.ir.exchange import USED, ExchangePlan, all_gather, all_reduce, reduce_scatter
from roundelay.ir.loss_scale import NO_SCALE
from roundelay.ir.plan import FORMAT, EdgePlan, Plan, StagePlan, WorkerPlan
from roundelay.ir.rule import NO_PREDICTOR, rule_named
from roundelay.ir.sbp import Split
from roundelay.ir.work import Work
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.lower.work import works_of
from roundelay.planner.free_order import with_capacities
from roundelay.schedules import schedule_named

ASYNCHRONOUS = ("pipedream", "pipeoptim", "pipedream-vertical", "spectrain", "async", "lookahead")
RULES = ("gpipe", "1f1b", "zb-h1", *ASYNCHRONOUS)

#: For tests whose every example is a run of its own.
FEW = settings(max_examples=25)

PHASES = all_reduce()
OF_WEIGHTS: dict[str, Any] = {
    "stage": 0,
    "kind": "weight-gradient",
    "axis": "replicas",
    "value": "",
    "segment": 0,
    "phases": PHASES,
    "unused": (),
}
"""What an exchange of gradients says of itself."""

STAGE: dict[str, Any] = {
    "forward_s": 1.0,
    "backward_s": 2.0,
    "weights_s": 0.0,
    "update_s": 0.0,
    "parameter_bytes": 100,
    "tape_bytes": 10,
    "owed_bytes": 4,
}


def edge_of(source: int, target: int, *, slots: int = 2, gradient: bool = True) -> EdgePlan:
    """An edge whose messages take no time."""
    return EdgePlan(source=source, target=target, slots=slots, forward_bytes=0, backward_bytes=0, gradient=gradient)


def place_of(rule: str, num_stages: int) -> tuple[int, ...]:
    """For each stage the worker that the rule's schedule suggests."""
    return schedule_named(rule_named(rule).schedule).place(num_stages)


def plan_of(
    rule: str, num_stages: int, micro_batches: int, *, slots: int = 2, skips: Sequence[EdgePlan] = (), **changes: Any
) -> Plan:
    """A plan with f = 1 s, b = 2 s, free updates and free messages; ``changes`` are further fields of the plan."""
    neighbours = [edge_of(k, k + 1, slots=slots) for k in range(num_stages - 1)]
    home = place_of(rule, num_stages)
    free = schedule_named(rule_named(rule).schedule).free
    ahead = [*range(num_stages + 1, 2, -1), 1] if free else [0] * num_stages
    fields: dict[str, Any] = {
        "format": FORMAT,
        "model": "a model",
        "rule": rule,
        "layout": "pipeline",
        "predictor": rule_named(rule).predictors[0] if rule_named(rule).predicts else NO_PREDICTOR,
        "backward": rule_named(rule).modes[0],
        "recompute": (),
        "compile": False,
        "precision": "fp32",
        "loss_scale": NO_SCALE,
        "clip": NO_CLIP,
        "ema": 0.0,
        "deterministic": False,
        "replicas": 1,
        "micro_batches": micro_batches,
        "mesh": {},
        "parameters": {},
        "outputs": {},
        "states": {},
        "sharded": ("states",),
        "shards": 0,
        "transport": "memory",
        "deadline_s": 60.0,
        "latency_s": 0.0,
        "bytes_per_s": 1.0,
        "instruction_s": 0.0,
        "read_s": 0.0,
        "input_bytes": 0,
        "workers": tuple(WorkerPlan(name=f"w{k}", device="cpu", threads=1) for k in range(len(set(home)))),
        "stages": tuple(
            StagePlan(workers=(f"w{home[k]}",), segments=(f"end_{k}",), in_flight=ahead[k], **STAGE)
            for k in range(num_stages)
        ),
        "edges": tuple(sorted([*neighbours, *skips], key=lambda edge: (edge.source, edge.target))),
        "exchanges": (),
    }
    return Plan(**{**fields, **changes})


def works(plan: Plan) -> tuple[Work, ...]:
    """What each worker of the plan is sent."""
    reading = read(plan)
    return works_of(reading, emit(reading))


def replicated(plan: Plan, replicas: int) -> Plan:
    """The plan with so many replicas of its workers, which exchange ten numbers of each stage."""
    count = plan.num_workers
    home = [plan.worker_of(stage) for stage in range(plan.num_stages)]
    exchange = ExchangePlan(**OF_WEIGHTS, dtypes=("float32", "float64"), shapes=((10,), (1,)))
    return replace(
        plan,
        replicas=replicas,
        workers=tuple(WorkerPlan(name=f"w{k}", device="cpu", threads=1) for k in range(replicas * count)),
        stages=tuple(
            replace(stage, workers=tuple(f"w{r * count + own}" for r in range(replicas)))
            for stage, own in zip(plan.stages, home, strict=True)
        ),
        exchanges=tuple(replace(exchange, stage=k) for k in range(plan.num_stages)),
    )


def by_rule(plan: Plan, rule: str) -> Plan:
    """The plan with another rule, its stages on the workers that the rule's schedule suggests."""
    home = place_of(rule, plan.num_stages)
    made = replace(
        plan,
        rule=rule,
        workers=tuple(WorkerPlan(name=f"w{k}", device="cpu", threads=1) for k in range(len(set(home)))),
        stages=tuple(replace(stage, workers=(f"w{k}",)) for stage, k in zip(plan.stages, home, strict=True)),
    )
    return with_capacities(made)


@st.composite
def plans(draw: st.DrawFn, rules: Sequence[str] = RULES, max_stages: int = 5, max_micro_batches: int = 5) -> Plan:
    """Plans of any rule and size, with or without an edge that skips stages; one slot or more.

    Edges that skip get a slot for every stage they pass, so that none of these plans comes to a standstill. Where a
    worker has two stages, their number is even, and every edge has as many slots as there are stages, as planned.
    """
    rule = draw(st.sampled_from(rules))
    paired = schedule_named(rule_named(rule).schedule).stages_per_worker == 2
    num_stages = 2 * draw(st.integers(1, max_stages // 2)) if paired else draw(st.integers(1, max_stages))
    pairs = [(k, j) for k in range(num_stages) for j in range(k + 2, num_stages)]
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=2)) if pairs else []
    skips = [edge_of(k, j, slots=num_stages if paired else j - k, gradient=draw(st.booleans())) for k, j in chosen]
    slots = num_stages if paired else draw(st.integers(1, 3))
    return plan_of(rule, num_stages, draw(st.integers(1, max_micro_batches)), slots=slots, skips=skips)


@st.composite
def counts_for(draw: st.DrawFn, plan: Plan, max_micro_batches: int = 12) -> list[int]:
    """Micro-batches of each batch of a run: never more than M, often fewer, and not too many in all."""
    counts = draw(st.lists(st.integers(1, plan.micro_batches), min_size=1, max_size=max_micro_batches))
    while sum(counts) > max_micro_batches:
        counts.pop()
    return counts or [1]


def on_grid(plan: Plan, replicas: int, parts: int, zero: int = 0) -> Plan:
    """The plan with replicas of a mesh, whose stages box a value behind their first segment, with ZeRO or without."""
    wide = replicated(plan, replicas * parts)
    boxed = ExchangePlan(**OF_WEIGHTS, dtypes=("float32",), shapes=((8, 4),))
    whole = replace(boxed, dtypes=("float32", "float64"), shapes=((10,), (1,)))
    rows = replace(boxed, shapes=((replicas, 5),))
    of_stage = []
    if parts > 1:
        of_mesh = replace(boxed, axis="tensor", value="x_box")
        of_stage += [replace(of_mesh, kind=kind) for kind in ("boxed", "boxed-gradient")]
        of_stage.append(replace(whole, axis="tensor"))
    if replicas > 1:
        of_stage.append(whole)
        if zero == 1:
            of_stage.append(replace(rows, kind="weight", phases=all_gather()))
        if zero == 3:
            of_stage.append(replace(rows, kind="gradient-parts", phases=reduce_scatter()))
            of_stage += [replace(rows, kind=kind, phases=all_gather(), segment=i) for kind in USED for i in (0, 1)]
    split = (("replicas", Split(0)),)
    return replace(
        wide,
        replicas=replicas,
        mesh={"tensor": parts} if parts > 1 else {},
        states={"*": split} if zero and replicas > 1 else {},
        sharded=("states", "gradients", "weights")[: max(zero, 1)],
        exchanges=tuple(replace(exchange, stage=k) for k in range(plan.num_stages) for exchange in of_stage),
    )


@st.composite
def grids(draw: st.DrawFn) -> Plan:
    """Plans of replicas and meshes, with any times."""
    plan = draw(plans((*RULES, "zb-v"), 4, 3))
    plan = on_grid(plan, draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from((0, 1, 3))))
    seconds = st.floats(0.0, 3.0)
    times = ("forward_s", "backward_s", "weights_s", "update_s")
    return replace(
        plan,
        latency_s=draw(seconds),
        bytes_per_s=draw(st.floats(1.0, 100.0)),
        read_s=draw(seconds),
        input_bytes=draw(st.integers(0, 50)),
        stages=tuple(replace(stage, **{name: draw(seconds) for name in times}) for stage in plan.stages),
        edges=tuple(replace(edge, forward_bytes=draw(st.integers(0, 50))) for edge in plan.edges),
    )
