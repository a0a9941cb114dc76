"""From a plan to one program per worker. Here, and in the worker, numbers of workers may be told apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from roundelay.ir.action import Action
from roundelay.ir.clip import Clip
from roundelay.ir.loss_scale import LossScale
from roundelay.ir.plan import Plan
from roundelay.ir.program import ENTRY, FRESH, PREVIOUS, Channel, Instruction, Program
from roundelay.ir.rule import DISTANCES, UpdateRule, rule_named
from roundelay.schedules import num_workers, schedule_named

Lines = Callable[[str, int], tuple[Instruction, ...]]
"""From a kind of action and an offset to the instructions that stand for it."""

REGISTERS = 2
"""Batches of the worker that reads: one in use while another is loaded (OneFlow, sections 4.3 and 6.1)."""


def channels_of(plan: Plan) -> tuple[Channel, ...]:
    """Every channel of a plan: for each edge one forward, and one back if a gradient travels.

    Where the norm of the whole model's gradient is needed, every other stage sends its own squared norm to stage 0,
    with slots for the batches that stage k can finish before stage 0 has finished the first of them. Where updates wait
    for the norm, stage 0 sends it to every other stage, one batch's at a time.
    """
    channels: list[Channel] = []
    flushes = schedule_named(rule_named(plan.rule).schedule).window == "batch"
    for edge in plan.edges:
        channels.append(Channel(len(channels), "forward", edge.source, edge.target, edge.slots))
        if edge.gradient:
            channels.append(Channel(len(channels), "gradient", edge.target, edge.source, edge.slots))
    for k in range(1, plan.num_stages if uses_grad_norm(plan) else 1):
        slots = 1 if flushes else 1 + -(-k // plan.micro_batches)
        channels.append(Channel(len(channels), "grad-norm-sq", k, 0, slots))
    for k in range(1, plan.num_stages if awaits_grad_norm(plan) else 1):
        channels.append(Channel(len(channels), "grad-norm", 0, k, 1))
    return tuple(channels)


def uses_grad_norm(plan: Plan) -> bool:
    """Whether stage 0 needs the norm of the whole model's gradient: for clipping, or for the loss scale."""
    return Clip.parse(plan.clip).whole or LossScale.parse(plan.loss_scale).on


def awaits_grad_norm(plan: Plan) -> bool:
    """Whether an update waits for the norm of its own batch: it clips by it, or is skipped if it is not finite."""
    flushes = schedule_named(rule_named(plan.rule).schedule).window == "batch"
    return Clip.parse(plan.clip).by == "global" or (LossScale.parse(plan.loss_scale).on and flushes)


def emit(plan: Plan) -> tuple[Program, ...]:
    """One program per worker.

    Raises:
        PlanError: the rule or its schedule is unknown.
    """
    rule = rule_named(plan.rule)
    schedule = schedule_named(rule.schedule)
    channels = channels_of(plan)
    if schedule.order is None:
        return tuple(_program(plan, rule, k, channels) for k in range(plan.num_stages))
    size = num_workers(plan)
    orders = [schedule.order(k, size, plan.micro_batches) for k in range(size)]
    return tuple(_ordered(plan, rule, k, order, channels) for k, order in enumerate(orders))


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


def _lines(plan: Plan, rule: UpdateRule, stage: int, channels: tuple[Channel, ...], told: int | None = None) -> Lines:
    """What a stage's actions are as instructions; ``told`` is the stage's number where they must say it."""
    takes = _ids(channels, "forward", target=stage)
    gives = _ids(channels, "forward", source=stage)
    grads_in = _ids(channels, "gradient", target=stage)
    grads_out = _ids(channels, "gradient", source=stage)
    norms = _ids(channels, "grad-norm", target=stage), _ids(channels, "grad-norm", source=stage)
    squares = _ids(channels, "grad-norm-sq", target=stage), _ids(channels, "grad-norm-sq", source=stage)
    ahead_by, back_by = distances(plan, rule, stage)
    summed = uses_grad_norm(plan)
    version, weights, mode = reads(plan, rule, stage), rule.backward_reads(plan.backward), plan.backward

    def lines(kind: str, offset: int) -> tuple[Instruction, ...]:
        if kind == "B":
            return (Instruction("backward", offset, grads_in, grads_out, "", weights, back_by, mode, told),)
        if kind == "W":
            return (Instruction("backward-weight", offset, stage=told),)
        if kind == "S":
            return (Instruction("grad-norm-sq", offset, *squares, stage=told),) if summed else ()
        if kind == "U":
            return (Instruction("update", offset, *norms, stage=told),)
        forward = Instruction("forward", offset, takes, gives, version, "", ahead_by, mode, told)
        return (Instruction("read", offset, stage=told), forward) if stage == 0 else (forward,)

    return lines


def _program(plan: Plan, rule: UpdateRule, stage: int, channels: tuple[Channel, ...]) -> Program:
    """Of a worker with one stage: blocks over one g."""
    schedule = schedule_named(rule.schedule)
    lag = schedule.lag(stage, plan.num_stages, plan.micro_batches)
    lines = _lines(plan, rule, stage, channels)
    delay = schedule.delay(stage) if schedule.delay is not None else 0
    late = lines("W", -delay) if schedule.halved else ()
    back = (*lines("B", 0), *late, *lines("S", -delay), *lines("U", -delay))
    return Program(
        worker=stage,
        num_workers=plan.num_stages,
        window=schedule.window,
        lag=lag,
        tapes=plan.micro_batches if schedule.window == "batch" and lag >= plan.micro_batches else lag + 1,
        channels=tuple(c for c in channels if stage in (c.source, c.target)),
        warm_up=lines("F", 0),
        steady=(*lines("F", lag), *back),
        drain=back,
        owed=min(delay + 1, plan.micro_batches) if schedule.halved else 0,
        tail=(*lines("W", 0), *lines("S", 0), *lines("U", 0)) if delay else (),
        registers=REGISTERS if stage == 0 else 0,
    )


def _ordered(
    plan: Plan, rule: UpdateRule, worker: int, order: Sequence[Action], channels: tuple[Channel, ...]
) -> Program:
    """Of a worker with several stages: the order written out; the batch may end with any of its second halves.

    An update that waits for the norm of all gradients waits for those of the worker's other stage too: then both come
    behind the whole batch, that of the lower stage first, as stage 0 tells the norm.
    """
    together = awaits_grad_norm(plan)
    stages = sorted({action.stage for action in order})
    lines = {stage: _lines(plan, rule, stage, channels, stage) for stage in stages}
    made: list[Instruction] = []
    for action in order:
        made += lines[action.stage](action.kind, action.number)
        if action.kind == "W":
            made += lines[action.stage]("S", action.number)
            made += () if together else lines[action.stage]("U", action.number)
    for stage in stages if together else ():
        made += [line for number in range(plan.micro_batches) for line in lines[stage]("U", number)]
    return Program(
        worker=worker,
        num_workers=num_workers(plan),
        window=schedule_named(rule.schedule).window,
        lag=0,
        tapes=_most(order, {"F": 1, "B": -1}),
        channels=tuple(c for c in channels if c.source in stages or c.target in stages),
        warm_up=(),
        steady=(),
        drain=(),
        owed=_most(order, {"B": 1, "W": -1}),
        registers=REGISTERS if 0 in stages else 0,
        order=tuple(made),
    )


def _most(order: Sequence[Action], change: dict[str, int]) -> int:
    """The largest sum of changes at any place of an order."""
    return max(accumulate(change.get(action.kind, 0) for action in order))


def _ids(channels: tuple[Channel, ...], kind: str, *, source: int = -1, target: int = -1) -> tuple[int, ...]:
    """Channels of a kind into ``target`` or out of ``source``, by number of the other end."""
    return tuple(c.id for c in channels if c.kind == kind and (c.source == source or c.target == target))
