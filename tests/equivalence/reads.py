"""What the passes of a run read, by the formulas of its rule, in a form in which equal reads are written equally.

Two runs on the same data end with the same bits if their passes read the same, and with other bits if they do not:
that makes each run of a table a negative control of every other one. Two things make reads equal that rules write
differently: a prediction is the weight itself where it crosses nothing or nothing has been updated, and the mode does
not matter where the backward finds the weights of its forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from roundelay.ir.micro_batch import MicroBatch, stream
from roundelay.ir.plan import Plan
from roundelay.ir.rule import UpdateRule, rule_named
from roundelay.lower.reading import read
from roundelay.lower.verify_schedule import distance_ahead, updates_before, version_read
from roundelay.schedules import schedule_named

Reads = tuple[Any, ...]


def reads_of_run(plan: Plan, counts: Sequence[int], *, still: bool) -> Reads:
    """What all passes read: for each micro-batch that of every stage, or one for all where they are the same.

    Args:
        plan: the plan.
        counts: micro-batches of each batch.
        still: whether a step without a gradient changes nothing: plain SGD without decay.
    """
    every = [[one for _, one in reads_of_stage(plan, counts, k, still=still)] for k in range(plan.num_stages)]
    return tuple(mine[0] if len(set(mine)) == 1 else mine for mine in zip(*every, strict=True))


def reads_of_stage(plan: Plan, counts: Sequence[int], stage: int, *, still: bool) -> Iterator[tuple[int, Reads]]:
    """(newest version, what forward and backward read) of every micro-batch on one stage."""
    rule = rule_named(plan.rule)
    for header in stream(list(counts)):
        newest = updates_before(schedule_named(rule.schedule), stage, plan.num_stages, counts, header.g)
        yield newest, _both_passes(plan, rule, stage, counts, header, newest, still)


def acts(way: str, plan: Plan, counts: Sequence[int], stage: int, *, still: bool) -> bool:
    """Whether breaking a stage in one way (`proof/tamper.py::WAYS`) changes what it reads.

    ``stash`` makes the passes of a micro-batch read the version before the newest, ``order`` those of the first one
    behind every update: on a rule that reads it anyhow that is no change.
    """
    if way not in ("stash", "order"):
        return True
    seen = 0
    for newest, passes in reads_of_stage(plan, counts, stage, still=still):
        if newest > 0 and (way == "stash" or newest > seen) and passes != ((newest - 1,),):
            return True
        seen = newest
    return False


def _both_passes(
    plan: Plan, rule: UpdateRule, stage: int, counts: Sequence[int], header: MicroBatch, newest: int, still: bool
) -> Reads:
    version = min(newest, version_read(read(plan), stage, counts, header))
    far = distance_ahead(read(plan), stage, "forward", header, newest)
    forward = _weights(plan.predictor, version, far, _begun(plan, stage, counts, header), still)
    if rule.backward_reads(plan.backward) == "forward":
        return (forward,)
    far = distance_ahead(read(plan), stage, "backward", header, header.batch)
    backward = _weights(plan.predictor, header.batch, far, 0, still)
    return (forward,) if backward == forward else (forward, plan.backward, backward)


def _begun(plan: Plan, stage: int, counts: Sequence[int], header: MicroBatch) -> int:
    """Micro-batches of the unfinished batch whose backwards an asynchronous stage has run before this forward."""
    done = max(0, header.g - (plan.num_stages - 1 - stage))
    ends = [sum(counts[: t + 1]) for t in range(len(counts))]
    return done - max((end for end in ends if end <= done), default=0)


def _weights(predictor: str, version: int, distance: int, begun: int, still: bool) -> Reads:
    """A version, with the distance and the setting of a prediction that changes it."""
    if distance and predictor == "partial" and begun:
        return version, 1 if still else distance, predictor, begun  # steps behind the first have no gradient
    setting = "improved" if predictor == "partial" else predictor
    if not distance or version == 0 or (still and setting == "improved"):
        return (version,)
    return version, distance, setting
