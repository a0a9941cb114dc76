"""Price a candidate: a plan with predicted seconds and bytes, and the seconds of a batch. No torch is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roundelay.errors import PlanError
from roundelay.ir.graph import Graph, Profile
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan, StagePlan
from roundelay.ir.stage import StageSpec
from roundelay.lower.laid_graph import LaidGraph
from roundelay.lower.reading import Reading, read
from roundelay.lower.validate_plan import check_plan
from roundelay.planner.candidate import asked_of, candidate, drafted, laid_by
from roundelay.planner.check_given import check_given
from roundelay.planner.choose_recompute import recomputed_positions
from roundelay.planner.cost_model import boundaries_of
from roundelay.planner.costs import DIGITS, over_links, slower, with_costs
from roundelay.planner.free_order import with_capacities
from roundelay.planner.kept_bytes import KeptBytes, SavedStorages, again_in, kept_bytes, made_again, on_a_worker
from roundelay.planner.machine_profile import MachineProfile
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_exchanges import plan_exchanges
from roundelay.planner.plan_options import Choices
from roundelay.planner.source import Hardware
from roundelay.simulator import makespan_s

BATCHES = 4
"""Batches over which plans are simulated, to be compared."""


@dataclass(frozen=True, slots=True)
class Priced:
    """A plan with predicted times.

    Args:
        plan: the plan; it is not proved yet.
        batch_s: predicted seconds of a batch.
        state_bytes: of the optimizer's state on the first holder of each stage; None where the optimizer does not tell.
        again_bytes: of what the backward of each stage computes again.
    """

    plan: Plan
    batch_s: float
    state_bytes: tuple[int, ...] | None
    again_bytes: tuple[int, ...]


def priced(facts: ModelFacts, choices: Choices, machine: Hardware, profile: MachineProfile | None = None) -> Priced:
    """The plan of choices, with predicted times.

    Args:
        facts: of the model, in the precision that is chosen.
        choices: what is given, the number of workers or of a layout's micro-batches among them.
        machine: where the plan would run.
        profile: of its links and operators; None: a transport's constants.

    Raises:
        PlanError: the choices cannot be combined, or not for this model; or a worker is on another kind of device
            than that on which the facts were measured.
        CaptureError: the model cannot be cut into so many stages.
    """
    check_given(choices)
    asked = asked_of(facts.graph, choices, machine)
    made = candidate(facts, asked, drafted(facts, asked, asked.choices.workers))
    _check_devices(made.plan, facts.device)
    reading, laid = check_plan(made.plan), made.laid
    seconds = _Seconds(facts, made.plan, laid, reading, profile)
    unused = [[n for n in spec.parameters if n in facts.unused] for spec in made.stages.stages]
    plan = replace(
        made.plan,
        stages=tuple(
            [seconds.of(stage, spec) for stage, spec in zip(made.plan.stages, made.stages.stages, strict=True)]
        ),
        read_s=round(facts.read_row_s * facts.rows(made.plan), DIGITS),
        exchanges=plan_exchanges(laid, made.stages, reading, unused) if any(unused) else made.plan.exchanges,
    )
    plan = over_links(plan if profile is None else with_costs(plan, profile), machine.cluster)
    plan = with_capacities(plan)
    held = None if facts.state_bytes is None else tuple([_held(facts, laid, plan, s) for s in made.stages.stages])
    return Priced(plan, batch_s(plan), held, _again(facts, plan, laid.graph, made.stages.stages))


def _held(facts: ModelFacts, laid: LaidGraph, plan: Plan, spec: StageSpec) -> int:
    """Bytes of optimizer state on the first holder of a stage; a part of a weight is held beside the whole."""
    total = 0
    for name in spec.parameters:
        whole, own = facts.graph.parameters[name].num_bytes, laid.graph.parameters[name].num_bytes
        held, residence = (facts.state_bytes or {}).get(name, 0) * own // max(1, whole), laid.residences.get(name)
        if residence is not None:
            held = -(-(held + own * (not residence.is_gathered)) // plan.grid.shards)
        total += held
    return total


def _check_devices(plan: Plan, measured: str) -> None:
    if others := [device for device in plan.devices if device.partition(":")[0] != measured]:
        raise PlanError(
            "the price of a plan",
            got=f"workers on {', '.join(dict.fromkeys(others))}",
            expected=f"workers on {measured}, where the seconds of operations were measured",
            remedy=f"Give devices={measured!r}, or measure the plan with roundelay.plan.",
        )


def batch_s(plan: Plan) -> float:
    """Seconds of a batch, by the simulator; of a rule that does not drain, once the pipeline is full."""
    whole_s = makespan_s(plan, stream([plan.micro_batches] * BATCHES))
    if read(plan).schedule.window == "batch":
        return whole_s / BATCHES
    return (makespan_s(plan, stream([plan.micro_batches] * 2 * BATCHES)) - whole_s) / BATCHES


class _Seconds:
    """Predicts stages from what the operations of the whole model take; a worker of a mesh takes its share of them."""

    def __init__(
        self, facts: ModelFacts, plan: Plan, laid: LaidGraph, reading: Reading, machine: MachineProfile | None
    ) -> None:
        self._plan, self._laid, self._halved = plan, laid, reading.schedule.halved
        self._profile, _ = facts.profile(plan)
        self._sums = self._profile.added_s(plan.micro_batches)
        self._index = {op.name: i for i, op in enumerate(facts.graph.ops)}
        self._whole, again = facts.graph, recomputed_positions(facts.graph, plan)
        self._again = {i for part in again for i in part}
        self._kept = _kept(facts, plan, laid.graph, again)
        self._ends = boundaries_of(facts.graph)
        self._machine = machine
        self._segment_s = 0.0 if machine is None else machine.segment_s / 2

    def of(self, stage: StagePlan, spec: StageSpec) -> StagePlan:
        """The stage with its seconds and bytes."""
        laid, own, profile = self._laid.graph, self._own(spec), self._profile
        forward = sum(profile.forward_s[i] * share for i, share in own)
        backward = sum(profile.backward_s[i] * share for i, share in own)
        again = self._again if self._plan.backward != "recompute" else ()
        repeated = sum(profile.forward_s[i] * share for i, share in own if i in again)
        weights = backward / 2 if self._halved else 0.0  # two products alike: of inputs, and of weights
        sums = sum(self._sums[i] * share for i, share in own)
        beside = self._segment_s * (len(stage.segments) - 1)
        first, last = own[0][0], own[-1][0] + 1
        return replace(
            stage,
            forward_s=round(forward + beside, DIGITS),
            backward_s=round(backward - weights + repeated + beside + (0.0 if self._halved else sums), DIGITS),
            weights_s=round(weights + (sums if self._halved else 0.0), DIGITS),
            update_s=round(sum(_update_s(profile, i) * share for i, share in own), DIGITS),
            parameter_bytes=sum(laid.parameters[n].num_bytes for n in spec.parameters),
            tape_bytes=self._kept_between(first, last),
        )

    def _own(self, spec: StageSpec) -> list[tuple[int, float]]:
        """The operations of a stage by number, the loss among them, each with the share that a worker computes."""
        laid = self._laid.graph
        found = []
        for segment in spec.segments:
            for op in laid.ops[segment.start : segment.stop]:
                if op.name in self._index:
                    found.append(self._at(self._index[op.name], self._share(op.name)))
        return [*found, self._at(len(self._index), 1.0)] if spec.loss_reads else found

    def _at(self, i: int, share: float) -> tuple[int, float]:
        """An operation, and how much of what it takes alone a worker spends on it."""
        op = self._whole.ops[i] if i < len(self._whole.ops) else None
        return i, share * slower(self._machine, self._plan, op, share * self._profile.forward_s[i])

    def _share(self, name: str) -> float:
        """The share of an operation that a worker computes: that of what is split most of its result and operands."""
        if not self._laid.on_mesh:
            return 1.0
        op, whole, local = self._whole.ops[self._index[name]], self._whole, self._laid.graph
        pairs = [(whole.values[n], local.values[n]) for n in (name, *op.reads) if n in local.values]
        parts = [own.num_bytes / one.num_bytes for one, own in pairs[: None if op.flops else 1] if one.num_bytes]
        weights = [(whole.parameters[n], local.parameters[n]) for n in op.parameters if n in local.parameters]
        parts += [own.num_bytes / one.num_bytes for one, own in weights if one.num_bytes and op.flops]
        return min([1.0, *parts])

    def _kept_between(self, start: int, stop: int) -> int:
        """Bytes kept between the nearest places where the whole graph may be cut."""
        begin = max(end for end in self._ends[:-1] if end <= start)
        end = min(end for end in self._ends if end >= stop)
        return self._kept.of_stage(begin, end)


def _kept(facts: ModelFacts, plan: Plan, laid: Graph, again: tuple[range, ...]) -> KeptBytes:
    key = "kept bytes", laid_by(plan), facts.rows(plan), again
    return facts.memo.of(key, lambda: kept_bytes(facts.graph, _storages(facts, plan, laid), shared=False, again=again))


def _storages(facts: ModelFacts, plan: Plan, laid: Graph) -> SavedStorages:
    return on_a_worker(facts.storages(plan), facts.graph, laid)


def _again(facts: ModelFacts, plan: Plan, laid: Graph, stages: Sequence[StageSpec]) -> tuple[int, ...]:
    """For each stage the bytes of what its backward computes again."""
    parts = [again_in(laid, spec, plan.backward) for spec in stages]
    kept = _storages(facts, plan, laid) if any(parts) else facts.saved
    return tuple([made_again(facts.graph, kept, own) for own in parts])


def _update_s(profile: Profile, i: int) -> float:
    return profile.update_s[i] if i < len(profile.update_s) else 0.0
