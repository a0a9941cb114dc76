"""The physical graph as text: what each stage's workers compute between exchanges, and every exchange (OneFlow, 3).

::

    stage 0 on workers 0, 1 (tensor = 2)
      segment 0: 12 operations, embedding to linear_3
        add_5_box: P>B of add_5, 65536 bytes over tensor by reduce-scatter(0),all-gather(0); each sends up to 65536
    left whole: pos.weight: by columns: ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from roundelay.errors import counted
from roundelay.frontend import Captured
from roundelay.ir.bucket import COUNTED
from roundelay.ir.exchange import GRADIENT_PARTS, USED, WEIGHT_BACKWARD, WEIGHT_FORWARD, ExchangePlan
from roundelay.ir.graph import Parameter
from roundelay.ir.mesh import REPLICAS
from roundelay.ir.plan import Plan
from roundelay.ir.residence import LOW
from roundelay.ir.rule import NO_PREDICTOR
from roundelay.ir.stage import StageSpec
from roundelay.lower.boxed_graph import BOX
from roundelay.lower.partition import partition
from roundelay.planner.left_whole import by_pattern, left_whole
from roundelay.planning.on_mesh import mesh_facts, on_mesh, without_writes_of

LEGEND = (
    "S(1): split along dimension 1; S(1/3*64): each of its 3 blocks, in units of 64; B: whole on each worker; P: the "
    "sum of what workers have; P(max): the largest of it. S(1)>B: an exchange that makes the second of the first. "
    "Segment: operations that run together"
)


@dataclass(frozen=True, slots=True)
class PhysicalGraph:
    """A plan's physical graph.

    Args:
        lines: as text.
        boxings: each with what is boxed, ``from`` and ``to`` which signature, the ``axis``, ``when`` in each forward or
            backward, ``by`` which phases, its ``bytes``, and how many a worker ``sends`` at most.
        left_whole: why weights of two dimensions or more are whole on each worker, by name.
    """

    lines: Sequence[str]
    boxings: Sequence[Mapping[str, str | int]]
    left_whole: Mapping[str, str]


def physical_graph(captured: Captured, plan: Plan) -> PhysicalGraph:
    """A plan's physical graph.

    Args:
        captured: the model, on no mesh.
        plan: any.
    """
    boxed = on_mesh(captured, plan)
    stages = partition(boxed.graph, [stage.segments for stage in plan.stages], plan.recompute)
    lines = [line for spec in stages.stages for line in _of_stage(boxed, plan, spec)]
    legend = [LEGEND] if plan.exchanges else []
    stored = [f"stored whole: {name}: {why}" for name, why in by_pattern(_stored_whole(boxed, plan)).items()]
    if boxed.sharding is None:
        return PhysicalGraph([*legend, *lines, *stored], (), {})
    whole = left_whole(mesh_facts(without_writes_of(captured)), boxed.sharding.parameters, plan.mesh_size)
    told = [f"left whole: {name}: {why}" for name, why in by_pattern(whole).items()]
    boxings = [_boxing(boxed, exchange, plan.mesh) for exchange in plan.exchanges if exchange.value]
    return PhysicalGraph([*legend, *lines, *told, *stored], boxings, whole)


def _stored_whole(captured: Captured, plan: Plan) -> dict[str, str]:
    """Why each replica keeps all of a parameter, where a plan stores weights in parts, by name."""
    if not plan.states or not ("weights" in plan.sharded or plan.predictor != NO_PREDICTOR):
        return {}
    residences, size = captured.residences, plan.grid.shards

    def why(name: str, parameter: Parameter) -> str:
        if not parameter.trainable:
            return "it is frozen"
        if name in residences:
            return "several operations read it"
        if max(parameter.shape, default=0) < size:
            return f"no dimension is as long as the {size} replicas"
        return "the plan's [states] leave it out"

    gathered = {name for name, residence in residences.items() if residence.is_gathered}
    return {n: why(n, parameter) for n, parameter in captured.graph.parameters.items() if n not in gathered}


def _of_stage(captured: Captured, plan: Plan, spec: StageSpec) -> Iterator[str]:
    axes = {axis: size for axis, size in plan.grid.sizes.items() if axis != REPLICAS or plan.replicas > 1}
    sizes = f" ({', '.join(f'{axis} = {size}' for axis, size in axes.items())})" if axes else ""
    workers = ", ".join(str(worker) for worker in plan.holders(spec.stage))
    yield f"stage {spec.stage} on {'workers' if axes else 'worker'} {workers}{sizes}"
    own = [exchange for exchange in plan.exchanges if exchange.stage == spec.stage]
    for i, segment in enumerate(spec.segments):
        ops = [op for op in captured.graph.ops[segment.start : segment.stop] if op.target != BOX]
        if ops:
            yield f"  segment {i}: {counted(len(ops), 'operation')}, {ops[0].name} to {ops[-1].name}"
        for exchange in own:
            if exchange.value and exchange.segment == i:
                one = _boxing(captured, exchange, axes)
                moved = f"{one['from']}>{one['to']} of {one['value']}, {_moved(exchange, axes)}"
                yield f"    {exchange.value}: {moved}, {one['when']}"
            elif exchange.kind in _OF_SEGMENTS and exchange.segment == i:
                dtype = LOW.get(plan.precision, "")
                cast = f"cast to {dtype}, " if exchange.kind in USED and dtype in exchange.dtypes else ""
                yield f"    {_OF_SEGMENTS[exchange.kind]}: {cast}{_moved(exchange, axes)}"
    for edge in plan.edges:
        if edge.source == spec.stage:
            yield f"  to stage {edge.target}: {edge.forward_bytes} bytes forward, {edge.backward_bytes} back"
    for exchange in own:
        if not exchange.value and exchange.kind not in _OF_SEGMENTS:
            what = "weights" if exchange.kind == "weight" else "gradients of weights"
            what = "the number of terms that losses have summed" if exchange.dtypes == (COUNTED,) else what
            yield f"  at the batch's end, {what}: {_moved(exchange, axes)}"


_OF_SEGMENTS = {
    WEIGHT_FORWARD: "before each forward, weights S>B",
    WEIGHT_BACKWARD: "before each backward, weights S>B",
    GRADIENT_PARTS: "after each backward, gradients of weights P>S",
}
"""What is exchanged of a segment with every micro-batch, by kind."""


def _boxing(captured: Captured, exchange: ExchangePlan, axes: Mapping[str, int]) -> dict[str, str | int]:
    back = exchange.kind == "boxed-gradient"
    source, target = captured.boxing(exchange.value, gradient=back)
    (value,) = (op.reads[0] for op in captured.graph.ops if op.name == exchange.value)
    when = f"before segment {exchange.segment} in each backward" if back else ""
    return {
        "value": f"the gradient of {value}" if back else value,
        "from": str(source),
        "to": str(target),
        "axis": exchange.axis,
        "when": when or f"after segment {exchange.segment} in each forward",
        "by": ",".join(map(str, exchange.phases)),
        "bytes": exchange.num_bytes,
        "sends": _sends(exchange, axes),
    }


def _moved(exchange: ExchangePlan, axes: Mapping[str, int]) -> str:
    by = ",".join(map(str, exchange.phases))
    return f"{exchange.num_bytes} bytes over {exchange.axis} by {by}; each sends up to {_sends(exchange, axes)}"


def _sends(exchange: ExchangePlan, axes: Mapping[str, int]) -> int:
    holders = axes[exchange.axis]
    return max(sum(exchange.bytes_sent(holders, position)) for position in range(holders))
