"""The channels of a plan: which ports each joins, what it carries, and how many slots it has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from roundelay.ir.clip import Clip
from roundelay.ir.exchange import Phase
from roundelay.ir.loss_scale import LossScale
from roundelay.ir.plan import REPLICAS, ExchangePlan, Plan
from roundelay.ir.program import Channel, ChannelKind, Port
from roundelay.ir.rule import rule_named
from roundelay.schedules import Form, Route, Schedule, form_for, holders_of, schedule_for

REGISTERS = 2
"""Batches of the worker that reads: one in use while another is loaded (OneFlow, sections 4.3 and 6.1)."""


def schedule_of(plan: Plan, holder: int = 0) -> Schedule:
    """The schedule that a plan's workers run on, with the loop of one holder where each has its own.

    Raises:
        PlanError: there is no such rule, or no such schedule.
    """
    rule, together = rule_named(plan.rule), Clip.parse(plan.clip).by == "global" or LossScale.parse(plan.loss_scale).on
    return schedule_for(rule, plan.layout, holder, plan.batch_parts, plan.num_stages, together=together)


def form_of(plan: Plan) -> Form | None:
    """The form of a plan's layout; None in a pipeline."""
    return form_for(rule_named(plan.rule), plan.layout)


def sums_over_time(plan: Plan) -> bool:
    """Whether the holders of a stage sum its gradients one after another."""
    form = form_of(plan)
    return form is not None and form.sums


def channels_of(plan: Plan) -> tuple[Channel, ...]:
    """Every channel of a plan.

    Between two stages each edge has one forward, and one back if a gradient travels, for each holder of the stages, or
    one for all of them if they take turns. The worker that reads sends the other holders of stage 0 their
    micro-batches. What the holders of a stage exchange has a channel for each group of them along the exchange's axis;
    or one for each hop, where they hand on sums.

    Where the norm of the whole model's gradient is needed, every other port that has a part of it sends its own squared
    norm to the first port, with slots for the batches that stage k can finish before stage 0 has finished the first of
    them. Where updates wait for the norm, it is sent to every other port, one batch's at a time.
    """
    made = _Channels(plan)
    made.add_edges()
    made.add_exchanges()
    made.add_states()
    made.add_norms()
    return tuple(made.channels)


@dataclass(slots=True)
class _Channels:
    """The channels of a plan as they are made, in the order of their numbers."""

    plan: Plan
    channels: list[Channel] = field(default_factory=list)

    @property
    def ports(self) -> list[list[Port]]:
        """The ports of each stage, in the order of its holders."""
        plan = self.plan
        return [[Port(worker, stage) for worker in plan.holders(stage)] for stage in range(plan.num_stages)]

    def add(self, kind: ChannelKind, sources: Sequence[Port], targets: Sequence[Port], slots: int) -> None:
        """Add a channel."""
        self.channels.append(Channel(len(self.channels), kind, tuple(sources), tuple(targets), slots))

    def add_edges(self) -> None:
        """Add the channels of micro-batches that are read, and of what goes from stage to stage."""
        ports = self.ports
        for port in ports[0][1:]:
            self.add("data", [ports[0][0]], [port], REGISTERS)
        for edge in self.plan.edges:
            sources, targets = ports[edge.source], ports[edge.target]
            pairs = (
                [(sources, targets)]
                if deals(self.plan)
                else [([s], [t]) for s, t in zip(sources, targets, strict=True)]
            )
            for sending, receiving in pairs:
                self.add("forward", sending, receiving, edge.slots)
                if edge.gradient:
                    self.add("gradient", receiving, sending, edge.slots)

    def add_exchanges(self) -> None:
        """Add the channels of what the holders of a stage exchange or hand on."""
        plan, ports = self.plan, self.ports
        for exchange in plan.exchanges:
            kind: ChannelKind = exchange.kind  # type: ignore[assignment]
            phases, own = tuple(map(Phase.parse, exchange.phases)), ports[exchange.stage]
            for group in _groups(plan, exchange.axis) if phases else []:
                holders = tuple([own[i] for i in group])
                self.channels.append(Channel(len(self.channels), kind, holders, holders, 1, phases))
            for of, source, target in [] if phases or wanders(plan) else hops_of(plan, exchange.stage):
                self.add(of, [own[source]], [own[target]], 1)

    def add_states(self) -> None:
        """Add the channels on which the states of stages go from holder to holder."""
        plan = self.plan
        for stage, ports in enumerate(self.ports if wanders(plan) else []):
            route = Route(stage, plan.num_stages, plan.replicas)
            for back, kind in ((False, "state-back"), (True, "state")):
                for source, port in enumerate(ports):
                    target, _ = route.following(back, source)
                    if target != source:
                        within = route.within(not back, target)
                        self.add(kind, [port], [ports[target]], 1)  # type: ignore[arg-type]
                        self.channels[-1] = replace(self.channels[-1], within=within)

    def add_norms(self) -> None:
        """Add the channels of gradients' norms."""
        plan, ports, size = self.plan, self.ports, self.plan.mesh_size
        flushes = schedule_of(plan).window == "batch"
        first_of_all = ports[0][0]
        if uses_grad_norm(plan):
            for k, of_stage in enumerate(ports):
                for port in [port for port in (of_stage if plan.states else of_stage[:size]) if port != first_of_all]:
                    slots = 1 if flushes else 1 + -(-k // plan.micro_batches)
                    self.add("grad-norm-sq", [port], [first_of_all], slots)
        if awaits_grad_norm(plan):
            for port in [port for of_stage in ports for port in of_stage if port != first_of_all]:
                self.add("grad-norm", [first_of_all], [port], 1)


def num_holders(plan: Plan, stage: int) -> int:
    """How many workers hold a stage: one for each place of the mesh in each replica, or those that take turns."""
    if deals(plan):
        return holders_of(stage, plan.num_stages, plan.micro_batches)
    return plan.replicas * plan.mesh_size


def deals(plan: Plan) -> bool:
    """Whether the holders of a stage take micro-batches in turns."""
    form = form_of(plan)
    return form is not None and form.deals


def wanders(plan: Plan) -> bool:
    """Whether the states of stages go from holder to holder."""
    form = form_of(plan)
    return form is not None and form.wanders


def updater_of(plan: Plan, stage: int) -> int | None:
    """The one holder of a stage that makes its updates; None if each does."""
    return Route(stage, plan.num_stages, plan.replicas).updater if wanders(plan) else None


def num_updaters(plan: Plan, stage: int) -> int:
    """How many holders of a stage make its updates, and report its state."""
    return 1 if wanders(plan) else len(plan.stages[stage].workers)


def position_of(plan: Plan, stage: int, holder: int, end: int) -> int:
    """Where a holder stands in the order in which gradients of a batch are summed: the last has the total.

    Args:
        plan: the plan.
        stage: k.
        holder: its number among the stage's.
        end: the batch's last micro-batch, or an offset that stands for it.
    """
    size = len(plan.stages[stage].workers)
    return (holder - end - 1) % size if deals(plan) else holder


Hop = tuple[ChannelKind, int, int]
"""What is handed on, and from which holder of a stage to which."""


def hops_of(plan: Plan, stage: int) -> list[Hop]:
    """Between which holders of a stage sums of gradients are handed on, in any batch."""
    size = len(plan.stages[stage].workers)
    return list(dict.fromkeys(hop for end in _ends(plan, size) for hop in hops_in(plan, stage, end)))


def hops_in(plan: Plan, stage: int, end: int) -> Iterator[Hop]:
    """The same in one batch, in the order of time.

    A partial sum goes from each holder to the next. The last one's, the total, goes to the first of those that read it
    in the next batch's forward, and from one to the next; likewise to those that do not, which get it later.

    Args:
        plan: the plan.
        stage: k.
        end: the batch's last micro-batch, or an offset that stands for it.
    """
    order = sorted(range(len(plan.stages[stage].workers)), key=lambda holder: position_of(plan, stage, holder, end))
    yield from (("partial", *hop) for hop in pairwise(order))
    for group in _sharing(plan, stage, order):
        yield from (("total", *hop) for hop in pairwise([order[-1], *group]))


def _ends(plan: Plan, size: int) -> range:
    """The last micro-batches of as many batches as it takes until each holder has the same turns again."""
    batch = plan.micro_batches
    return range(batch - 1, math.lcm(size, batch), batch) if deals(plan) else range(1)


def _sharing(plan: Plan, stage: int, order: Sequence[int]) -> Iterator[list[int]]:
    """The groups of holders in which a total is passed on."""
    if deals(plan):
        yield list(order[:-1])
        return
    rule, size = rule_named(plan.rule), plan.batch_parts
    fresh = [rule.is_fresh(holder + 1, stage + 1, plan.num_stages, size) for holder in order]
    for kind in (True, False):
        yield [holder for holder in order[:-1] if fresh[holder] is kind]


def exchanges_of(plan: Plan) -> dict[int, ExchangePlan]:
    """What is exchanged on each channel that is an exchange."""
    channels = [channel for channel in channels_of(plan) if channel.phases]
    planned = [exchange for exchange in plan.exchanges if exchange.phases for _ in _groups(plan, exchange.axis)]
    return {channel.id: exchange for channel, exchange in zip(channels, planned, strict=True)}


def _groups(plan: Plan, axis: str) -> list[list[int]]:
    """Which holders of a stage exchange along an axis: those that differ in nothing else."""
    size, replicas = plan.mesh_size, range(plan.replicas)
    if axis == REPLICAS:
        return [[r * size + place for r in replicas] for place in range(size)]
    return [[r * size + place for place in range(size)] for r in replicas]


def uses_grad_norm(plan: Plan) -> bool:
    """Whether stage 0 needs the norm of the whole model's gradient: for clipping, or for the loss scale."""
    return Clip.parse(plan.clip).whole or LossScale.parse(plan.loss_scale).on


def awaits_grad_norm(plan: Plan) -> bool:
    """Whether an update waits for the norm of its own batch: it clips by it, or is skipped if it is not finite."""
    flushes = schedule_of(plan).window == "batch"
    return Clip.parse(plan.clip).by == "global" or (LossScale.parse(plan.loss_scale).on and flushes)
