"""The channels of a plan: which ports each joins, what it carries, and how many slots it has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from roundelay.ir.exchange import ExchangePlan
from roundelay.ir.program import Channel, ChannelKind, Port
from roundelay.lower.reading import Reading

REGISTERS = 2
"""Batches of the worker that reads: one in use while another is loaded (OneFlow, sections 4.3 and 6.1)."""


def channels_of(reading: Reading) -> tuple[Channel, ...]:
    """Every channel of a plan.

    Between two stages each edge has one forward, and one back if a gradient travels, for each holder of the stages, or
    one for all of them if they take turns. The worker that reads sends the other holders of stage 0 their
    micro-batches. What the holders of a stage exchange has a channel for each group of them along the exchange's axis;
    or one for each hop, where they hand on sums.

    Where the norm of the whole model's gradient is needed, every other port that has a part of it sends its own squared
    norm to the first port, with slots for the batches that stage k can finish before stage 0 has finished the first of
    them. Where updates wait for the norm, it is sent to every other port, one batch's at a time.
    """
    made = _Channels(reading)
    made.add_edges()
    made.add_exchanges()
    made.add_states()
    made.add_norms()
    return tuple(made.channels)


@dataclass(slots=True)
class _Channels:
    """The channels of a plan as they are made, in the order of their numbers."""

    reading: Reading
    channels: list[Channel] = field(default_factory=list)

    @property
    def ports(self) -> list[list[Port]]:
        """The ports of each stage, in the order of its holders."""
        plan = self.reading.plan
        return [[Port(worker, stage) for worker in plan.holders(stage)] for stage in range(plan.num_stages)]

    def add(self, kind: ChannelKind, sources: Sequence[Port], targets: Sequence[Port], slots: int) -> None:
        """Add a channel."""
        self.channels.append(Channel(len(self.channels), kind, tuple(sources), tuple(targets), slots))

    def add_edges(self) -> None:
        """Add the channels of micro-batches that are read, and of what goes from stage to stage."""
        ports = self.ports
        for port in ports[0][1:]:
            self.add("data", [ports[0][0]], [port], REGISTERS)
        for edge in self.reading.plan.edges:
            sources, targets = ports[edge.source], ports[edge.target]
            pairs = (
                [(sources, targets)]
                if self.reading.takes_turns
                else [([s], [t]) for s, t in zip(sources, targets, strict=True)]
            )
            for sending, receiving in pairs:
                self.add("forward", sending, receiving, edge.slots)
                if edge.gradient:
                    self.add("gradient", receiving, sending, edge.slots)

    def add_exchanges(self) -> None:
        """Add the channels of what the holders of a stage exchange or hand on."""
        plan, ports = self.reading.plan, self.ports
        groups = {axis: self.reading.mesh.groups(axis) for axis in {e.axis for e in plan.exchanges if e.phases}}
        for exchange in plan.exchanges:
            kind: ChannelKind = exchange.kind  # type: ignore[assignment]
            phases, own = exchange.phases, ports[exchange.stage]
            for group in groups[exchange.axis] if phases else []:
                holders = tuple([own[i] for i in group])
                self.channels.append(Channel(len(self.channels), kind, holders, holders, 1, phases))
            for of, source, target in (
                [] if phases or self.reading.moves_states else hops_of(self.reading, exchange.stage)
            ):
                self.add(of, [own[source]], [own[target]], 1)

    def add_states(self) -> None:
        """Add the channels on which the states of stages go from holder to holder."""
        for stage, ports in enumerate(self.ports if self.reading.moves_states else []):
            route = self.reading.route(stage)
            for back, kind in ((False, "state-back"), (True, "state")):
                for source, port in enumerate(ports):
                    target, _ = route.following(back, source)
                    if target != source:
                        within = route.within(not back, target)
                        self.add(kind, [port], [ports[target]], 1)  # type: ignore[arg-type]
                        self.channels[-1] = replace(self.channels[-1], within=within)

    def add_norms(self) -> None:
        """Add the channels of gradients' norms."""
        plan, ports, size = self.reading.plan, self.ports, self.reading.mesh.places
        flushes = self.reading.flushes
        first_of_all = ports[0][0]
        if self.reading.needs_norm:
            for k, of_stage in enumerate(ports):
                for port in [port for port in (of_stage if plan.states else of_stage[:size]) if port != first_of_all]:
                    slots = 1 if flushes else 1 + -(-k // plan.micro_batches)
                    self.add("grad-norm-sq", [port], [first_of_all], slots)
        if self.reading.awaits_norm:
            for port in [port for of_stage in ports for port in of_stage if port != first_of_all]:
                self.add("grad-norm", [first_of_all], [port], 1)


def position_of(reading: Reading, stage: int, holder: int, end: int) -> int:
    """Where a holder stands in the order in which gradients of a batch are summed: the last has the total.

    Args:
        reading: of the plan.
        stage: k.
        holder: its number among the stage's.
        end: the batch's last micro-batch, or an offset that stands for it.
    """
    plan = reading.plan
    size = len(plan.stages[stage].workers)
    return (holder - end - 1) % size if reading.takes_turns else holder


Hop = tuple[ChannelKind, int, int]
"""What is handed on, and from which holder of a stage to which."""


def hops_of(reading: Reading, stage: int) -> list[Hop]:
    """Between which holders of a stage sums of gradients are handed on, in any batch."""
    plan = reading.plan
    size = len(plan.stages[stage].workers)
    return list(dict.fromkeys(hop for end in _ends(reading, size) for hop in hops_in(reading, stage, end)))


def hops_in(reading: Reading, stage: int, end: int) -> Iterator[Hop]:
    """The same in one batch, in the order of time.

    A partial sum goes from each holder to the next. The last one's, the total, goes to the first of those that read it
    in the next batch's forward, and from one to the next; likewise to those that do not, which get it later.

    Args:
        reading: of the plan.
        stage: k.
        end: the batch's last micro-batch, or an offset that stands for it.
    """
    plan = reading.plan
    order = sorted(range(len(plan.stages[stage].workers)), key=lambda holder: position_of(reading, stage, holder, end))
    yield from (("partial", *hop) for hop in pairwise(order))
    for group in _sharing(reading, stage, order):
        yield from (("total", *hop) for hop in pairwise([order[-1], *group]))


def _ends(reading: Reading, size: int) -> range:
    """The last micro-batches of as many batches as it takes until each holder has the same turns again."""
    plan = reading.plan
    batch = plan.micro_batches
    return range(batch - 1, math.lcm(size, batch), batch) if reading.takes_turns else range(1)


def _sharing(reading: Reading, stage: int, order: Sequence[int]) -> Iterator[list[int]]:
    """The groups of holders in which a total is passed on."""
    if reading.takes_turns:
        yield list(order[:-1])
        return
    fresh = [reading.is_fresh(holder, stage) for holder in order]
    for kind in (True, False):
        yield [holder for holder in order[:-1] if fresh[holder] is kind]


def exchanges_of(reading: Reading, channels: Sequence[Channel]) -> dict[int, ExchangePlan]:
    """What is exchanged on each channel of a plan that is an exchange."""
    exchanges = [exchange for exchange in reading.plan.exchanges if exchange.phases]
    groups = {axis: reading.mesh.groups(axis) for axis in {exchange.axis for exchange in exchanges}}
    planned = [exchange for exchange in exchanges for _ in groups[exchange.axis]]
    return dict(zip([channel.id for channel in channels if channel.phases], planned, strict=True))
