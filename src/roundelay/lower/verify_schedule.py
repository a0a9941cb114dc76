"""Proves a plan before it runs: checks executed programs against the schedule and the update rule.

The actor machine of the runtime executes the programs on a virtual clock, over runs of every length that matters: full
batches, short ones, and an end at every position of the loop. Checked of each run:

- every message that is sent is received, and none is left over;
- no register overflows: slots, tapes, backwards whose second half is pending, and batches of data;
- there is no deadlock;
- the actions of every worker come in the order of the schedule;
- every version that is read exists and is the one that the rule states (:func:`version_read`), predicted as far ahead
  as it states (:func:`distance_ahead`). After a short batch, a stage may not have the version that a table states: then
  the forward reads the newest. With full batches that is an error;
- where a stage has replicas, each exchanges a batch's gradients between the batch's last backward and the update;
- where they add up parts of gradients, they exchange each micro-batch's after its backward and before the next one;
- where they store parts of weights, they gather those of a segment before each forward and backward of it;
- where holders update parts of weights, they gather them between the update and whatever is next on the stage;
- where the norm of the whole model's gradient is needed, each stage computes its squared norm between the batch's last
  backward and the update;
- where an update is clipped by the norm of an earlier batch, it is the batch that the rule states (:func:`norm_read`),
  the same on every stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from roundelay.errors import PlanError
from roundelay.ir.action import Action
from roundelay.ir.exchange import GRADIENT_PARTS, USED, WEIGHT_FORWARD
from roundelay.ir.micro_batch import MicroBatch, stream
from roundelay.ir.program import GRADIENTS, OPCODES, SEGMENT, Program
from roundelay.ir.rule import DISTANCES
from roundelay.lower.reading import Reading
from roundelay.schedules import PIPELINE, Schedule, actions

EVERY_END, EVERY_TURN = 24, 4
"""Up to this many micro-batches in D batches, runs of every length are checked; above, only those that differ."""

_LETTERS = {opcode: info.letter for opcode, info in OPCODES.items() if info.scheduled}


@dataclass(frozen=True, slots=True)
class Fired:
    """One executed instruction; a run is a list of these per worker. The fields are those of ``simulator.Interval``."""

    opcode: str
    g: int
    version: int
    reads: int
    distance: int
    entry: int
    stage: int
    of: str = ""
    continues: bool = False


def runs_to_check(reading: Reading) -> list[list[int]]:
    """Return the runs to check, as micro-batches of each batch: ends at every position, and short batches."""
    plan = reading.plan
    m, d = plan.micro_batches, plan.num_workers // reading.mesh.size
    if reading.slotted:  # each batch has all micro-batches
        return [[m] * n for n in _ends_to_check(reading)]
    few = d * m > EVERY_END
    at_once = 1 if reading.flushes else -(-d // m) + 1  # batches that are in flight together
    runs = [[m] * n for n in range(1, at_once + 2 if few else 2 * d + 2)]
    lasts = sorted({1, 2, m // 2, m - 1} & set(range(1, m))) if few else range(1, m)
    runs += [[m] * n + [last] for n in ((0, 1, at_once) if few else range(d + 1)) for last in lasts]
    runs.append([1, m, 1, max(1, m - 1), m] * 2)
    return runs


def _ends_to_check(reading: Reading) -> Sequence[int]:
    """After how many batches runs of a layout end.

    Workers are within two batches of each other, and each loop is one batch; where holders take turns, it is at most as
    many batches as micro-batches.
    """
    plan = reading.plan
    size = plan.batch_parts
    if not reading.takes_turns:
        return range(1, 6)
    return range(1, 2 * size + 2) if size <= EVERY_TURN else (1, 2, 3, size + 2)


def check_run(reading: Reading, counts: Sequence[int], fired: Sequence[Sequence[Fired]]) -> None:
    """Check the order and the versions of one executed run.

    Args:
        reading: of the plan.
        counts: micro-batches of each batch.
        fired: for each worker, the instructions that its machine fired.

    Raises:
        PlanError: naming the first stage and micro-batch at which the rule is violated.
    """
    plan = reading.plan
    headers = {header.g: header for header in stream(list(counts))}
    batch_of = {g: header.batch for g, header in headers.items()}
    for k, executed in enumerate(fired):
        holder, stages, together = plan.holder_of(k), plan.stages_of(k), reading.awaits_norm
        schedule = reading.schedule_of(holder)
        due = actions(schedule, stages, plan.num_stages, counts, plan.micro_batches, together=together)
        done = [_action(f, batch_of) for f in executed if f.opcode in _LETTERS and not f.continues]
        if done != due:
            at = next((i for i, (a, b) in enumerate(zip(done, due, strict=False)) if a != b), min(len(done), len(due)))
            got = str(done[at]) if at < len(done) else "the end"
            raise _violation(reading, f"worker {k}, action {at}", got, str(due[at]) if at < len(due) else "the end")
        if schedule.window != "slots":  # else their order has been checked
            _check_completed(reading, executed, "backward-weight" if schedule.halved else "backward")
        _check_gathered(reading, executed)
        _check_made(reading, executed, schedule)
        _check_used(reading, executed)
        for f in executed:
            if f.opcode in ("forward", "backward"):
                _check_weights(reading, holder, counts, headers[f.g], f)
            elif f.opcode == "sum" and f.version < batch_of[f.g] - 1:  # shm_chained_sums.py has blocks for no more
                place = f"stage {f.stage}, sum of the batch of micro-batch {f.g}"
                raise _violation(reading, place, f"version {f.version}", f"version {batch_of[f.g] - 1} or a newer one")
            elif f.opcode == "update" and schedule.window != "slots" and f.entry - 1 != norm_read(reading, counts, f.g):
                place = f"stage {f.stage}, update after micro-batch {f.g}: the newest norm"
                raise _violation(reading, place, f"batch {f.entry - 1}'s", f"batch {norm_read(reading, counts, f.g)}'s")


def _check_completed(reading: Reading, executed: Sequence[Fired], last: str) -> None:
    """Check that updates use complete gradients: exchanged and squared between the batch's last backward and it."""
    plan = reading.plan
    exchanging = {exchange.stage for exchange in plan.exchanges if not exchange.value}
    squared = ["grad-norm-sq"] if reading.needs_norm else []
    before_of = {
        (stage, after): before
        for stage in {f.stage for f in executed}
        for before, after in pairwise([last, *(["box", "unbox"] if stage in exchanging else []), *squared, "update"])
    }
    done: dict[tuple[int, str], int] = {}
    for f in executed:
        if f.of:
            continue
        done[f.stage, f.opcode] = f.g
        if (before := before_of.get((f.stage, f.opcode))) and done.get((f.stage, before)) != f.g:
            place = f"stage {f.stage}, {f.opcode} after micro-batch {f.g}"
            raise _violation(reading, place, f"no {before} of that micro-batch before it", "one")


def _check_gathered(reading: Reading, executed: Sequence[Fired]) -> None:
    """Check that a stage of which holders update parts gathers its weights before anything reads them."""
    plan = reading.plan
    gathers = {exchange.stage for exchange in plan.exchanges if exchange.kind == "weight"}
    due: dict[int, tuple[str, ...]] = {}
    for f in (f for f in executed if f.stage in gathers):
        if expected := due.get(f.stage):
            if f.opcode != expected[0]:
                place = f"stage {f.stage}, {f.opcode} of micro-batch {f.g}"
                raise _violation(reading, place, f"no {expected[0]} of updated weights before it", "one")
            due[f.stage] = expected[1:]
        elif f.opcode == "update":
            due[f.stage] = ("box", "unbox")


def _check_used(reading: Reading, executed: Sequence[Fired]) -> None:
    """Check that every forward and backward has gathered the weights of its segments, of the version that it reads."""
    plan = reading.plan
    needed = {
        (e.stage, "forward" if e.kind == WEIGHT_FORWARD else "backward", f"{SEGMENT}{e.segment}")
        for e in plan.exchanges
        if e.kind in USED
    }
    begun: dict[tuple[int, str], Fired] = {}
    gathered: dict[int, list[Fired]] = {}
    used: dict[tuple[int, str, int], set[str]] = {}
    for f in executed:
        if f.opcode == "box" and f.of.startswith(SEGMENT):
            begun[f.stage, f.of] = f
        elif f.opcode == "unbox" and f.of.startswith(SEGMENT):
            gathered.setdefault(f.stage, []).append(begun[f.stage, f.of])
        elif f.opcode in ("forward", "backward"):
            read = [own.of for own in gathered.pop(f.stage, ()) if _weights_read(own) == _weights_read(f)]
            used.setdefault((f.stage, f.opcode, f.g), set()).update(read)
    for (stage, opcode, g), found in used.items():
        if missing := {of for k, op, of in needed if (k, op) == (stage, opcode)} - found:
            place = f"stage {stage}, {opcode} of micro-batch {g}"
            raise _violation(
                reading, place, f"the weights of {min(missing)} not gathered before it", "gathered weights"
            )


def _weights_read(f: Fired) -> tuple[int, int, int, int]:
    """Which weights an instruction reads, or gathers."""
    return f.g, f.version, f.reads, f.distance


def _check_made(reading: Reading, executed: Sequence[Fired], schedule: Schedule) -> None:
    """Check that a stage whose holders add up parts of gradients exchanges each micro-batch's when they are made."""
    made_by = "backward-weight" if schedule.halved else "backward"
    exchanged = [exchange for exchange in reading.plan.exchanges if exchange.kind == GRADIENT_PARTS]
    needed = {e.stage: {f"{GRADIENTS}{o.segment}" for o in exchanged if o.stage == e.stage} for e in exchanged}
    due: dict[int, tuple[int, set[str]]] = {}
    for f in (f for f in executed if f.stage in needed):
        g, missing = due.get(f.stage, (f.g, set()))
        if f.opcode == "unbox" and f.of.startswith(GRADIENTS) and g == f.g:
            missing.discard(f.of)
        elif (f.opcode == made_by and not f.continues) or (f.opcode in ("box", "update") and not f.of):
            if missing:
                place = f"stage {f.stage}, {f.opcode} of micro-batch {f.g}"
                raise _violation(reading, place, f"{min(missing)} of micro-batch {g} not exchanged before it", "all")
            due[f.stage] = f.g, set(needed[f.stage]) if f.opcode == made_by else set()


def _check_weights(reading: Reading, holder: int, counts: Sequence[int], header: MicroBatch, f: Fired) -> None:
    """Check that a forward or backward has read the version that the rule states, predicted as far as it states."""
    plan = reading.plan
    stage, place = f.stage, f"stage {f.stage}, {f.opcode} of micro-batch {f.g}"
    forward, schedule = f.opcode == "forward", reading.schedule
    if schedule.window == "slots":
        newest = f.version  # where the updates stand is checked by their order
    else:
        newest = updates_before(schedule, stage, plan.num_stages, counts, f.g) if forward else header.batch
    if f.version != newest:
        raise _violation(reading, place, f"version {f.version}", f"version {newest}")
    stated = version_read(reading, stage, counts, header, holder) if forward else newest
    if stated > newest and set(counts[: header.batch]) <= {plan.micro_batches}:
        number = reading.number_in_batch(holder, header.index)
        raise _too_fresh(reading, place, (stage, number), newest)
    if f.reads != min(stated, newest):
        raise _violation(reading, place, f"version {f.reads}", f"version {min(stated, newest)}")
    distance = distance_ahead(reading, stage, f.opcode, header, newest)
    if f.distance != distance:
        raise _violation(reading, place, f"distance {f.distance}", f"{distance}")


def version_read(reading: Reading, stage: int, counts: Sequence[int], header: MicroBatch, holder: int = 0) -> int:
    """Return the version that the rule states for a forward; greater than U(k,g) if the stage does not have it yet.

    Args:
        reading: of the plan.
        stage: k.
        counts: micro-batches of each batch.
        header: header of the micro-batch.
        holder: of the stage's holders the one that runs it.
    """
    if reading.rule.versions == "table":
        number = reading.number_in_batch(holder, header.index)
        return max(0, header.batch - (not reading.is_fresh(number, stage)))
    k = 0 if reading.rule.versions == "entry" else stage
    return updates_before(reading.schedule, k, reading.plan.num_stages, counts, header.g)


def norm_read(reading: Reading, counts: Sequence[int], g: int) -> int:
    """Return the batch by whose norm the update after micro-batch ``g`` clips with ``previous``; -1 for none.

    The header of g carries the norm, so it is that of the last batch that stage 0 had finished when it read g:
    U(0,g) - 1. With full batches that is t - ceil(D/M) under asynchronous rules, and t - 1 under flushing ones.
    """
    return updates_before(reading.schedule, 0, reading.plan.num_stages, counts, g) - 1


def distance_ahead(reading: Reading, stage: int, opcode: str, header: MicroBatch, version: int) -> int:
    """Return how many updates a forward or backward of ``stage`` predicts ahead from ``version``, its newest."""
    plan, rule = reading.plan, reading.rule
    if not rule.predicts or (opcode == "backward" and reading.backward_reads != "ahead"):
        return 0
    if rule.target == "next":
        return 1
    crossed = header.batch - version
    lag = plan.num_stages - 1 - stage if opcode == "forward" else 0
    distance = {"crossed": crossed, "lag": lag, "lag+1": lag + 1}[DISTANCES[plan.predictor]]
    if rule.target == "backward":
        return distance
    # until stage 0's backward, this stage runs the backwards of k // 2 further micro-batches
    later = stage // 2
    return distance + ((header.index + later) // header.count if DISTANCES[plan.predictor] == "crossed" else later)


def check_registers(
    programs: Sequence[Program],
    tapes_peak: Sequence[int],
    owed_peak: Sequence[int],
    unread_peak: Sequence[dict[int, int]],
    data_peak: Sequence[int],
) -> None:
    """Check that no register overflowed in an executed run.

    Args:
        programs: one per worker.
        tapes_peak: for each worker, most tapes at one time.
        owed_peak: for each worker, most backwards at one time whose second half was pending.
        unread_peak: for each worker, most messages on the way or unread at one time, by channel.
        data_peak: for each worker, most batches of data at one time.

    Raises:
        PlanError: naming the worker and the register.
    """
    peaks = zip(programs, tapes_peak, owed_peak, unread_peak, data_peak, strict=True)
    for program, tapes, owed, unread, data in peaks:
        slots = {c.id: c.slots for c in program.channels}
        used = [(f"tapes of worker {program.worker}", tapes, program.tapes)]
        used.append((f"backwards of worker {program.worker} whose second half is pending", owed, program.owed))
        used.append((f"registers of worker {program.worker}", data, program.registers))
        used += [(f"slots of channel {c} into worker {program.worker}", n, slots[c]) for c, n in unread.items()]
        for register, peak, quota in used:
            if peak > quota:
                raise PlanError(register, got=str(peak), expected=f"at most {quota}", remedy="Report this as a bug.")


def updates_before(schedule: Schedule, stage: int, num_stages: int, counts: Sequence[int], g: int) -> int:
    """Return U(k,g): updates that stage k has done when it runs the forward of micro-batch g.

    Asynchronous: the batches that end within the first max(0, g - (D-1-k)) micro-batches. Flushing: those before g's.
    """
    ends = [sum(counts[: t + 1]) for t in range(len(counts))]
    reached = g if schedule.window == "batch" else max(0, g - (num_stages - 1 - stage))
    return sum(end <= reached for end in ends)


def _action(fired: Fired, batch_of: dict[int, int]) -> Action:
    number = batch_of[fired.g] if OPCODES[fired.opcode].once_a_batch else fired.g
    return Action(fired.stage, _LETTERS[fired.opcode], number)  # type: ignore[arg-type]


def _violation(reading: Reading, place: str, got: str, expected: str, remedy: str = "") -> PlanError:
    plan = reading.plan
    size, where = plan.micro_batches, ""
    if plan.layout != PIPELINE:
        size, where = plan.batch_parts, f", layout {plan.layout}"
    return PlanError(
        f"rule {plan.rule!r} on {plan.num_stages} stages, M={size}{where}: {place}",
        got=got,
        expected=expected,
        remedy=remedy or "The schedule does not allow this rule; choose another rule or another M.",
    )


def _too_fresh(reading: Reading, place: str, number: tuple[int, int], newest: int) -> PlanError:
    """A forward would read a version that its stage does not have yet.

    Args:
        reading: of the plan.
        place: what to call the forward.
        number: of the stage, and of the micro-batch in its batch, from 0.
        newest: what the stage has.
    """
    plan, rule = reading.plan, reading.rule
    remedy = ""
    if rule.versions == "table":
        j, i = number[0] + 1, number[1] + 1
        remedy = f"The timing gives W[t-1] there: the table must not say W[t] for i = {i}, j = {j} (from 1)."
        remedy += "" if plan.layout == PIPELINE else " The layouts dp and mp wait, and run any table."
    return _violation(reading, place, f"version {newest}, its newest", f"version {newest + 1}", remedy)
