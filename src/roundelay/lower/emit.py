"""From a plan to one program per worker. Only here, and in the worker, may code depend on the number of a worker."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from roundelay.ir.exchange import GRADIENT_PARTS, WEIGHT_BACKWARD, WEIGHT_FORWARD
from roundelay.ir.program import (
    END,
    ENTRY,
    EXCHANGES,
    FRESH,
    GRADIENTS,
    KEPT,
    NEITHER,
    PREVIOUS,
    SEGMENT,
    SUMS,
    Channel,
    ChannelKind,
    Instruction,
    Port,
    Program,
)
from roundelay.ir.rule import DISTANCES
from roundelay.lower.channels import (
    REGISTERS,
    channels_of,
    hops_in,
)
from roundelay.lower.reading import Reading
from roundelay.schedules import Body, Schedule
from roundelay.schedules.schedule import HANDING_ON

Lines = Callable[[str, int], list[Instruction]]
"""From a kind of action and an offset to the instructions that stand for it."""


def emit(reading: Reading) -> tuple[Program, ...]:
    """One program per worker.

    Raises:
        PlanError: the rule or its schedule is unknown.
    """
    plan = reading.plan
    own: dict[int, dict[int, Channel]] = {worker: {} for worker in range(plan.num_workers)}
    for channel in channels_of(reading):
        for port in (*channel.sources, *channel.targets):
            own[port.worker][channel.id] = channel
    homes: dict[int, list[Home]] = {worker: [] for worker in own}
    for stage in range(plan.num_stages):
        ports = tuple([Port(worker, stage) for worker in plan.holders(stage)])
        for holder, port in enumerate(ports):
            homes[port.worker].append(Home(holder, ports))
    return tuple(_program(reading, worker, homes[worker], tuple(own[worker].values())) for worker in own)


class Home(NamedTuple):
    """A stage on one of its holders.

    Args:
        holder: its number among them.
        ports: of all of them.
    """

    holder: int
    ports: tuple[Port, ...]

    @property
    def port(self) -> Port:
        """The stage on this holder."""
        return self.ports[self.holder]


def _program(reading: Reading, worker: int, homes: Sequence[Home], channels: tuple[Channel, ...]) -> Program:
    """The program of a worker, which runs the stages of ``homes``."""
    plan = reading.plan
    stages, holder = tuple([home.port.stage for home in homes]), homes[0].holder if homes else 0
    schedule = reading.schedule_of(holder)
    body = schedule.body(stages, plan.num_stages, plan.micro_batches)
    return Program(
        worker=worker,
        num_workers=plan.num_workers,
        every=0 if schedule.free else body.every,
        over=schedule.window,
        tapes=plan.stages[stages[0]].in_flight
        if schedule.free
        else body.peak(schedule.window, plan.micro_batches, "F", "B"),
        owed=body.peak(schedule.window, plan.micro_batches, "B", "W") if schedule.halved else 0,
        registers=REGISTERS if worker == plan.worker_of(0) else 0,
        channels=channels,
        body=tuple(
            _with_updates(reading, schedule, body, {home.port.stage: _lines(reading, home, channels) for home in homes})
        ),
        holds=tuple([k for k in stages if reading.moves_states and reading.route(k).start == holder]),
    )


def _with_updates(
    reading: Reading, schedule: Schedule, body: Body, lines: Mapping[int, Lines]
) -> Iterator[Instruction]:
    """The body as instructions: exchanges and updates follow the last backwards of their batch.

    Updates that wait for the norm of the whole model's gradient wait for the backwards of all stages of the worker.
    They come after the last of these, that of the lower stage first, as stage 0 sends the norm.
    """
    together = reading.awaits_norm
    if schedule.updates:
        yield from _with_own_updates(body, lines, together=together)
        return
    last = body.last_of_all(schedule.last_kind)
    for place, action in enumerate(body.actions):
        yield from lines[action.stage](action.kind, action.number)
        if action.kind == schedule.last_kind:
            yield from lines[action.stage]("S", action.number)
            updated = (action.stage,) if not together else sorted(lines) if place in last else ()
            for stage in updated:
                yield from lines[stage]("U", action.number)


def _with_own_updates(body: Body, lines: Mapping[int, Lines], *, together: bool) -> Iterator[Instruction]:
    """The same of a body that has its updates: exchanges begin after the backward, and end before the update.

    Updates that wait for the norm of the whole model's gradient follow one another, and the last stage's norm comes
    first.
    """
    for place, action in enumerate(body.actions):
        if action.kind == "U":
            follows = place > 0 and body.actions[place - 1].kind == "U"
            complete = [action.stage] if not together else [] if follows else sorted(lines, reverse=True)
            for stage in complete:
                yield from (i for i in lines[stage]("S", action.number) if i.opcode != "box")
        yield from lines[action.stage](action.kind, action.number)
        if action.kind == "B":
            yield from (i for i in lines[action.stage]("S", action.number) if i.opcode == "box")


def distances(reading: Reading, stage: int) -> tuple[str, str]:
    """How far forward and backward of ``stage`` predict their weights, as a program says it; empty for not at all."""
    plan, rule = reading.plan, reading.rule
    if not rule.predicts:
        return "", ""
    behind, half = plan.num_stages - 1 - stage, stage // 2
    counted = DISTANCES[plan.predictor] == "crossed"
    if rule.target == "next":
        ahead = back = "1"
    elif rule.target == "entry":
        ahead, back = (f"crossed+{half}",) * 2 if counted else (str(half + behind), str(half))
    else:
        ahead = "crossed" if counted else str(behind + (DISTANCES[plan.predictor] == "lag+1"))
        back = ""
    return ahead, back if reading.backward_reads == "ahead" else ""


def reads(reading: Reading, stage: int, holder: int = 0, start: int = 0) -> str:
    """Which version a stage's forwards on one holder read, as a program says it; empty for the newest.

    Args:
        reading: of the plan.
        stage: k.
        holder: its number among the stage's holders.
        start: the first micro-batch of the batch, which says whose turn it is, or an offset that stands for it.
    """
    plan, rule = reading.plan, reading.rule
    if rule.versions == "entry":
        return ENTRY if stage else ""  # stage 0 reads its newest
    if rule.fresh is None:
        return ""
    turns = len(plan.stages[stage].workers) if reading.takes_turns else 1
    numbers = [reading.number_in_batch(holder, index) for index in range(plan.micro_batches)]
    letters = "".join(
        [
            NEITHER if (start + n - holder) % turns else FRESH if reading.is_fresh(i, stage) else PREVIOUS
            for n, i in enumerate(numbers)
        ]
    )
    if reading.moves_states and not all(reading.is_fresh(i, stage) for i in range(plan.batch_parts)):
        return letters + KEPT
    return letters if PREVIOUS in letters else ""


def reads_older(reading: Reading, stage: int, holder: int) -> bool:
    """Whether any forward of a stage on one holder reads another version than the newest by the rule's table."""
    size = reading.plan.micro_batches
    turn = math.lcm(size, len(reading.plan.stages[stage].workers)) if reading.takes_turns else size
    return any({PREVIOUS, KEPT} & {*reads(reading, stage, holder, start)} for start in range(0, turn, size))


def _lines(reading: Reading, home: Home, channels: tuple[Channel, ...]) -> Lines:
    """What the actions of a stage on one of its holders are as instructions."""
    plan = reading.plan
    port, holder = home.port, home.holder
    stage = port.stage
    by_kind: dict[ChannelKind, list[Channel]] = {}
    for channel in channels:
        by_kind.setdefault(channel.kind, []).append(channel)

    def ends(kind: ChannelKind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Channels of a kind into the port and out of it, by number."""
        own = by_kind.get(kind, ())
        return tuple([c.id for c in own if port in c.targets]), tuple([c.id for c in own if port in c.sources])

    data, forward, backward = ends("data"), ends("forward"), ends("gradient")
    squares, norms = ends("grad-norm-sq"), ends("grad-norm")
    exchanged, boxed, unboxed, gathered, made, before, again = (ends(kind)[0] for kind in EXCHANGES)
    ahead_by, back_by = distances(reading, stage)
    summed, halved = reading.needs_norm, reading.schedule.halved
    onward = _boxes(reading, stage, "boxed", boxed)
    back = _boxes(reading, stage, "boxed-gradient", unboxed)
    used, used_back = (_gathers(reading, stage, *own) for own in ((WEIGHT_FORWARD, before), (WEIGHT_BACKWARD, again)))
    parts = _gathers(reading, stage, GRADIENT_PARTS, made)
    apart = [] if plan.backward == "recompute" else sorted({*used, *parts})  # that runs a stage again as a whole
    weights = reading.backward_reads
    kept = "forward" if used_back and weights == "forward" else ""  # as parts: a tape would have them whole
    mode = "mixed" if kept else plan.backward
    borders = sorted({segment for _, segment, _ in (*onward, *back)} | {segment - 1 for segment in apart[1:]})

    others, form = iter(data[1]), reading.form
    reads_apart = form is not None and form.replicates

    def lines(kind: str, offset: int) -> list[Instruction]:
        if kind == "R":
            return [Instruction("read", stage, offset, data[0])]
        if kind == "D":
            return [Instruction("deal", stage, offset, gives=(next(others),))]
        if kind == "F":
            version = reads(reading, stage, holder, offset - offset % plan.micro_batches)
            ran = Instruction("forward", stage, offset, *forward, version, kept, ahead_by, mode)
            first = _read(reading, port, offset, data) if stage == 0 and not reads_apart else []
            return [*first, *_in_parts(ran, borders, onward, used)]
        if kind == "B":
            ran = Instruction("backward", stage, offset, *backward, "", weights, back_by, mode)
            return _in_parts(ran, borders, back, used_back, {} if halved else parts)
        if kind == "W":
            ran = Instruction("backward-weight", stage, offset)
            return [
                ran,
                *(line for i, channel in parts.items() for line in _exchanged(ran, channel, f"{GRADIENTS}{i}")),
            ]
        if kind in ("A", "T"):
            return [_handed_on(reading, home, kind, offset, channels)]
        if kind in HANDING_ON:
            into, out = ends("state" if kind in "hP" else "state-back")
            return [
                Instruction("hold", stage, offset, takes=into)
                if kind in "hH"
                else Instruction("pass", stage, offset, gives=out)
            ]
        if kind == "S":
            ran = Instruction("grad-norm-sq", stage, offset, *squares)
            return [*(line for channel in exchanged for line in _exchanged(ran, channel)), *([ran] if summed else [])]
        ran = Instruction("update", stage, offset, *norms)
        return [ran, *(line for channel in gathered for line in _exchanged(ran, channel))]

    return lines


def _read(
    reading: Reading, port: Port, offset: int, data: tuple[tuple[int, ...], tuple[int, ...]]
) -> list[Instruction]:
    """Reading a micro-batch; where holders take them in turns, the one that reads deals out the others too."""
    takes, gives = data
    if not (gives and reading.takes_turns):
        return [Instruction("read", port.stage, offset, takes, gives)]
    dealt = [Instruction("deal", port.stage, offset + n, gives=(channel,)) for n, channel in enumerate(gives, 1)]
    return [Instruction("read", port.stage, offset), *dealt]


def _handed_on(reading: Reading, home: Home, kind: str, end: int, channels: Sequence[Channel]) -> Instruction:
    """Adding a holder's gradients of a batch to those of the others, or sharing the total."""
    port, ports = home.port, home.ports
    known = {(c.kind, c.sources[0], c.targets[0]): c.id for c in channels if c.kind in SUMS}
    between = [] if reading.moves_states else hops_in(reading, port.stage, end)
    hops = [(of, ports[source], ports[target]) for of, source, target in between]
    into = "total" if kind == "T" else "partial"
    takes = tuple([known[hop] for hop in hops if hop[0] == into and hop[2] == port])
    shares = bool(takes) if kind == "T" else port not in [target for of, _, target in hops if of == "total"]
    given = ("partial", "total") if shares and kind == "A" else ("total",) if shares else ("partial",) * (kind == "A")
    out = [hop for hop in hops if hop[1] == port and hop[0] in given]
    return Instruction("sum" if kind == "A" else "share", port.stage, end, takes, tuple([known[hop] for hop in out]))


_NONE: Mapping[int, int] = MappingProxyType({})

_Exchanged = Callable[[Instruction, int, str], list[Instruction]]

_Boxing = tuple[str, int, int]
"""Name of a value, the segment after which it is boxed, and the channel."""


def _boxes(reading: Reading, stage: int, kind: str, channels: Sequence[int]) -> list[_Boxing]:
    """The boxings of a stage, in the order of its forward."""
    plan = reading.plan
    planned = [exchange for exchange in plan.exchanges if (exchange.stage, exchange.kind) == (stage, kind)]
    return [(e.value, e.segment, channel) for e, channel in zip(planned, channels, strict=True)]


def _gathers(reading: Reading, stage: int, kind: str, channels: Sequence[int]) -> dict[int, int]:
    """The channel on which each segment's weights are gathered, or gradients scattered, by number of the segment."""
    planned = [exchange for exchange in reading.plan.exchanges if (exchange.stage, exchange.kind) == (stage, kind)]
    return {exchange.segment: channel for exchange, channel in zip(planned, channels, strict=True)}


def _exchanged(after: Instruction, channel: int, of: str = "") -> list[Instruction]:
    stage, offset = after.stage, after.offset
    return [
        Instruction("box", stage, offset, gives=(channel,), of=of),
        Instruction("unbox", stage, offset, takes=(channel,), of=of),
    ]


def _gathered(before: Instruction, channel: int, of: str) -> list[Instruction]:
    """What gathers those weights that a forward or a backward reads."""
    box, unbox = _exchanged(before, channel, of)
    weights = before.weights if before.opcode == "backward" else ""
    return [replace(box, reads=before.reads, weights=weights, distance=before.distance), unbox]


def _in_parts(
    whole: Instruction,
    borders: Sequence[int],
    boxings: Sequence[_Boxing],
    gathers: Mapping[int, int],
    scatters: Mapping[int, int] = _NONE,
) -> list[Instruction]:
    """A forward or a backward in parts, with boxings between them, what gathers weights before and scatters gradients.

    While a part runs, the next one's weights are gathered, and the gradients of the one before are scattered. What
    gathers a forward's first weights takes its messages: only they say that there is another micro-batch.

    Args:
        whole: the instruction.
        borders: numbers of the segments behind which something is boxed or gathered, forward or backward.
        boxings: those of this direction.
        gathers: the channels on which weights are gathered before, by segment.
        scatters: those on which gradients are scattered afterwards.
    """
    ends = [*pairwise([0, *(segment + 1 for segment in borders), END])]

    def beside(channels: Mapping[int, int], of: str, exchanged: _Exchanged) -> list[list[Instruction]]:
        """For each part what is exchanged of its segments."""
        own = [[(i, channel) for i, channel in channels.items() if start <= i < stop] for start, stop in ends]
        return [[line for i, channel in part for line in exchanged(whole, channel, f"{of}{i}")] for part in own]

    needed, made = beside(gathers, SEGMENT, _gathered), beside(scatters, GRADIENTS, _exchanged)
    first = next((own for own in needed[:2] if own), None)
    if whole.opcode == "forward" and first is not None:
        first[0], whole = replace(first[0], takes=whole.takes), replace(whole, takes=())
    if not borders:
        return [*needed[0], whole, *made[0]]
    spans = [f"{start}:{stop}" for start, stop in ends]
    between = [
        [line for value, at, channel in boxings if at == segment for line in _exchanged(whole, channel, value)]
        for segment in borders
    ]
    if whole.opcode == "backward":
        spans, between, needed, made = spans[::-1], between[::-1], needed[::-1], made[::-1]
    what, how = (whole.opcode, whole.stage, whole.offset), (whole.reads, whole.weights, whole.distance, whole.mode)
    parts = [Instruction(*what, (), (), *how, segments=span) for span in spans]
    parts[0], parts[-1] = replace(parts[0], takes=whole.takes), replace(parts[-1], gives=whole.gives)
    lines, behind = [*needed[0]], list[Instruction]()
    for boxed, part, ahead, scattered in zip([[], *between], parts, [*needed[1:], []], made, strict=True):
        lines += [*boxed, *_with("box", ahead), part, *_with("box", scattered), *behind, *_with("unbox", ahead)]
        behind = _with("unbox", scattered)
    return lines + behind


def _with(opcode: str, lines: Sequence[Instruction]) -> list[Instruction]:
    return [line for line in lines if line.opcode == opcode]
