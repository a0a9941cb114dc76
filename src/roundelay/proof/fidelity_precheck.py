"""Checks before a training that the captured job trains as plain PyTorch does, if the check costs little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from roundelay.errors import FidelityError
from roundelay.frontend.batch import Batch
from roundelay.ir.device_names import CPU
from roundelay.ir.plan import Plan
from roundelay.job import Job, Peekable
from roundelay.planner.check_given import FULL, OFF, QUICK, validate_check
from roundelay.planning.torch_scope import on_threads
from roundelay.proof.fidelity import Batches, compare_with_plain, unchecked_reason
from roundelay.proof.fidelity_in_process import compared_on
from roundelay.proof.fidelity_on_mesh import ROUNDS
from roundelay.runtime.loading.checkpoint_schedule import Extent
from roundelay.runtime.loading.loader_probe import first_batches, second_epoch_batch
from roundelay.session.training import Session
from roundelay.transport.cuda import Cuda

UPDATES = 2
"""Updates that the check before a training compares."""

BUDGET_S = 5.0
"""Seconds that the check may be expected to take."""

SHARE = 0.25
"""Share of the free memory that the check may be expected to need."""

COPIES = 10
"""Copies of the weights in the child that holds most: its own, gradients, state, and plain PyTorch's tensors."""

REMEDIES = {
    "forward": "Look for what the forward or the loss changes and reads again and that is no tensor of the model (an "
    "attribute, a list, a counter, a random number that is not torch's), and keep it in a buffer.",
    "backward": "Look for what changes the gradient outside of the forward: a hook, .data, .grad, a parameter that is "
    "frozen or recreated in the forward.",
    "buffer": "Write it in the forward, in place: self.buffer.copy_(new).",
    "optimizer": "Look for what the optimizer does with more than one parameter at once, in hooks of its step too: "
    "every stage has an optimizer over its own parameters.",
    "mesh": "Report this as a bug of Roundelay, with the model; train without --tensor-parallel meanwhile.",
    "evaluate": "Let evaluate read only the model that it gets, and nothing that the training stores elsewhere.",
}


@dataclass(frozen=True, slots=True)
class Check:
    """Which check is made before a training, and why not the full one.

    Args:
        which: ``full``, ``quick`` or ``off``.
        why: why it is not the full one; empty if it is, or if the user chose it.
    """

    which: str
    why: str = ""


def choose_check(job: Job, plan: Plan, option: str | None, *, resumed: bool, launched: bool = False) -> Check:
    """Choose the check to make.

    Args:
        job: the job.
        plan: what to run.
        option: the user's choice; None decides by what the check costs.
        resumed: the training resumes from a checkpoint.
        launched: a launcher started the workers.
    """
    if option in (QUICK, OFF):
        return Check(option)
    if resumed:
        return Check(QUICK, "the run resumes from a checkpoint")
    if launched:
        return Check(QUICK, "the workers are a launcher's; `verify` under the same launcher compares all")
    if why := unchecked_reason(job, plan):
        return Check(QUICK, why)
    return Check(FULL) if option == FULL else _afforded(job, plan)


def _afforded(job: Job, plan: Plan) -> Check:
    """The full check if it is expected to cost little, else the quick one."""
    if plan.compile:
        return Check(QUICK, "stages are compiled, which would be done twice; --check full does it")
    seconds = expected_s(plan)
    if seconds > BUDGET_S:
        return Check(QUICK, f"the full one would take some {seconds:.0f} s; --check full does it")
    needed, free = expected_bytes(job, plan), _free_bytes(plan)
    if needed > SHARE * free:
        return Check(QUICK, f"the full one would need some {needed / 1e9:.1f} GB of memory; --check full does it")
    return Check(FULL)


def _free_bytes(plan: Plan) -> int:
    """Free memory of the host, and of the device on which the check is made, whichever is less."""
    device, host = compared_on(plan), int(psutil.virtual_memory().available)
    return host if device.type == CPU else min(host, Cuda().free_bytes(device))


def expected_s(plan: Plan) -> float:
    """Seconds that the check takes, from the measured seconds of the stages."""
    again = plan.backward == "recompute"
    micro_batch_s = sum(s.forward_s * (1 + again) + s.backward_s + s.weights_s for s in plan.stages)
    update_s = sum(s.update_s for s in plan.stages)
    on_mesh_s = 2 * ROUNDS * plan.replicas * micro_batch_s if plan.grid.size > 1 else 0.0
    compared_s = 2 * UPDATES * (plan.batch_parts * micro_batch_s + update_s) + UPDATES * plan.batch_parts * plan.read_s
    return compared_s + on_mesh_s


def expected_bytes(job: Job, plan: Plan) -> int:
    """Bytes that the check needs at its peak."""
    weights = sum(t.numel() * t.element_size() for t in (*job.model.parameters(), *job.model.buffers()))
    return COPIES * weights + 2 * sum(s.tape_bytes + s.owed_bytes for s in plan.stages)


def check_before_training(session: Session, option: str | None, *, launched: bool = False) -> str:
    """Check a training before it starts; returns the check and its result as one line, empty without a check.

    Args:
        session: not yet run.
        option: ``full``, ``quick`` or ``off``; None decides by what the check costs.
        launched: a launcher started the workers.

    Raises:
        FidelityError: the captured job trains differently from plain PyTorch.
        UsageError: the check is unknown.
        DeadlineError: a batch, for which the run would wait as well, did not come in time.
        RunError: the comparison gave no answer within the plan's deadline.
    """
    validate_check(option)
    job, plan, extent = session.job, session.plan, session.extent
    with on_threads(plan.leader_threads):
        check = choose_check(job, plan, option, resumed=extent.start_batch > 0, launched=launched)
        if check.which == OFF:
            return ""
        if check.which == QUICK:
            return f"check quick: what capture checks{f' ({check.why})' if check.why else ''}"
        count = UPDATES if extent.batches is None else min(UPDATES, extent.batches)
        batches = [(batch, 0) for batch in _first(job, session.seed, count, plan.deadline_s)]
        fidelity = compare_with_plain(
            job, session.captured, plan, session.seed, batches, limit_s=plan.deadline_s, stages=session.partition
        )
    if not fidelity.equal:
        raise FidelityError(
            "the captured job compared with plain PyTorch",
            got=fidelity.difference,
            expected="what the same model, loss and optimizer do in plain PyTorch",
            remedy=f"{REMEDIES[fidelity.kind]} `roundelay verify` shows more; --check off trains as captured.",
        )
    return f"check full: {fidelity}"


def _first(job: Job, seed: int, count: int, deadline_s: float) -> Sequence[Batch]:
    """The run's first batches. A loader with processes is not started again: its first batch is repeated."""
    data = job.loader
    if isinstance(data, Peekable) and data.opened is None and data.first is not None and data.first[0] == seed:
        return [data.first[1]] * count
    return first_batches(data, seed, count, deadline_s)


def batches_to_verify(job: Job, seed: int, extent: Extent, deadline_s: float) -> Batches:
    """The first batches of a run, up to three, and one of its second epoch, if there is one.

    The first epoch stays open for the run. The second one is opened, so this is only for `verify`, which reads twice.
    """
    most = 3 if extent.batches is None else max(3, extent.batches)
    first = first_batches(job.loader, seed, most, deadline_s)
    batches = [(batch, 0) for batch in first[:3]]
    further = len(first) < most if extent.epochs is None else extent.epochs > 1
    if further and (second := second_epoch_batch(job.loader, seed, deadline_s)) is not None:
        batches.append((second, 1))
    return batches
