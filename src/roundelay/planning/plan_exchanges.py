"""Plan what the holders of each stage exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from roundelay.errors import PlanError
from roundelay.frontend import Captured
from roundelay.ir.exchange import ExchangePlan, all_gather, all_reduce, reduce_scatter
from roundelay.ir.mesh import REPLICAS
from roundelay.ir.plan import Plan
from roundelay.ir.sbp import Signature
from roundelay.ir.stage import Partition, StageSpec
from roundelay.lower.dataflow import sample_micro_batches
from roundelay.lower.reading import Reading
from roundelay.lower.signatures import is_local
from roundelay.runtime.boxing import exchanged_shape, phases_of
from roundelay.runtime.gradient_bucket import GradientBucket
from roundelay.runtime.state_bucket import StateBucket


def plan_exchanges(
    captured: Captured, stages: Partition, reading: Reading, unused: Sequence[Sequence[str]] = ()
) -> tuple[ExchangePlan, ...]:
    """What each stage's holders exchange: boxed values and their gradients, and gradients of weights, all together.

    Args:
        captured: the model on the plan's mesh.
        stages: its stages.
        reading: of the plan, which has the mesh and the replicas.
        unused: for each stage, trained parameters that get no gradient; empty if that has not been looked at.

    Raises:
        PlanError: a boxing cannot be carried out.
    """
    left_out = unused or [()] * len(stages.stages)
    each = [
        _of_stage(captured, spec, reading, tuple(names)) for spec, names in zip(stages.stages, left_out, strict=True)
    ]
    return tuple([exchange for of_stage in each for exchange in of_stage])


def check_exchanges(captured: Captured, stages: Partition, reading: Reading) -> None:
    """Check that a plan's exchanges are those of its stages.

    Raises:
        PlanError: naming the first that is not.
    """
    planned = reading.plan.exchanges
    unused = [
        next((e.unused for e in planned if e.stage == spec.stage and e.kind == WEIGHTS), ()) for spec in stages.stages
    ]
    needed = plan_exchanges(captured, stages, reading, unused)
    for i in range(max(len(needed), len(planned))):
        got, wanted = (one[i] if i < len(one) else None for one in (planned, needed))
        if got != wanted:
            raise PlanError(
                f"exchanges[{i}] of the plan",
                got=_text(got),
                expected=_text(wanted),
                remedy="Correct the plan, or write a new one with `roundelay plan`.",
            )


WEIGHTS = "weight-gradient"


def _text(exchange: ExchangePlan | None) -> str:
    if exchange is None:
        return "none"
    what = exchange.kind + (f" {exchange.value} after segment {exchange.segment}" if exchange.value else "")
    sizes = " and ".join(
        f"{'x'.join(map(str, shape))} of {dtype}" for shape, dtype in zip(exchange.shapes, exchange.dtypes, strict=True)
    )
    by = ", ".join(map(str, exchange.phases)) or "handing on sums"
    return f"{what} of stage {exchange.stage} over {exchange.axis} by {by}, {sizes}"


def _of_stage(captured: Captured, spec: StageSpec, reading: Reading, unused: tuple[str, ...]) -> Iterator[ExchangePlan]:
    plan = reading.plan
    trained = [n for n in spec.parameters if captured.graph.parameters[n].trainable and n not in unused]
    if captured.sharding is not None:
        (axis,) = plan.mesh
        yield from _boxed(captured, spec, plan, axis)
        partial = [n for n in trained if captured.has_partial_gradient(n)]
        if partial:
            yield _of_weights(captured, spec, axis, partial, unused)
    if reading.sums_over_time:
        yield replace(_of_weights(captured, spec, REPLICAS, trained, unused), phases=())
    elif plan.replicas > 1:
        yield _of_weights(captured, spec, REPLICAS, [n for n in trained if n not in captured.states], unused)
        if divided := [n for n in trained if n in captured.states]:
            yield from _of_states(captured, spec, plan.replicas, divided)


def _of_states(captured: Captured, spec: StageSpec, replicas: int, names: Sequence[str]) -> Iterator[ExchangePlan]:
    """Gradients of what each replica updates a part of, and its weights afterwards."""
    own = captured.parameters()
    bucket = StateBucket.of(((n, captured.local(n, own[n].detach(), 0)) for n in names), captured.states, replicas)
    for kind, phases in ((WEIGHTS, reduce_scatter()), ("weight", all_gather())):
        yield ExchangePlan(
            stage=spec.stage,
            kind=kind,
            axis=REPLICAS,
            value="",
            segment=0,
            phases=phases,
            dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in bucket.dtypes),
            shapes=bucket.rows,
            unused=(),
        )


def _of_weights(
    captured: Captured, spec: StageSpec, axis: str, names: Sequence[str], unused: tuple[str, ...]
) -> ExchangePlan:
    own = captured.parameters()
    bucket = GradientBucket.of((n, captured.local(n, own[n].detach(), 0)) for n in names)
    return ExchangePlan(
        stage=spec.stage,
        kind=WEIGHTS,
        axis=axis,
        value="",
        segment=0,
        phases=all_reduce(),
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in (*bucket.dtypes, torch.float64)),
        shapes=tuple([(count,) for count in bucket.elements]),
        unused=unused,
    )


def _boxed(captured: Captured, spec: StageSpec, plan: Plan, axis: str) -> Iterator[ExchangePlan]:
    assert captured.sharding is not None, "without a mesh nothing is boxed"
    for i, segment in enumerate(spec.segments):
        name = captured.graph.ops[segment.stop - 1].name
        box = captured.sharding.boxes.get(name)
        if box is None:
            continue
        moves = [("boxed", box.source, box.target)]
        if box.given is not None and box.needed is not None:
            moves.append(("boxed-gradient", box.given, box.needed))
        for kind, source, target in moves:
            if not is_local(source, target):
                yield _exchange(captured, plan, (spec.stage, i), kind, (name, source, target), axis)


def _exchange(
    captured: Captured,
    plan: Plan,
    place: tuple[int, int],
    kind: str,
    boxing: tuple[str, Signature, Signature],
    axis: str,
) -> ExchangePlan:
    name, source, target = boxing
    stage, segment = place
    phases = phases_of(source, target)
    if not phases:
        raise PlanError(
            f"the boxing {name!r}",
            got=f"{source} that must become {target}",
            expected="to or from B or P, or a split of another dimension",
            remedy="Give signatures with which it is not needed, in `parameters` of the plan.",
        )
    value = captured.graph.values[name]
    shape = _on_a_micro_batch(captured, name, plan.batch_parts)
    return ExchangePlan(
        stage=stage,
        kind=kind,
        axis=axis,
        value=name,
        segment=segment,
        phases=phases,
        dtypes=(value.dtype,),
        shapes=(exchanged_shape(shape, source, target),),
        unused=(),
    )


def _on_a_micro_batch(captured: Captured, name: str, batch_parts: int) -> tuple[int, ...]:
    """The whole shape of a value on a full micro-batch: the sample's, with as many of its rows."""
    shape, rows = captured.graph.values[name].shape, captured.graph.sample_rows
    if not shape or shape[0] % rows:
        return shape
    return (shape[0] // rows * -(-rows // sample_micro_batches(captured.graph, batch_parts)), *shape[1:])
