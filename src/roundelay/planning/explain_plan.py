"""Explain a plan in words: the comments of its text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from roundelay.errors import counted
from roundelay.frontend import Captured
from roundelay.ir.device_names import CPU
from roundelay.ir.mesh import REPLICAS
from roundelay.ir.plan import Plan
from roundelay.ir.rule import UpdateRule, rule_named
from roundelay.lower.boxed_graph import BOX
from roundelay.lower.validate_plan import HALF
from roundelay.planning.default_workers import most_crossed, staleness
from roundelay.planning.on_mesh import on_mesh
from roundelay.schedules import schedule_named


def explain(captured: Captured, plan: Plan, reasons: Sequence[str] = ()) -> list[str]:
    """Return comments for the plan's text: the plan in words, and the reasons for its choices if they are known."""
    rule = rule_named(plan.rule)
    size = plan.num_workers
    owners = [plan.holders(stage) for stage in range(plan.num_stages)]
    graph = on_mesh(captured, plan).graph
    lines = [
        f"{type(captured.model).__name__} on {plan.arrangement} by rule {plan.rule} ({rule.source}).",
        f"{counted(len(captured.graph.ops), 'operation')}, {counted(len(captured.graph.cuts), 'place')} to cut.",
    ]
    for k, stage in enumerate(plan.stages):
        ops = [op for end in stage.segments if (op := graph.ops[graph.index(end)]).target != BOX] or [graph.ops[-1]]
        ends = ", ".join(f"{op.name} ({op.module or 'the model'}, {op.target})" for op in ops)
        plain = owners == [(worker,) for worker in range(size)] and all(own.speed == 1.0 for own in plan.workers)
        where = "" if plain else f", {_named_workers(plan, owners[k])}"
        places = dict.fromkeys(plan.devices[worker] for worker in owners[k])
        where += "" if set(places) == {CPU} else f" on {', '.join(places)}"
        lines.append(f"stage {k}{where}: up to {ends}; {stage.parameter_bytes / 1e6:.2f} MB of weights")
    for edge in plan.edges:
        lines.append(f"{edge.source}>{edge.target}: {edge.forward_bytes} bytes forward, {edge.backward_bytes} back")
    lines += _exchanges(plan)
    if plan.read_s:
        lines.append(_loader(plan))
    lines += _recompute(captured, plan)
    if plan.compile:
        lines.append("compile: for the shapes of the first batch; micro-batches of other shapes are computed without")
    if plan.precision == HALF:
        flushes = schedule_named(rule.schedule).window == "batch"
        who, where = ("every stage", "anywhere") if flushes else ("a stage", "there")
        lines.append(f"fp16: {who} skips the update of a batch whose gradients are not finite {where}")
    if rule.predicts and plan.backward == "stash":
        lines.append("stash: stage k holds up to D-1-k predicted copies of its weights beside the live one")
    return [*lines, *(notice for notice in plan_notices(plan) if notice not in lines), *reasons]


def plan_notices(plan: Plan) -> tuple[str, ...]:
    """What a person should know of a plan before it is run: how old the weights are that it reads, what limits it."""
    loader = _loader(plan) if plan.read_s else ""
    notices = (staleness(plan), _staleness_warning(plan, rule_named(plan.rule)), loader if _WARNING in loader else "")
    return tuple(notice for notice in notices if notice)


def _exchanges(plan: Plan) -> list[str]:
    """Describe what each stage's holders exchange, summed up; ``--show graph`` has every exchange."""
    lines = []
    sizes = plan.grid.sizes
    for (stage, axis, boxed), group in groupby(plan.exchanges, key=lambda e: (e.stage, e.axis, bool(e.value))):
        every, size = list(group), sizes[axis]
        most = max(sum(sum(one.bytes_sent(size, position)) for one in every) for position in range(size))
        who = f"{size} replicas" if axis == REPLICAS else f"{size} workers along {axis}"
        what = (
            f"in {len(every)} boxings a micro-batch"
            if boxed
            else "of gradients a batch" + " and of weights" * any(one.kind == "weight" for one in every)
        )
        num_bytes = sum(one.num_bytes for one in every)
        lines.append(f"stage {stage}: its {who} exchange {num_bytes} bytes {what}; each sends up to {most}")
    return lines


def _named_workers(plan: Plan, numbers: Sequence[int]) -> str:
    return ("worker " if len(numbers) == 1 else "workers ") + ", ".join(map(plan.told, numbers))


def _loader(plan: Plan) -> str:
    """Describe the loader's seconds, with a warning if it limits the rate."""
    again = plan.backward == "recompute"
    slowest = max(s.forward_s * (1 + again) + s.backward_s + s.weights_s for s in plan.stages)
    who = f"a thread of worker {plan.worker_of(0)}"
    line = f"data: {plan.read_s * 1e3:.3g} ms per micro-batch, loaded by {who} while the stages compute"
    if plan.read_s <= slowest:
        return line
    passes = f"{slowest * 1e3:.3g} ms (forward_s + backward_s)"
    return f"{line}; {_WARNING} no stage takes more than {passes}, so the loader sets the rate"


_WARNING = "warning:"

FAR = 7
"""Staleness in updates at which training with some rules was seen to fail (benchmarks/depth)."""


def _staleness_warning(plan: Plan, rule: UpdateRule) -> str:
    """A warning if stage 0 reads weights so stale that training was seen to fail; else empty."""
    crossed = most_crossed(plan)
    if schedule_named(rule.schedule).window == "batch" or rule.versions == "table" or crossed < FAR:
        return ""
    return (
        f"warning: stage 0 runs {crossed} updates behind, where training was seen to fail; give "
        f"--micro-batches {plan.num_stages - 1} or more, which leaves 1, best with --rule rehearse"
    )


def _recompute(captured: Captured, plan: Plan) -> tuple[str, ...]:
    """Describe what is recomputed with which weights, or what the model checkpoints and the plan does not recompute."""
    if not plan.recompute:
        own = ",".join(captured.checkpointed)
        return (f"recompute: not what the model checkpoints, {own}",) if own and plan.backward != "recompute" else ()
    reads = "its forward's weights: no bit differs" if plan.backward == "stash" else "the weights that it reads"
    return (f"recompute: {', '.join(plan.recompute)}; the backward runs these modules forward again, with {reads}",)
