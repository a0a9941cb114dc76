"""One candidate plan of a job: everything that is chosen before its stages are measured. No torch is needed.

A :class:`~roundelay.planner.source.Source` answers what is asked of the job: the job itself where there is torch, or
facts that were collected there (:mod:`roundelay.planner.model_facts`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roundelay.ir.device_names import CPU, check_number, listed_devices
from roundelay.ir.graph import Graph
from roundelay.ir.plan import EdgePlan, Plan, StagePlan, WorkerPlan
from roundelay.ir.rule import rule_named
from roundelay.ir.stage import Edge, Partition
from roundelay.lower.boxed_graph import segment_ends
from roundelay.lower.dataflow import message_bytes
from roundelay.lower.laid_graph import LaidGraph
from roundelay.lower.partition import partition
from roundelay.lower.reading import Reading, read
from roundelay.lower.validate_mesh import check_mesh
from roundelay.planner.choose_cuts import MEASURED, Cut, Stages, cut, cut_by_names
from roundelay.planner.choose_micro_batches import choose_micro_batches
from roundelay.planner.choose_recompute import choose_modules
from roundelay.planner.draft_plan import PLAIN, TENSOR, default_rule, draft_plan
from roundelay.planner.free_order import with_capacities
from roundelay.planner.given_layout import has_size, in_layout, owners_of
from roundelay.planner.holder_choices import parts_of, replicas_of, signatures_of, zero_of
from roundelay.planner.mesh_signatures import ModelOnMesh, residences_of, tensor_parallel, without_residences
from roundelay.planner.partition_dp import slots
from roundelay.planner.placement import limited_cluster, placed, seats_of
from roundelay.planner.plan_exchanges import plan_exchanges
from roundelay.planner.plan_options import Choices
from roundelay.planner.source import Hardware, Source
from roundelay.planner.split_states import split_states
from roundelay.planner.stage_counts import default_devices, num_stages_of, slots_in_layout
from roundelay.planner.weight_segments import in_segments
from roundelay.schedules import PIPELINE, schedule_for


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked of a plan.

    Args:
        choices: with the rule and the way to cut, as they are in their layout.
        given: the same as they were given.
        cut: the cut, if it is given by names.
        machine: where the plan will run.
    """

    choices: Choices
    given: Choices
    cut: Cut | None
    machine: Hardware


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan without stages and edges.

    Args:
        plan: with its workers.
        owners: for each stage, the numbers of the workers that hold it.
        notices: for the user.
        warnings: those that say that something else than whole batches is trained.
    """

    plan: Plan
    owners: Sequence[Sequence[int]]
    notices: tuple[str, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan whose stages are chosen, and not measured yet.

    Args:
        plan: with stages, edges and exchanges; seconds and bytes of the stages are missing.
        laid: the model on the plan's mesh.
        stages: of it.
        notices: for the user.
        reasons: for the cuts.
        warnings: those that say that something else than whole batches is trained.
    """

    plan: Plan
    laid: LaidGraph
    stages: Partition
    notices: tuple[str, ...]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


def asked_of(graph: Graph, choices: Choices, machine: Hardware) -> Asked:
    """What choices ask for, with the rule and the way to cut that they leave open.

    Raises:
        PlanError: there is no such layout, or operation to cut at.
    """
    usual = Choices(rule=default_rule(PIPELINE if choices.layout is None else choices.layout), cuts=MEASURED)
    nodes = machine.cluster is not None and machine.cluster.most_on_a_node < len(machine.cluster.workers)
    whole = choices.over(replace(usual, transport="gloo" if nodes else None))
    return Asked(in_layout(whole), whole, cut_by_names(graph, MEASURED if whole.cuts is None else whole.cuts), machine)


def drafted(source: Source, asked: Asked, workers: int | None) -> Draft:
    """Choose everything but the cuts, and measure nothing.

    Args:
        source: of the model in full precision.
        asked: what is asked of the plan.
        workers: of each replica; None for the default.

    Raises:
        PlanError: the choices cannot be combined, or not for this model.
        CaptureError: the model cannot be cut into so many stages.
    """
    choices, graph = asked.choices, source.graph
    rule, sized, staged = rule_named(choices.rule or PLAIN), has_size(asked.given), asked.given.stages is not None
    replicas, parts = replicas_of(choices), parts_of(choices)
    num_stages, fewer = num_stages_of(graph, workers, asked.cut, choices, asked.machine, requested=staged)
    schedule = schedule_for(rule, choices.layout or PIPELINE, num_stages=num_stages)
    each = len(set(schedule.place(num_stages)))
    draft = _with_signatures(draft_plan(graph.fingerprint, rule.name, each, choices), source, choices)
    choice = choose_micro_batches(
        rule,
        draft.micro_batches,
        lambda number: source.divisibility(draft, number),
        requested=choices.micro_batches is not None and sized,
        replicas=replicas,
        dealt=not sized,
    )
    recompute = choose_modules(graph, source.checkpointed, draft.backward, choices.recompute)
    draft = replace(draft, micro_batches=choice.micro_batches, recompute=recompute)
    owners, size = owners_of(schedule, draft.layout, num_stages, (replicas, parts, draft.micro_batches))
    devices = devices_of(asked.machine, choices.devices, size, draft.transport)
    notices = tuple(notice for notice in (fewer, choice.notice) if notice)
    cluster = asked.machine.cluster
    if cluster is not None and cluster.links is not None:
        draft = replace(draft, latency_s=cluster.links.within.latency_s, bytes_per_s=cluster.links.within.bytes_per_s)
    shared = replace(draft, workers=_workers(devices, asked.machine.threads_each(devices), choices.threads))
    return Draft(shared, owners, notices, (choice.notice,) if choice.otherwise else ())


def devices_of(machine: Hardware, devices: str | None, num_workers: int, transport: str) -> tuple[str, ...]:
    """The device of every worker, from the option ``--devices``; which of them there are is checked where they are.

    Args:
        machine: where the plan will run.
        devices: ``cpu``, ``cuda`` (worker k on device k modulo their number), or one name for each worker, separated by
            commas. By default ``cuda`` if there is such a device and the transport can carry its tensors.
        num_workers: D.
        transport: of the plan.

    Raises:
        PlanError: the list is not one per worker.
    """
    text = devices or default_devices(machine, transport)
    names = listed_devices(text) or (text,) * num_workers
    if text == "cuda" and machine.devices:
        names = tuple(f"cuda:{k % machine.devices}" for k in range(num_workers))
    check_number(names, num_workers, text)
    return names


def _workers(devices: Sequence[str], shared: int, threads: int | None) -> tuple[WorkerPlan, ...]:
    """The workers of a plan.

    Args:
        devices: where each computes.
        shared: threads of each that is on the CPU, by default; one leads a GPU.
        threads: of each, as given.
    """
    counts = [(shared if device == CPU else 1) if threads is None else threads for device in devices]
    named = enumerate(zip(devices, counts, strict=True))
    return tuple(WorkerPlan(name=f"w{k}", device=device, threads=count) for k, (device, count) in named)


def _with_signatures(draft: Plan, source: Source, choices: Choices) -> Plan:
    """The draft with the given signatures, or those that `tensor_parallel` asks for."""
    own, parts = signatures_of(choices), parts_of(choices)
    if own is not None:
        return replace(draft, mesh=own.mesh, parameters=own.parameters, outputs=own.outputs)
    if parts == 1:
        return draft
    found = source.memo.of(("tensor parallel", parts), lambda: tensor_parallel(source.mesh_facts(), parts))
    pairs = {name: ((TENSOR, signature),) for name, signature in found.items()}
    return replace(draft, mesh={TENSOR: parts}, parameters=pairs)


def candidate(source: Source, asked: Asked, draft_of: Draft) -> Candidate:
    """Choose the cuts of a draft, and what its stages send and exchange.

    Args:
        source: of the model in full precision.
        asked: what is asked of the plan.
        draft_of: the draft.

    Raises:
        PlanError: the choices do not fit the model.
    """
    choices, draft, owners = asked.choices, draft_of.plan, draft_of.owners
    source = source.lowered(draft)
    cluster = asked.machine.cluster
    limited = limited_cluster(cluster, draft, choices.memory_limit)
    seats = None if limited is None else seats_of(limited, draft, owners)
    chosen = asked.cut or cut(source, draft, str(choices.cuts), len(owners), seats)
    names = [[draft.workers[worker].name for worker in own] for own in owners]
    if cluster is not None:
        workers, names = placed(cluster, draft, owners, seats, chosen.kinds)
        draft = replace(draft, workers=workers)
    laid, notices = laid_graph(source, draft), draft_of.notices
    if level := zero_of(choices):
        key, whole, lies = ("states", laid_by(draft), level), draft, laid
        split, left_whole = source.memo.of(key, lambda: split_states(source, lies, whole, level))
        draft = replace(draft, states=split.states, sharded=split.sharded)
        laid, notices = laid_graph(source, draft), (*notices, *left_whole)
    by = "stages", laid_by(draft), chosen.stages, draft.recompute
    ends, stages = source.memo.of(by, lambda: _cut_up(laid, chosen.stages, draft.recompute))
    draft = replace(draft, stages=_unmeasured(ends, names))
    plan = with_messages(draft, laid, stages)
    return Candidate(plan, laid, stages, notices, chosen.reasons, draft_of.warnings)


def _cut_up(laid: LaidGraph, chosen: Stages, recompute: Sequence[str]) -> tuple[Stages, Partition]:
    """The ends of the segments of chosen stages, and the stages."""
    apart = [name for name, residence in laid.residences.items() if residence.in_segments]
    ends = in_segments(laid.graph, chosen, apart) if apart else chosen
    if laid.on_mesh:
        ends = tuple(map(tuple, segment_ends(laid.graph, ends, laid.boxes.values())))
    return ends, partition(laid.graph, ends, recompute)


def laid_graph(source: Source, plan: Plan) -> LaidGraph:
    """The model on a plan's mesh."""
    check_mesh(read(plan))

    def on_mesh() -> ModelOnMesh | None:
        return without_residences(source.mesh_facts(), plan, source.written_out)

    def with_residences() -> LaidGraph:
        laid = source.memo.of(on_mesh_by(plan), on_mesh)
        graph = LaidGraph(source.graph) if laid is None else laid.graph
        return replace(graph, residences=residences_of(plan, graph.graph, graph.gradients))

    return source.memo.of(laid_by(plan), with_residences)


def on_mesh_by(plan: Plan) -> Hashable:
    """What a model's graph on the mesh of a plan depends on."""
    return "on mesh", *(tuple(given.items()) for given in (plan.mesh, plan.parameters, plan.outputs))


def laid_by(plan: Plan) -> Hashable:
    """What it depends on with the residences of its parameters."""
    states = tuple(plan.states.items()), plan.sharded, plan.replicas, plan.shards, plan.predictor, plan.precision
    return "laid", on_mesh_by(plan), *states


def with_messages(draft: Plan, laid: LaidGraph, stages: Partition) -> Plan:
    """The draft with what its stages send each other, and what their holders exchange."""
    reading, graph = read(draft), laid.graph
    plan = replace(
        draft,
        input_bytes=message_bytes(graph, (*graph.inputs, *graph.batch), draft.batch_parts),
        edges=tuple(_edge(graph, edge, reading) for edge in stages.edges),
        exchanges=plan_exchanges(laid, stages, reading),
    )
    return with_capacities(plan)


def _unmeasured(stages: Stages, owners: Sequence[Sequence[str]]) -> tuple[StagePlan, ...]:
    """Return stages with their ends and workers, and zeros for what is measured later."""
    nothing: dict[str, Any] = dict.fromkeys(("forward_s", "backward_s", "weights_s", "update_s"), 0.0)
    nothing |= dict.fromkeys(("parameter_bytes", "tape_bytes", "owed_bytes"), 0)
    return tuple(
        StagePlan(workers=tuple(on), segments=ends, **nothing) for ends, on in zip(stages, owners, strict=True)
    )


def _edge(graph: Graph, edge: Edge, reading: Reading) -> EdgePlan:
    draft = reading.plan
    num_slots = slots(edge.source, edge.target) if reading.schedule.stages_per_worker == 1 else draft.num_stages
    if draft.layout != PIPELINE:
        num_slots = slots_in_layout(draft, edge.source, edge.target)
    return EdgePlan(
        source=edge.source,
        target=edge.target,
        slots=num_slots,
        forward_bytes=message_bytes(graph, edge.values, draft.batch_parts),
        backward_bytes=message_bytes(graph, edge.gradients, draft.batch_parts),
        gradient=bool(edge.gradients),
    )
