"""The physical graph as text: what each stage's workers compute between exchanges, and every exchange (OneFlow, 3).

::

    stage 0 on workers 0, 1 (tensor = 2)
      segment 0: 12 operations, embedding to linear_3
        add_5_box: P>B by reduce-scatter(0),all-gather(0) over tensor, 65536 bytes of add_5; each sends 65536
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from roundelay.errors import counted
from roundelay.frontend import Captured
from roundelay.ir.exchange import GRADIENT_PARTS, WEIGHT_BACKWARD, WEIGHT_FORWARD, ExchangePlan
from roundelay.ir.mesh import REPLICAS
from roundelay.ir.plan import Plan
from roundelay.ir.stage import StageSpec
from roundelay.lower.boxed_graph import BOX
from roundelay.lower.partition import partition
from roundelay.planning.on_mesh import on_mesh


def physical_graph(captured: Captured, plan: Plan) -> list[str]:
    """The lines of a plan's physical graph.

    Args:
        captured: the model, on no mesh.
        plan: any.
    """
    boxed = on_mesh(captured, plan)
    stages = partition(boxed.graph, [stage.segments for stage in plan.stages], plan.recompute)
    return [line for spec in stages.stages for line in _of_stage(boxed, plan, spec)]


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
                yield f"    {_boxing(captured, exchange, axes)}"
            elif exchange.kind in _OF_SEGMENTS and exchange.segment == i:
                yield f"    {_OF_SEGMENTS[exchange.kind]}: {_moved(exchange, axes)}"
    for edge in plan.edges:
        if edge.source == spec.stage:
            yield f"  to stage {edge.target}: {edge.forward_bytes} bytes forward, {edge.backward_bytes} back"
    for exchange in own:
        if not exchange.value and exchange.kind not in _OF_SEGMENTS:
            what = "weights" if exchange.kind == "weight" else "gradients of weights"
            yield f"  at the batch's end, {what}: {_moved(exchange, axes)}"


_OF_SEGMENTS = {
    WEIGHT_FORWARD: "before each forward, weights S>B",
    WEIGHT_BACKWARD: "before each backward, weights S>B",
    GRADIENT_PARTS: "after each backward, gradients of weights P>S",
}
"""What is exchanged of a segment with every micro-batch, by kind."""


def _boxing(captured: Captured, exchange: ExchangePlan, axes: Mapping[str, int]) -> str:
    back = exchange.kind == "boxed-gradient"
    source, target = captured.boxing(exchange.value, gradient=back)
    (value,) = (op.reads[0] for op in captured.graph.ops if op.name == exchange.value)
    what = f"the gradient of {value}" if back else value
    return f"{exchange.value}: {source}>{target} of {what}, {_moved(exchange, axes)}"


def _moved(exchange: ExchangePlan, axes: Mapping[str, int]) -> str:
    holders = axes[exchange.axis]
    most = max(sum(exchange.bytes_sent(holders, position)) for position in range(holders))
    by = ",".join(map(str, exchange.phases))
    return f"{exchange.num_bytes} bytes over {exchange.axis} by {by}; each sends up to {most}"
