"""From a plan to one program per worker. Only here, and in the worker, may code depend on the number of a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from roundelay.ir.clip import Clip
from roundelay.ir.exchange import Phase
from roundelay.ir.loss_scale import LossScale
from roundelay.ir.plan import REPLICAS, ExchangePlan, Plan
from roundelay.ir.program import (
    END,
    ENTRY,
    EXCHANGES,
    FRESH,
    PREVIOUS,
    Channel,
    ChannelKind,
    Instruction,
    Port,
    Program,
)
from roundelay.ir.rule import DISTANCES, UpdateRule, rule_named
from roundelay.schedules import Body, Schedule, schedule_named

Lines = Callable[[str, int], list[Instruction]]
"""From a kind of action and an offset to the instructions that stand for it."""

REGISTERS = 2
"""Batches of the worker that reads: one in use while another is loaded (OneFlow, sections 4.3 and 6.1)."""


def schedule_of(plan: Plan) -> Schedule:
    """The schedule that a plan's rule runs on.

    Raises:
        PlanError: there is no such rule, or no such schedule.
    """
    return schedule_named(rule_named(plan.rule).schedule)


def channels_of(plan: Plan) -> tuple[Channel, ...]:
    """Every channel of a plan.

    Between two stages each edge has one forward, and one back if a gradient travels, for each holder of the stages. The
    worker that reads sends the other holders of stage 0 their micro-batches. What the holders of a stage exchange has a
    channel for each group of them along the exchange's axis.

    Where the norm of the whole model's gradient is needed, every other port that has a part of it sends its own squared
    norm to the first port, with slots for the batches that stage k can finish before stage 0 has finished the first of
    them. Where updates wait for the norm, it is sent to every other port, one batch's at a time.
    """
    channels: list[Channel] = []
    flushes = schedule_of(plan).window == "batch"
    ports = [[Port(worker, stage) for worker in plan.holders(stage)] for stage in range(plan.num_stages)]
    first_of_all, size = ports[0][0], plan.mesh_size

    def add(kind: ChannelKind, source: Port, target: Port, slots: int) -> None:
        channels.append(Channel(len(channels), kind, (source,), (target,), slots))

    for port in ports[0][1:]:
        add("data", first_of_all, port, REGISTERS)
    for edge in plan.edges:
        for source, target in zip(ports[edge.source], ports[edge.target], strict=True):
            add("forward", source, target, edge.slots)
            if edge.gradient:
                add("gradient", target, source, edge.slots)
    for exchange in plan.exchanges:
        kind: ChannelKind = exchange.kind  # type: ignore[assignment]
        phases, own = tuple(map(Phase.parse, exchange.phases)), ports[exchange.stage]
        for group in _groups(plan, exchange.axis):
            holders = tuple([own[i] for i in group])
            channels.append(Channel(len(channels), kind, holders, holders, 1, phases))
    if uses_grad_norm(plan):
        for k, of_stage in enumerate(ports):
            for port in [port for port in (of_stage if plan.states else of_stage[:size]) if port != first_of_all]:
                add("grad-norm-sq", port, first_of_all, 1 if flushes else 1 + -(-k // plan.micro_batches))
    if awaits_grad_norm(plan):
        for port in [port for of_stage in ports for port in of_stage if port != first_of_all]:
            add("grad-norm", first_of_all, port, 1)
    return tuple(channels)


def exchanges_of(plan: Plan) -> dict[int, ExchangePlan]:
    """What is exchanged on each channel that is an exchange."""
    channels = [channel for channel in channels_of(plan) if channel.phases]
    planned = [exchange for exchange in plan.exchanges for _ in _groups(plan, exchange.axis)]
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


def emit(plan: Plan) -> tuple[Program, ...]:
    """One program per worker.

    Raises:
        PlanError: the rule or its schedule is unknown.
    """
    schedule, channels = schedule_of(plan), channels_of(plan)
    return tuple(_program(plan, schedule, worker, channels) for worker in range(plan.num_workers))


def _program(plan: Plan, schedule: Schedule, worker: int, channels: tuple[Channel, ...]) -> Program:
    stages = plan.stages_of(worker)
    body = schedule.body(stages, plan.num_stages, plan.micro_batches)
    return Program(
        worker=worker,
        num_workers=plan.num_workers,
        every=body.every,
        over=schedule.window,
        tapes=body.peak(schedule.window, plan.micro_batches, "F", "B"),
        owed=body.peak(schedule.window, plan.micro_batches, "B", "W") if schedule.halved else 0,
        registers=REGISTERS if worker == plan.worker_of(0) else 0,
        channels=tuple(c for c in channels if c.filled_by(worker) or c.read_by(worker)),
        body=tuple(_with_updates(plan, schedule, body, {k: _lines(plan, Port(worker, k), channels) for k in stages})),
    )


def _with_updates(plan: Plan, schedule: Schedule, body: Body, lines: Mapping[int, Lines]) -> Iterator[Instruction]:
    """The body as instructions: exchanges and updates follow the last backwards of their batch.

    Updates that wait for the norm of the whole model's gradient wait for the backwards of all stages of the worker.
    They come after the last of these, that of the lower stage first, as stage 0 sends the norm.
    """
    together = awaits_grad_norm(plan)
    last = body.last_of_all(schedule.last_kind)
    for place, action in enumerate(body.actions):
        line = lines[action.stage]
        yield from line(action.kind, action.number)
        if action.kind == schedule.last_kind:
            yield from line("S", action.number)
            updated = (action.stage,) if not together else sorted(lines) if place in last else ()
            for stage in updated:
                yield from lines[stage]("U", action.number)


def distances(plan: Plan, rule: UpdateRule, stage: int) -> tuple[str, str]:
    """How far forward and backward of ``stage`` predict their weights, as a program says it; empty for not at all."""
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
    return ahead, back if rule.backward_reads(plan.backward) == "ahead" else ""


def reads(plan: Plan, rule: UpdateRule, stage: int) -> str:
    """Which version the forwards of ``stage`` read, as a program says it; empty for the newest."""
    if rule.versions == "entry":
        return ENTRY if stage else ""  # stage 0 reads its newest
    if rule.fresh is None:
        return ""
    numbers = range(1, plan.micro_batches + 1)
    letters = "".join([FRESH if rule.fresh(i, stage + 1, plan.num_stages) else PREVIOUS for i in numbers])
    return letters if PREVIOUS in letters else ""


def _lines(plan: Plan, port: Port, channels: tuple[Channel, ...]) -> Lines:
    """What the actions of a stage on its worker are as instructions."""
    rule, stage = rule_named(plan.rule), port.stage

    def ends(kind: ChannelKind) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Channels of a kind into the port and out of it, by number."""
        own = [c for c in channels if c.kind == kind]
        return tuple([c.id for c in own if port in c.targets]), tuple([c.id for c in own if port in c.sources])

    data, forward, backward = ends("data"), ends("forward"), ends("gradient")
    squares, norms = ends("grad-norm-sq"), ends("grad-norm")
    exchanged, boxed, unboxed, gathered = (ends(kind)[0] for kind in EXCHANGES)
    ahead_by, back_by = distances(plan, rule, stage)
    summed = uses_grad_norm(plan)
    version, weights, mode = reads(plan, rule, stage), rule.backward_reads(plan.backward), plan.backward
    onward = _boxes(plan, stage, "boxed", boxed)
    back = _boxes(plan, stage, "boxed-gradient", unboxed)
    borders = sorted({segment for _, segment, _ in (*onward, *back)})

    def lines(kind: str, offset: int) -> list[Instruction]:
        if kind == "F":
            ran = Instruction("forward", stage, offset, *forward, version, "", ahead_by, mode)
            made = [Instruction("read", stage, offset, *data)] if stage == 0 else []
            return [*made, *_in_parts(ran, borders, onward)]
        if kind == "B":
            ran = Instruction("backward", stage, offset, *backward, "", weights, back_by, mode)
            return _in_parts(ran, borders, back)
        if kind == "W":
            return [Instruction("backward-weight", stage, offset)]
        if kind == "S":
            ran = Instruction("grad-norm-sq", stage, offset, *squares)
            return [*(line for channel in exchanged for line in _exchanged(ran, channel)), *([ran] if summed else [])]
        ran = Instruction("update", stage, offset, *norms)
        return [ran, *(line for channel in gathered for line in _exchanged(ran, channel))]

    return lines


_Boxing = tuple[str, int, int]
"""Name of a value, the segment after which it is boxed, and the channel."""


def _boxes(plan: Plan, stage: int, kind: str, channels: Sequence[int]) -> list[_Boxing]:
    """The boxings of a stage, in the order of its forward."""
    planned = [exchange for exchange in plan.exchanges if (exchange.stage, exchange.kind) == (stage, kind)]
    return [(e.value, e.segment, channel) for e, channel in zip(planned, channels, strict=True)]


def _exchanged(after: Instruction, channel: int, of: str = "") -> list[Instruction]:
    box = Instruction("box", after.stage, after.offset, gives=(channel,), of=of)
    return [box, replace(box, opcode="unbox", gives=(), takes=(channel,))]


def _in_parts(whole: Instruction, borders: Sequence[int], boxings: Sequence[_Boxing]) -> list[Instruction]:
    """A forward or a backward in parts, with boxings between them.

    Args:
        whole: the instruction.
        borders: numbers of the segments behind which something is boxed, forward or backward.
        boxings: those of this direction.
    """
    if not borders:
        return [whole]
    spans = [f"{start}:{stop}" for start, stop in pairwise([0, *(segment + 1 for segment in borders), END])]
    between = [
        [line for value, at, channel in boxings if at == segment for line in _exchanged(whole, channel, value)]
        for segment in borders
    ]
    if whole.opcode == "backward":
        spans, between = spans[::-1], between[::-1]
    parts = [replace(whole, segments=span, takes=(), gives=()) for span in spans]
    parts[0], parts[-1] = replace(parts[0], takes=whole.takes), replace(parts[-1], gives=whole.gives)
    return [line for boxed, part in zip([[], *between], parts, strict=True) for line in (*boxed, part)]
