"""Prove a plan before it runs.

The programs are executed by the actor machine itself on a virtual clock, over runs of every length that matters: full
batches, short ones, and an end at each place in the steady block. What is proved of each:

- every message that is sent is received, no more and no fewer, and nothing is left over;
- no register overflows: slots, forwards that wait for their backward, and backwards that wait for their second half;
- nobody waits for ever;
- the actions of every stage come in the order that the schedule states;
- every version that is read exists, and is the one that the rule states (:func:`version_read`), predicted as far ahead
  as it states (:func:`distance_ahead`). Behind a short batch, the version before the newest may not be finished: then a
  forward reads the newest. With full batches that is refused;
- the norm that an update is clipped by, where it is an earlier batch's, is that of the batch stated
  (:func:`norm_read`), the same on every stage.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from roundelay.errors import PlanError
from roundelay.ir.action import Action
from roundelay.ir.clip import Clip
from roundelay.ir.micro_batch import MicroBatch, stream
from roundelay.ir.plan import FORMAT, Plan
from roundelay.ir.program import Program
from roundelay.ir.rule import DISTANCES, NO_PREDICTOR, UpdateRule, rule_named
from roundelay.ir.stage import Partition
from roundelay.lower.emit import emit
from roundelay.schedules import Schedule, actions, schedule_named

TRANSPORTS = ("memory", "shm", "gloo", "nccl")
PRECISIONS = ("fp32", "bf16")
FORKING = ("shm", "gloo")
"""Transports between processes that are forked: a forked process cannot use CUDA once its parent has."""

CPU = "cpu"
DEVICE = re.compile(r"cpu|cuda:(0|[1-9][0-9]{0,3})")
"""Names of devices in a plan."""

LONGEST_S = 3.2e7
"""No wait may last longer."""

EVERY_END = 24
"""Up to this many micro-batches in D batches, runs of every length are proved; beyond, the places that differ."""

_LETTERS = {"forward": "F", "backward": "B", "backward-weight": "W", "update": "U"}


@dataclass(frozen=True, slots=True)
class Fired:
    """One instruction as a run fired it: what is proved about is a list of these per stage."""

    opcode: str
    g: int
    version: int
    reads: int
    distance: int
    entry: int


def check_plan(plan: Plan) -> None:
    """Refuse what no run could obey, before anything is executed.

    Raises:
        PlanError: naming the field.
    """
    rule = rule_named(plan.rule)
    schedule_named(rule.schedule)
    predictors = rule.predictors if rule.predicts else (NO_PREDICTOR,)
    _one_of(
        "predictor", plan.predictor, predictors, f"rule {rule.name!r} " + ("predicts" if rule.predicts else "does not")
    )
    _one_of("backward", plan.backward, rule.modes, f"rule {rule.name!r} allows these")
    _check_clip(plan, rule)
    check_precision(plan)
    _one_of("transport", plan.transport, TRANSPORTS, "what carries the messages")
    _at_least("format", plan.format, FORMAT)
    _at_least("micro_batches", plan.micro_batches, 1)
    _above_zero("deadline_s", plan.deadline_s)
    if plan.deadline_s > LONGEST_S:
        raise PlanError(
            "deadline_s of the plan",
            got=str(plan.deadline_s),
            expected=f"at most {LONGEST_S:g} seconds, a year",
            remedy="Correct the plan.",
        )
    _above_zero("bytes_per_s", plan.bytes_per_s)
    if schedule_named(rule.schedule).halved:
        _check_halves(plan)
    _check_devices(plan)
    for i, edge in enumerate(plan.edges):
        _at_least(f"edges[{i}].slots", edge.slots, 1)
        if not 0 <= edge.source < edge.target < plan.num_stages:
            raise PlanError(
                f"edges[{i}] of the plan",
                got=f"from stage {edge.source} to stage {edge.target}",
                expected=f"an earlier and a later one of the {plan.num_stages} stages",
                remedy="Correct the edge, or write a new plan with `roundelay plan`.",
            )
    missing = {(k, k + 1) for k in range(plan.num_stages - 1)} - {(e.source, e.target) for e in plan.edges}
    if missing or len({(e.source, e.target) for e in plan.edges}) != len(plan.edges):
        raise PlanError(
            "edges of the plan",
            got=f"no edge {min(missing)}" if missing else "an edge given twice",
            expected="one edge for each pair of stages that share a value, neighbours included",
            remedy="Correct the edges, or write a new plan with `roundelay plan`.",
        )


def _check_clip(plan: Plan, rule: UpdateRule) -> None:
    if Clip.parse(plan.clip).by == "global" and schedule_named(rule.schedule).window != "batch":
        raise PlanError(
            "clip of the plan",
            got=f"{plan.clip} beside rule {plan.rule!r}, which never flushes",
            expected="none, stage:NORM or previous:NORM: a batch's own norm is known when stage 0 has finished it, "
            "and by then the other stages must have made its update",
            remedy="Choose previous:NORM, or a rule that flushes: gpipe or 1f1b.",
        )


def _check_halves(plan: Plan) -> None:
    """What no backward in two halves can do."""
    whole = Clip.parse(plan.clip).whole
    refused = {
        "compile": ("true", "false: a compiled backward makes the gradients of inputs and weights at once"),
        "precision": (plan.precision, f"{PRECISIONS[0]}: halves have been tried in single precision only"),
        "clip": (plan.clip, "none or stage:NORM: squares ride on messages that are sent before the weights' half"),
    }
    asked = {"compile": plan.compile, "precision": plan.precision != PRECISIONS[0], "clip": whole}
    for name, (got, expected) in refused.items():
        if asked[name]:
            raise PlanError(
                f"{name} of the plan",
                got=f"{got} beside rule {plan.rule!r}, whose backwards run in two halves",
                expected=expected,
                remedy=f"Leave --{name} out, or choose another rule: gpipe and 1f1b compute the same.",
            )


def check_precision(plan: Plan) -> None:
    """Refuse a precision that no stage computes in; asked for before the model is lowered to it.

    Raises:
        PlanError: naming the field.
    """
    _one_of("precision", plan.precision, PRECISIONS, "in which stages compute")
    if plan.precision != PRECISIONS[0] and plan.compile:
        raise PlanError(
            "precision of the plan",
            got=f"{plan.precision} beside compile = true",
            expected="fp32: compiled stages have been tried in single precision only",
            remedy="Leave --precision or --compile out.",
        )


def _check_devices(plan: Plan) -> None:
    for k, name in enumerate(plan.devices):
        if not DEVICE.fullmatch(name):
            raise PlanError(
                f"stages[{k}].device of the plan",
                got=repr(name),
                expected="cpu, or cuda:0, cuda:1 and so on",
                remedy="Correct the plan or --devices.",
            )
        if name != CPU and plan.compile:
            raise PlanError(
                f"stages[{k}].device of the plan",
                got=f"{name} beside compile = true",
                expected="cpu: compiled stages have been tried on the CPU only",
                remedy="Choose --devices cpu, or leave --compile out.",
            )
        if name != CPU and plan.transport in FORKING:
            raise PlanError(
                f"stages[{k}].device of the plan",
                got=f"{name} beside transport {plan.transport}",
                expected=f"cpu: {plan.transport} carries tensors of the CPU, and its processes are forked",
                remedy="Choose transport memory (threads of one process), nccl (under torchrun), or device cpu.",
            )
        if plan.transport == "nccl" and name == CPU:
            raise PlanError(
                f"stages[{k}].device of the plan",
                got="cpu beside transport nccl",
                expected="a CUDA device for every process",
                remedy="Choose --devices cuda, or transport gloo.",
            )


def check_fit(plan: Plan, fingerprint: str, partition: Partition) -> None:
    """Refuse a plan that is for another model, or whose edges are not those of its cuts.

    Raises:
        PlanError: naming what does not fit.
    """
    if plan.model != fingerprint:
        raise PlanError(
            "the plan's model",
            got=f"fingerprint {plan.model}",
            expected=f"{fingerprint}, the model of this job",
            remedy="Use the job that the plan was made for, or write a new plan with `roundelay plan`.",
        )
    planned = {(e.source, e.target): e.gradient for e in plan.edges}
    needed = {(e.source, e.target): bool(e.gradients) for e in partition.edges}
    if planned != needed:
        raise PlanError(
            "edges of the plan",
            got=_edges_text(planned),
            expected=_edges_text(needed) + ", which its cuts need",
            remedy="Correct the edges, or write a new plan with `roundelay plan`.",
        )


def lengths(plan: Plan) -> list[list[int]]:
    """Runs to prove: micro-batches of each batch, ending at each place in the steady block, with short batches."""
    m, d = plan.micro_batches, plan.num_stages
    few = d * m > EVERY_END
    runs = [[m] * n for n in range(1, d + 2 if few else 2 * d + 2)]
    lasts = sorted({1, 2, m // 2, m - 1} & set(range(1, m))) if few else range(1, m)
    runs += [[m] * n + [last] for n in ((0, 1, d) if few else range(d + 1)) for last in lasts]
    runs.append([1, m, 1, max(1, m - 1), m] * 2)
    return runs


def check_run(plan: Plan, counts: Sequence[int], fired: Sequence[Sequence[Fired]]) -> None:
    """Prove order and versions of one executed run.

    Args:
        plan: the plan.
        counts: micro-batches of each batch.
        fired: for each stage, the instructions that its machine fired.

    Raises:
        PlanError: naming the first stage and micro-batch at which the rule does not hold.
    """
    rule = rule_named(plan.rule)
    schedule = schedule_named(rule.schedule)
    headers = {header.g: header for header in stream(list(counts))}
    batch_of = {g: header.batch for g, header in headers.items()}
    for k, mine in enumerate(fired):
        wanted = actions(schedule, k, plan.num_stages, counts)
        done = [_action(k, f, batch_of) for f in mine if f.opcode in _LETTERS]
        if done != wanted:
            at = next(
                (i for i, (a, b) in enumerate(zip(done, wanted, strict=False)) if a != b), min(len(done), len(wanted))
            )
            got = str(done[at]) if at < len(done) else "the end"
            raise _violation(plan, f"stage {k}, action {at}", got, str(wanted[at]) if at < len(wanted) else "the end")
        for f in mine:
            if f.opcode in ("forward", "backward"):
                _check_weights(plan, rule, k, counts, headers[f.g], f)
            elif f.opcode == "update" and f.entry - 1 != norm_read(plan, counts, f.g):
                place = f"stage {k}, update after micro-batch {f.g}: the newest norm"
                raise _violation(plan, place, f"batch {f.entry - 1}'s", f"batch {norm_read(plan, counts, f.g)}'s")


def _check_weights(
    plan: Plan, rule: UpdateRule, stage: int, counts: Sequence[int], header: MicroBatch, f: Fired
) -> None:
    """Prove that one forward or backward has read the version that the rule states, predicted as far as it states."""
    place = f"stage {stage}, {f.opcode} of micro-batch {f.g}"
    forward = f.opcode == "forward"
    schedule = schedule_named(rule.schedule)
    newest = updates_before(schedule, stage, plan.num_stages, counts, f.g) if forward else header.batch
    if f.version != newest:
        raise _violation(plan, place, f"version {f.version}", f"version {newest}")
    stated = version_read(plan, rule, stage, counts, header) if forward else newest
    if stated > newest and set(counts[: header.batch]) <= {plan.micro_batches}:
        raise _violation(plan, place, f"version {newest}, its newest", f"version {stated}")
    if f.reads != min(stated, newest):
        raise _violation(plan, place, f"version {f.reads}", f"version {min(stated, newest)}")
    far = distance_ahead(plan, rule, stage, f.opcode, header, newest)
    if f.distance != far:
        raise _violation(plan, place, f"distance {f.distance}", f"{far}")


def version_read(plan: Plan, rule: UpdateRule, stage: int, counts: Sequence[int], header: MicroBatch) -> int:
    """The version that the rule states for a forward; more than U(k,g) where the stage does not have it yet.

    Args:
        plan: the plan.
        rule: its rule.
        stage: k.
        counts: micro-batches of each batch.
        header: of the micro-batch.
    """
    if rule.versions == "table":
        assert rule.fresh is not None
        previous = not rule.fresh(header.index + 1, stage + 1, plan.num_stages)
        return max(0, header.batch - previous)
    asked = 0 if rule.versions == "entry" else stage
    return updates_before(schedule_named(rule.schedule), asked, plan.num_stages, counts, header.g)


def norm_read(plan: Plan, counts: Sequence[int], g: int) -> int:
    """The batch by whose norm the update behind micro-batch ``g`` clips, with ``previous``; -1: by none.

    It came with g's forward, so it is that of the last batch whose backwards stage 0 had done before: U(0,g) - 1. With
    full batches that is t - ceil(D/M) under asynchronous rules, and t - 1 under flushing ones.
    """
    return updates_before(schedule_named(rule_named(plan.rule).schedule), 0, plan.num_stages, counts, g) - 1


def distance_ahead(plan: Plan, rule: UpdateRule, stage: int, opcode: str, header: MicroBatch, version: int) -> int:
    """How many updates a forward or backward of ``stage`` must predict ahead from ``version``, its newest."""
    if not rule.predicts or (opcode == "backward" and rule.backward_reads(plan.backward) != "ahead"):
        return 0
    if rule.target == "next":
        return 1
    crossed = header.batch - version
    lag = plan.num_stages - 1 - stage if opcode == "forward" else 0
    far = {"crossed": crossed, "lag": lag, "lag+1": lag + 1}[DISTANCES[plan.predictor]]
    if rule.target == "backward":
        return far
    # to stage 0's backward, by when this stage's has run for k // 2 further micro-batches: one takes f + b = 2 b
    later = stage // 2
    return far + ((header.index + later) // header.count if DISTANCES[plan.predictor] == "crossed" else later)


def check_registers(
    programs: Sequence[Program],
    tapes_peak: Sequence[int],
    owed_peak: Sequence[int],
    unread_peak: Sequence[dict[int, int]],
) -> None:
    """Prove that no register overflowed in an executed run.

    Raises:
        PlanError: naming the worker and the register.
    """
    for program, tapes, owed, unread in zip(programs, tapes_peak, owed_peak, unread_peak, strict=True):
        slots = {c.id: c.slots for c in program.channels}
        full = [(f"tapes of worker {program.worker}", tapes, program.tapes)]
        full.append((f"backwards of worker {program.worker} whose second half waits", owed, program.owed))
        full += [(f"slots of channel {c} into worker {program.worker}", n, slots[c]) for c, n in unread.items()]
        for what, used, quota in full:
            if used > quota:
                raise PlanError(what, got=str(used), expected=f"at most {quota}", remedy="Report this as a bug.")


def updates_before(schedule: Schedule, stage: int, num_stages: int, counts: Sequence[int], g: int) -> int:
    """U(k,g): updates that stage k has done when it runs the forward of micro-batch g.

    Asynchronous: batches complete within the first max(0, g - (D-1-k)) micro-batches. Flushing: g's own batch.
    """
    ends = [sum(counts[: t + 1]) for t in range(len(counts))]
    reached = g if schedule.window == "batch" else max(0, g - (num_stages - 1 - stage))
    return sum(end <= reached for end in ends)


def programs_of(plan: Plan) -> tuple[Program, ...]:
    """The checked plan's programs.

    Raises:
        PlanError: the plan cannot be obeyed.
    """
    check_plan(plan)
    return emit(plan)


def _action(stage: int, fired: Fired, batch_of: dict[int, int]) -> Action:
    number = batch_of[fired.g] if fired.opcode == "update" else fired.g
    return Action(stage, _LETTERS[fired.opcode], number)  # type: ignore[arg-type]


def _violation(plan: Plan, place: str, got: str, expected: str) -> PlanError:
    return PlanError(
        f"rule {plan.rule!r} on {plan.num_stages} stages, M={plan.micro_batches}: {place}",
        got=got,
        expected=expected,
        remedy="The schedule does not allow this rule; choose another rule or another M.",
    )


def _edges_text(edges: dict[tuple[int, int], bool]) -> str:
    return (
        ", ".join(f"{a}>{b}" + ("" if back else " (nothing back)") for (a, b), back in sorted(edges.items())) or "none"
    )


def _one_of(name: str, value: str, allowed: Sequence[str], why: str) -> None:
    if value not in allowed:
        raise PlanError(
            f"{name} of the plan",
            got=repr(value),
            expected=f"one of {', '.join(allowed)}: {why}",
            remedy="Correct the plan or the option.",
        )


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise PlanError(f"{name} of the plan", got=str(value), expected=f"at least {least}", remedy="Correct the plan.")


def _above_zero(name: str, value: float) -> None:
    if value <= 0:
        raise PlanError(f"{name} of the plan", got=str(value), expected="more than 0", remedy="Correct the plan.")
