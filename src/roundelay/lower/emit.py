"""From a plan to one program per worker. Here, and in the worker, numbers of workers may be told apart."""

from __future__ import annotations

from roundelay.ir.plan import Plan
from roundelay.ir.program import ENTRY, FRESH, PREVIOUS, Channel, Instruction, Program
from roundelay.ir.rule import DISTANCES, UpdateRule, rule_named
from roundelay.lower.riding import Riding
from roundelay.schedules import schedule_named

REGISTERS = 2
"""Batches of the worker that reads: one in use while another is loaded (OneFlow, sections 4.3 and 6.1)."""


def channels_of(plan: Plan) -> tuple[Channel, ...]:
    """Every channel of a plan: for each edge one forward, and one back if a gradient or a square travels.

    Where updates wait for the norm of all gradients, stage 0 tells it to every other one: one batch's at a time, since
    stage 0 knows the next only when all have made this update.
    """
    channels: list[Channel] = []
    riding = Riding.of(plan)
    for edge in plan.edges:
        channels.append(Channel(len(channels), "forward", edge.source, edge.target, edge.slots))
        if edge.gradient or (riding.square and edge.target == edge.source + 1):
            channels.append(Channel(len(channels), "gradient", edge.target, edge.source, edge.slots))
    for k in range(1, plan.num_stages if riding.awaited else 1):
        channels.append(Channel(len(channels), "norm", 0, k, 1))
    return tuple(channels)


def emit(plan: Plan) -> tuple[Program, ...]:
    """One program per worker.

    Raises:
        PlanError: the rule or its schedule is unknown.
    """
    rule = rule_named(plan.rule)
    channels = channels_of(plan)
    return tuple(_program(plan, rule, k, channels) for k in range(plan.num_stages))


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


def _program(plan: Plan, rule: UpdateRule, stage: int, channels: tuple[Channel, ...]) -> Program:
    schedule = schedule_named(rule.schedule)
    lag = schedule.lag(stage, plan.num_stages, plan.micro_batches)
    takes = _ids(channels, "forward", target=stage)
    gives = _ids(channels, "forward", source=stage)
    grads_in = _ids(channels, "gradient", target=stage)
    grads_out = _ids(channels, "gradient", source=stage)
    ahead_by, back_by = distances(plan, rule, stage)
    version = reads(plan, rule, stage)

    def ahead(offset: int) -> tuple[Instruction, ...]:
        forward = Instruction("forward", offset, takes, gives, version, distance=ahead_by, mode=plan.backward)
        return (Instruction("read", offset), forward) if stage == 0 else (forward,)

    delay = schedule.delay(stage) if schedule.delay is not None else 0
    late = (Instruction("backward-weight", -delay),) if schedule.halved else ()
    back = (
        Instruction("backward", 0, grads_in, grads_out, "", rule.backward_reads(plan.backward), back_by, plan.backward),
        *late,
        Instruction("update", -delay, _ids(channels, "norm", target=stage), _ids(channels, "norm", source=stage)),
    )
    return Program(
        worker=stage,
        num_workers=plan.num_stages,
        window=schedule.window,
        lag=lag,
        tapes=plan.micro_batches if schedule.window == "batch" and lag >= plan.micro_batches else lag + 1,
        channels=tuple(c for c in channels if stage in (c.source, c.target)),
        warm_up=ahead(0),
        steady=(*ahead(lag), *back),
        drain=back,
        owed=min(delay + 1, plan.micro_batches) if schedule.halved else 0,
        tail=(Instruction("backward-weight", 0), Instruction("update", 0)) if delay else (),
        registers=REGISTERS if stage == 0 else 0,
    )


def _ids(channels: tuple[Channel, ...], kind: str, *, source: int = -1, target: int = -1) -> tuple[int, ...]:
    """Channels of a kind into ``target`` or out of ``source``, by number of the other end."""
    return tuple(c.id for c in channels if c.kind == kind and (c.source == source or c.target == target))
