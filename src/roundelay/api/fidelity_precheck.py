"""Before a training: whether the captured job trains as plain PyTorch does, if that costs little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from roundelay.api.fidelity import Batches, Fidelity, judge, why_not
from roundelay.errors import FidelityError, UsageError
from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch
from roundelay.ir.plan import Plan
from roundelay.ir.stage import Partition
from roundelay.job import Job, Peekable
from roundelay.runtime.batch_reader import Extent
from roundelay.runtime.loader_probe import first_batches, second_epoch_batch

FULL, QUICK, OFF = "full", "quick", "off"
CHECKS = (FULL, QUICK, OFF)

UPDATES = 2
"""That a training is checked by."""

BUDGET_S, LIMIT_S = 5.0, 30.0
"""Seconds that the check may be expected to take; and after which a side that has told nothing is given up."""

SHARE = 0.25
"""Of the free memory: what the check may be expected to need."""

COPIES = 10
"""Of the weights, in the child that holds most: its own, gradients, state, and what plain PyTorch has left."""

REMEDIES = {
    "forward": "Look for what the forward or the loss changes and reads again beside tensors of the model (an "
    "attribute, a list, a counter, a random number that is not torch's), and keep it in a buffer.",
    "backward": "Look for what changes the gradient past the forward: a hook, .data, .grad, a parameter that is frozen "
    "or made anew in the forward.",
    "buffer": "Write it in the forward, in place: self.buffer.copy_(new).",
    "optimizer": "Look for what the optimizer does with more than one parameter at once, in hooks of its step too: "
    "every stage has an optimizer over parameters of its own.",
    "evaluate": "Let evaluate read the model that it is given, and nothing that the training leaves elsewhere.",
}


@dataclass(frozen=True, slots=True)
class Check:
    """Which check is made before a training, and why not a larger one.

    Args:
        which: ``full``, ``quick`` or ``off``.
        why: why it is not the full one; empty if it is, or if it was asked for.
    """

    which: str
    why: str = ""


def check_known(asked: str | None) -> None:
    """Refuse a check that there is not.

    Raises:
        UsageError: it is unknown.
    """
    if asked is not None and asked not in CHECKS:
        raise UsageError(
            "--check", got=repr(asked), expected=f"one of {', '.join(CHECKS)}", remedy="Choose one of these."
        )


def chosen(job: Job, plan: Plan, asked: str | None, *, resumed: bool, launched: bool = False) -> Check:
    """Which check to make.

    Args:
        job: the job.
        plan: what to run.
        asked: what the person has asked for; None leaves it to what it costs.
        resumed: the training goes on from a checkpoint.
        launched: the workers are a launcher's.
    """
    if asked in (QUICK, OFF):
        return Check(asked)
    if resumed:
        return Check(QUICK, "the run goes on from a checkpoint")
    if launched:
        return Check(QUICK, "the workers are a launcher's")
    if why := why_not(job, plan):
        return Check(QUICK, why)
    return Check(FULL) if asked == FULL else _afforded(job, plan)


def _afforded(job: Job, plan: Plan) -> Check:
    """The full check, if it is expected to cost little."""
    if plan.compile:
        return Check(QUICK, "stages are compiled, which would be done once more; --check full does it")
    seconds = expected_s(plan)
    if seconds > BUDGET_S:
        return Check(QUICK, f"the full one would take some {seconds:.0f} s; --check full does it")
    needed, free = expected_bytes(job, plan), psutil.virtual_memory().available
    if needed > SHARE * free:
        return Check(QUICK, f"the full one would need some {needed / 1e9:.1f} GB of memory; --check full does it")
    return Check(FULL)


def expected_s(plan: Plan) -> float:
    """Seconds that the check takes, by the seconds that were measured of the stages."""
    again = plan.backward == "recompute"
    each = sum(s.forward_s * (1 + again) + s.backward_s + s.weights_s for s in plan.stages)
    steps = sum(s.update_s for s in plan.stages)
    return 2 * UPDATES * (plan.micro_batches * each + steps) + UPDATES * plan.micro_batches * plan.read_s


def expected_bytes(job: Job, plan: Plan) -> int:
    """Bytes that the check needs at one time."""
    weights = sum(t.numel() * t.element_size() for t in (*job.model.parameters(), *job.model.buffers()))
    return COPIES * weights + 2 * sum(s.tape_bytes + s.owed_bytes for s in plan.stages)


def checked_before(  # noqa: PLR0913  a training is of this many things
    job: Job,
    captured: Captured,
    plan: Plan,
    stages: Partition,
    seed: int,
    extent: Extent,
    asked: str | None,
    *,
    launched: bool = False,
) -> str:
    """Check a training before it starts, and say in one line how, and what came of it; empty if none was to be made.

    Args:
        job: the job.
        captured: its model.
        plan: what to run.
        stages: its stages.
        seed: of the run.
        extent: from where to where it trains.
        asked: ``full``, ``quick`` or ``off``; None leaves it to what it costs.
        launched: the workers are a launcher's.

    Raises:
        FidelityError: the captured job trains otherwise than plain PyTorch.
        UsageError: the check is unknown.
        DeadlineError: a batch did not come in time, for which the run would wait as well.
    """
    check_known(asked)
    found = chosen(job, plan, asked, resumed=extent.start_batch > 0, launched=launched)
    if found.which == OFF:
        return ""
    if found.which == QUICK:
        return f"check quick: what capture saw{f' ({found.why})' if found.why else ''}"
    count = UPDATES if extent.batches is None else min(UPDATES, extent.batches)
    batches = [(batch, 0) for batch in _first(job, seed, count, plan.deadline_s)]
    limit_s = LIMIT_S if asked is None else plan.deadline_s
    fidelity = judge(job, captured, plan, seed, batches, limit_s=limit_s, stages=stages)
    refuse(fidelity)
    return f"check full: {fidelity}"


def _first(job: Job, seed: int, count: int, deadline_s: float) -> Sequence[Batch]:
    """The run's first batches; of a loader with processes, which would be started once more, the first one again."""
    given = job.batches
    if isinstance(given, Peekable) and given.opened is None and given.first is not None and given.first[0] == seed:
        return [given.first[1]] * count
    return first_batches(given, seed, count, deadline_s)


def refuse(fidelity: Fidelity) -> None:
    """Refuse a job that does not train as it does in plain PyTorch.

    Raises:
        FidelityError: it is such.
    """
    if not fidelity.equal:
        raise FidelityError(
            "the captured job beside plain PyTorch",
            got=fidelity.difference,
            expected="what the same model, loss and optimizer do in plain PyTorch",
            remedy=f"{REMEDIES[fidelity.kind]} `roundelay verify` tells more; --check off trains as captured.",
        )


def batches_to_verify(job: Job, seed: int, extent: Extent, deadline_s: float) -> Batches:
    """The first batches of a run, at least three updates, and one of its second epoch, if there is one.

    The first epoch stays open for the run. The second one's loader is opened, which is only for who reads data twice.
    """
    most = 3 if extent.batches is None else max(3, extent.batches)
    first = first_batches(job.batches, seed, most, deadline_s)
    found = [(batch, 0) for batch in first[:3]]
    further = len(first) < most if extent.epochs is None else extent.epochs > 1
    if further and (second := second_epoch_batch(job.batches, seed, deadline_s)) is not None:
        found.append((second, 1))
    return found
