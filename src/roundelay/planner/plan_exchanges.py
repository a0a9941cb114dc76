"""Plan what the holders of each stage exchange."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from roundelay.errors import PlanError
from roundelay.ir.boxing import exchanged_shape, phases_of
from roundelay.ir.bucket import COUNTED, Tensor, elements_of, gradient_buckets, rows_of, state_buckets
from roundelay.ir.exchange import (
    GRADIENT_PARTS,
    USED,
    WEIGHT_GRADIENT,
    ExchangePlan,
    Phase,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from roundelay.ir.graph import Graph
from roundelay.ir.mesh import COPIES, REPLICAS
from roundelay.ir.plan import Plan
from roundelay.ir.sbp import Signature, Split
from roundelay.ir.stage import Partition, StageSpec
from roundelay.lower.boxing import is_local
from roundelay.lower.dataflow import sample_micro_batches
from roundelay.lower.laid_graph import LaidGraph
from roundelay.lower.reading import Reading


def plan_exchanges(
    laid: LaidGraph, stages: Partition, reading: Reading, unused: Sequence[Sequence[str]] = ()
) -> tuple[ExchangePlan, ...]:
    """What each stage's holders exchange: boxed values and their gradients, and gradients of weights, all together.

    Args:
        laid: the model on the plan's mesh.
        stages: its stages.
        reading: of the plan, which has the mesh and the replicas.
        unused: for each stage, trained parameters that get no gradient; empty if that has not been looked at.

    Raises:
        PlanError: a boxing cannot be carried out.
    """
    left_out = unused or [()] * len(stages.stages)
    each = [_of_stage(laid, spec, reading, tuple(names)) for spec, names in zip(stages.stages, left_out, strict=True)]
    return tuple([exchange for of_stage in each for exchange in of_stage])


def check_exchanges(laid: LaidGraph, stages: Partition, reading: Reading) -> None:
    """Check that a plan's exchanges are those of its stages.

    Raises:
        PlanError: naming the first that is not.
    """
    planned = reading.plan.exchanges
    unused = [
        next((e.unused for e in planned if e.stage == spec.stage and e.kind == WEIGHT_GRADIENT), ())
        for spec in stages.stages
    ]
    needed = plan_exchanges(laid, stages, reading, unused)
    for i in range(max(len(needed), len(planned))):
        got, wanted = (one[i] if i < len(one) else None for one in (planned, needed))
        if got is None or wanted is None or replace(got, seconds=0.0, busy_s=0.0) != wanted:
            raise PlanError(
                f"exchanges[{i}] of the plan",
                got=_text(got),
                expected=_text(wanted),
                remedy="Correct the plan, or write a new one with `roundelay plan`.",
            )


def _text(exchange: ExchangePlan | None) -> str:
    if exchange is None:
        return "none"
    what = exchange.kind + (f" {exchange.value} after segment {exchange.segment}" if exchange.value else "")
    sizes = " and ".join(
        f"{'x'.join(map(str, shape))} of {dtype}" for shape, dtype in zip(exchange.shapes, exchange.dtypes, strict=True)
    )
    by = ", ".join(map(str, exchange.phases)) or "handing on sums"
    return f"{what} of stage {exchange.stage} over {exchange.axis} by {by}, {sizes}"


def _of_stage(laid: LaidGraph, spec: StageSpec, reading: Reading, unused: tuple[str, ...]) -> Iterator[ExchangePlan]:
    plan = reading.plan
    trained = [n for n in spec.parameters if laid.graph.parameters[n].trainable and n not in unused]
    if laid.on_mesh:
        (axis,) = plan.mesh
        yield from _boxed(laid, spec, plan, axis)
        partial = [n for n in trained if laid.has_partial_gradient(n)]
        if partial:
            yield _of_weights(laid, spec, axis, partial, unused)
    if reading.sums_over_time:
        yield replace(_of_weights(laid, spec, REPLICAS, trained, unused), phases=())
    elif plan.replicas > 1:
        yield _of_weights(laid, spec, REPLICAS, [n for n in trained if n not in laid.states], unused)
        yield from _of_parts(laid, spec, plan, [n for n in trained if n in laid.residences])


def _of_parts(laid: LaidGraph, spec: StageSpec, plan: Plan, names: Sequence[str]) -> Iterator[ExchangePlan]:
    """Gradients of what each replica updates a part of, when they are due or made, and its weights afterwards."""
    made = {n for n in names if laid.residences[n].sums_parts}
    gathered = {n for n, residence in laid.residences.items() if residence.is_gathered}
    exchanged: list[tuple[str, tuple[Phase, ...], int, Sequence[str]]] = [
        (WEIGHT_GRADIENT, reduce_scatter(), 0, [n for n in names if n not in made]),
        ("weight", all_gather(), 0, [n for n in names if n not in gathered]),
    ]
    for kind, phases, wanted in [
        (GRADIENT_PARTS, reduce_scatter(), made),
        *((k, all_gather(), gathered) for k in USED),
    ]:
        of_segments = [[n for n in segment.parameters if n in wanted] for segment in spec.segments]
        exchanged += [(kind, phases, i, own) for i, own in enumerate(of_segments)]
    alike, shards = [(WEIGHT_GRADIENT, all_reduce(), 0, names)] if plan.shards else [], plan.grid.shards
    for kind, phases, segment, own in exchanged[:1] + alike + exchanged[1:]:
        if not own:
            continue
        casts = [laid.residences[name].cast if kind in USED else "" for name in own]
        tensors = zip(casts, laid.tensors(own), strict=True)
        dtypes, rows = _rows(tuple([(cast or t.dtype, t.shape, laid.states[t.name]) for cast, t in tensors]), shards)
        copied = phases == all_reduce()  # each has the same row
        yield ExchangePlan(
            stage=spec.stage,
            kind=kind,
            axis=COPIES if copied else plan.state_axis,
            value="",
            segment=segment,
            phases=phases,
            dtypes=dtypes,
            shapes=tuple([row[1:] for row in rows]) if copied else rows,
            unused=(),
        )


_Part = tuple[str, tuple[int, ...], Split]
"""Dtype and shape of a parameter, and how its state is split."""


@lru_cache(maxsize=4096)
def _rows(parts: tuple[_Part, ...], replicas: int) -> tuple[tuple[str, ...], tuple[tuple[int, int], ...]]:
    """Dtypes and shapes of the tensors of states; the same in layers that are alike."""
    buckets = state_buckets([Tensor(str(i), dtype, shape) for i, (dtype, shape, _) in enumerate(parts)])
    splits = {str(i): split for i, (*_, split) in enumerate(parts)}
    return tuple([bucket[0].dtype for bucket in buckets]), rows_of(buckets, splits, replicas)


def _of_weights(
    laid: LaidGraph, spec: StageSpec, axis: str, names: Sequence[str], unused: tuple[str, ...]
) -> ExchangePlan:
    buckets = gradient_buckets(laid.tensors(names))
    return ExchangePlan(
        stage=spec.stage,
        kind=WEIGHT_GRADIENT,
        axis=axis,
        value="",
        segment=0,
        phases=all_reduce(),
        dtypes=(*[bucket[0].dtype for bucket in buckets], COUNTED),
        shapes=tuple([(count,) for count in elements_of(buckets)]),
        unused=unused,
    )


def _boxed(laid: LaidGraph, spec: StageSpec, plan: Plan, axis: str) -> Iterator[ExchangePlan]:
    for i, segment in enumerate(spec.segments):
        name = laid.graph.ops[segment.stop - 1].name
        box = laid.boxes.get(name)
        if box is None:
            continue
        moves = [("boxed", box.source, box.target)]
        if box.given is not None and box.needed is not None:
            moves.append(("boxed-gradient", box.given, box.needed))
        for kind, source, target in moves:
            if not is_local(source, target):
                yield _exchange(laid.graph, plan, (spec.stage, i), kind, (name, source, target), axis)


def _exchange(
    graph: Graph,
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
    return ExchangePlan(
        stage=stage,
        kind=kind,
        axis=axis,
        value=name,
        segment=segment,
        phases=phases,
        dtypes=(graph.values[name].dtype,),
        shapes=(exchanged_shape(_on_a_micro_batch(graph, name, plan.batch_parts), source, target),),
        unused=(),
    )


def _on_a_micro_batch(graph: Graph, name: str, batch_parts: int) -> tuple[int, ...]:
    """The whole shape of a value on a full micro-batch: the sample's, with as many of its rows."""
    shape, rows = graph.values[name].shape, graph.sample_rows
    if not shape or shape[0] % rows:
        return shape
    return (shape[0] // rows * -(-rows // sample_micro_batches(graph, batch_parts)), *shape[1:])
