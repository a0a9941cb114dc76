"""From a plan to one program per worker. Only here, and in the worker, may code depend on the number of a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from roundelay.ir.clip import Clip
from roundelay.ir.exchange import Phase
from roundelay.ir.loss_scale import LossScale
from roundelay.ir.plan import Plan
from roundelay.ir.program import ENTRY, FRESH, PREVIOUS, Channel, ChannelKind, Instruction, Port, Program
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

    In each replica each edge has one forward, and one back if a gradient travels. The worker that reads sends the other
    replicas their micro-batches. What the holders of a stage exchange has one channel among them.

    Where the norm of the whole model's gradient is needed, every other stage of the first replica sends its own squared
    norm to stage 0, with slots for the batches that stage k can finish before stage 0 has finished the first of them.
    Where updates wait for the norm, stage 0 sends it to every other port, one batch's at a time.
    """
    channels: list[Channel] = []
    flushes = schedule_of(plan).window == "batch"
    ports = [[Port(worker, stage) for worker in plan.holders(stage)] for stage in range(plan.num_stages)]

    def add(kind: ChannelKind, source: Port, target: Port, slots: int) -> None:
        channels.append(Channel(len(channels), kind, (source,), (target,), slots))

    for r in range(1, plan.replicas):
        add("data", ports[0][0], ports[0][r], REGISTERS)
    for edge in plan.edges:
        for source, target in zip(ports[edge.source], ports[edge.target], strict=True):
            add("forward", source, target, edge.slots)
            if edge.gradient:
                add("gradient", target, source, edge.slots)
    for exchange in plan.exchanges:
        kind: ChannelKind = exchange.kind  # type: ignore[assignment]
        holders, phases = tuple(ports[exchange.stage]), tuple(map(Phase.parse, exchange.phases))
        channels.append(Channel(len(channels), kind, holders, holders, 1, phases))
    if uses_grad_norm(plan):
        for k in range(1, plan.num_stages):
            add("grad-norm-sq", ports[k][0], ports[0][0], 1 if flushes else 1 + -(-k // plan.micro_batches))
    if awaits_grad_norm(plan):
        for port in [port for of_stage in ports for port in of_stage][1:]:
            add("grad-norm", ports[0][0], port, 1)
    return tuple(channels)


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
    exchanged, squares, norms = ends("weight-gradient"), ends("grad-norm-sq"), ends("grad-norm")
    ahead_by, back_by = distances(plan, rule, stage)
    summed = uses_grad_norm(plan)
    version, weights, mode = reads(plan, rule, stage), rule.backward_reads(plan.backward), plan.backward

    def lines(kind: str, offset: int) -> list[Instruction]:
        if kind == "F":
            ran = Instruction("forward", stage, offset, *forward, version, "", ahead_by, mode)
            return [Instruction("read", stage, offset, *data), ran] if stage == 0 else [ran]
        if kind == "B":
            return [Instruction("backward", stage, offset, *backward, "", weights, back_by, mode)]
        if kind == "W":
            return [Instruction("backward-weight", stage, offset)]
        if kind == "S":
            boxed = [Instruction("box", stage, offset, gives=exchanged[1])] if exchanged[1] else []
            boxed += [Instruction("unbox", stage, offset, takes=exchanged[0])] if exchanged[0] else []
            return [*boxed, Instruction("grad-norm-sq", stage, offset, *squares)] if summed else boxed
        return [Instruction("update", stage, offset, *norms)]

    return lines
