"""Proves that a distributed run computed exactly what its update rule says, for the program that the user wrote."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack

import torch

from roundelay.errors import JobError, NondeterministicError, UsageError
from roundelay.frontend import Captured, RngKey
from roundelay.guards.watch import reachable_state_of
from roundelay.ir.averages import EVALUATED
from roundelay.ir.plan import Plan
from roundelay.job import Job, Peekable
from roundelay.launching.forked_call import apart
from roundelay.launching.process_group import PLAN_S, ProcessGroup
from roundelay.observe.digest import digest
from roundelay.planner.check_given import check_length
from roundelay.planner.plan_options import Keywords, shows_choices
from roundelay.planning.job_file import GivenJob
from roundelay.planning.planning import captured_and_planned
from roundelay.planning.torch_scope import on_threads, user_code
from roundelay.proof.fidelity import SIDES, Fidelity, compare_with_plain, unchecked_reason
from roundelay.proof.fidelity_precheck import batches_to_verify
from roundelay.proof.reference_inputs import ReferenceOptimizers, copied, reference_stages, setting_of
from roundelay.proof.reference_start import (
    Note,
    ReferenceStart,
    begins_at_update_0,
    from_update_0,
    reference_start_of,
    since_checkpoint,
)
from roundelay.proof.replayed import replayed_run, told
from roundelay.proof.tamper import tampered_handlers, tampered_programs, tampered_stage
from roundelay.proof.tamper_ways import check_tamper
from roundelay.reference import ReferenceResult, run_reference
from roundelay.runtime.handlers import Handler
from roundelay.runtime.loading.batch_reader import read_micro_batches
from roundelay.runtime.loading.checkpoint_schedule import Extent
from roundelay.runtime.loading.loader_epoch import same_batch
from roundelay.runtime.loading.loader_probe import first_batch
from roundelay.runtime.loading.prefetch import Registers
from roundelay.runtime.optimizer.optimizer_state import WHOLE
from roundelay.runtime.processes.determinism import deterministic, uses_device
from roundelay.runtime.workload import Wrap
from roundelay.session.resume import load_checkpoint
from roundelay.session.run_record import Trained
from roundelay.session.stop_condition import Length, extent
from roundelay.session.training import Session

_T = TypeVar("_T")

STEPS = 8

_ODD = "nondeterministic"
"""Name under which the leader of a launcher's processes publishes an operation without a deterministic form."""

DIFFERENT, UNPROVED = 1, 3
"""Exit codes of a comparison that found a difference, and of one in which something could not be compared."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a comparison with the reference.

    Args:
        equal: every weight, buffer, optimizer state and loss of the run has the reference's bits, and the captured job
            does not differ from plain PyTorch, if these were compared.
        tensors: number of compared tensors.
        steps: number of updates.
        difference: the first difference of the run from its reference, in causal order; empty if there is none.
        stage: the stage of that difference, or -1.
        reference_pid: process that ran the reference.
        workers: worker to its process, thread and bytes received.
        losses: number of compared losses.
        fidelity: how the captured job compares with plain PyTorch; None if they were not compared.
        begins: updates before the reference's first: 0, or those of the checkpoint whose state it starts from.
        letters: replayed, where the order was free; else 0.
        digests: of stages' states that were compared there.
        odd_digests: how many of them differ.
        nondeterministic: an operation that gives other bits at each call on its device, so that a difference proves
            nothing; empty if there is none.
    """

    equal: bool
    tensors: int
    steps: int
    difference: str
    stage: int
    reference_pid: int
    workers: dict[int, dict[str, Any]]
    losses: int
    fidelity: Fidelity | None = None
    begins: int = 0
    nondeterministic: str = ""
    letters: int = 0
    digests: int = 0
    odd_digests: int = 0

    def __repr__(self) -> str:
        difference = "" if self.equal else f", difference={self.differences()!r}"
        return (
            f"Verification(equal={self.equal}{difference}, tensors={self.tensors}, losses={self.losses}, "
            f"steps={self.steps}, workers={len(self.workers)})"
        )

    @property
    def exit_code(self) -> int:
        """0 if all is proved; :data:`DIFFERENT`, or :data:`UNPROVED` where something could not be compared."""
        fidelity = self.fidelity or Fidelity()
        if self.equal:
            return UNPROVED if fidelity.unchecked else 0
        of_captured = not fidelity.equal and not fidelity.nondeterministic
        of_run = bool(self.difference) and not self.nondeterministic
        return DIFFERENT if of_captured or of_run else UNPROVED

    def differences(self) -> str:
        """The first difference: of the captured job from plain PyTorch, else of the run from its reference."""
        return (self.fidelity.difference if self.fidelity is not None else "") or self.difference


@shows_choices
def verify(
    job: GivenJob,
    *,
    plan: Plan | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    tamper: str | None = None,
    resume: str | Path | None = None,
    **choices: Unpack[Keywords],
) -> Verification:
    """Train distributed and in the one-process reference, and compare everything with ``torch.equal``.

    First compares the captured job with the user's program in plain PyTorch: :mod:`roundelay.proof.fidelity`.

    Args:
        job: the job; its model ends with the distributed run's weights.
        plan: what to run; by default :func:`roundelay.plan` makes one from the choices below.
        steps: updates; 8 if neither this nor ``epochs`` is given.
        epochs: epochs.
        seed: of both runs.
        tamper: break the distributed run on purpose, in one of :data:`roundelay.proof.tamper.WAYS`.
        resume: checkpoint to resume from; what follows it is compared. If the run resumes in mid-flight, or by the same
            plan under a rule that flushes, the reference begins with the very first update, and is not interrupted
            (:func:`roundelay.proof.reference_start.begins_at_update_0`).
        choices: for the plan, as of :func:`roundelay.plan`: ``workers``, ``rule``, ``micro_batches`` and others.

    Raises:
        TypeError: a choice is unknown.
        UsageError: an argument cannot be used, a plan was given together with a choice, or the way to tamper has no
            effect on this model.
        RunError: the distributed run failed.
    """
    check_tamper(tamper)
    check_length(steps, epochs)
    made, captured, planned = captured_and_planned(verify, job, plan, seed, choices)
    chosen = planned.plan
    first = ReferenceStart.of(captured)
    length = length_or_default(steps, epochs)
    fidelity = check_fidelity(made, captured, chosen, seed, length, resumed=resume is not None)
    start = None if resume is None else load_checkpoint(Path(resume), captured)
    return verify_session(Session(made, captured, chosen, seed, length, start), tamper, first=first, fidelity=fidelity)


def check_fidelity(job: Job, captured: Captured, plan: Plan, seed: int, length: Length, *, resumed: bool) -> Fidelity:
    """Compare the captured job with plain PyTorch, from the model's initial weights; see :func:`verify`.

    Args:
        job: the job; a checkpoint has not been loaded yet.
        captured: its model.
        plan: what to run.
        seed: of the run.
        length: of the run.
        resumed: a checkpoint will be loaded.

    Raises:
        UsageError: the plan does not fit, or the length is not valid.
        DeadlineError: a batch did not come in time.
    """
    if why := unchecked_reason(job, plan):
        return Fidelity(unchecked=why)
    with on_threads(plan.leader_threads):
        batches = batches_to_verify(job, seed, extent(job, length, None), plan.deadline_s)
        compare = partial(compare_with_plain, job, captured, plan, seed, batches, evaluates=True)
        fidelity, odd = _exactly(partial(compare, limit_s=plan.deadline_s), plan, lambda: None)
    fidelity = replace(fidelity, nondeterministic=odd)
    note = "from the model's own start, not from the checkpoint"
    return replace(fidelity, notes=(*fidelity.notes, note)) if resumed else fidelity


def length_or_default(steps: int | None, epochs: int | None) -> Length:
    """How long to train: :data:`STEPS` updates if neither is given."""
    return Length(steps=STEPS if steps is None and epochs is None else steps, epochs=epochs)


def verify_session(
    session: Session,
    tamper: str | None = None,
    wrap: Wrap | None = None,
    first: ReferenceStart | None = None,
    fidelity: Fidelity | None = None,
    process_group: ProcessGroup | None = None,
) -> Verification:
    """Verify a session; see :func:`verify`.

    Args:
        session: not yet run.
        tamper: a way to break it.
        wrap: wraps every endpoint, to delay messages on purpose.
        first: the model's state before a checkpoint was loaded; needed by a session that resumes in mid-flight.
        fidelity: how the captured job compares with plain PyTorch, if they were compared.
        process_group: the launcher's processes, if one has started this process; this one leads them. They wait for
            :meth:`ProcessGroup.conclude`.
    """
    check_tamper(tamper)
    origin, anew = reference_start_of(session, first), begins_at_update_0(session, first)
    handlers = _broken(session, tamper)
    odd = "" if fidelity is None or process_group is None else fidelity.nondeterministic
    if process_group is not None:
        process_group.publish(_ODD, odd)
    kept = reachable_state_of(session.job)  # the user's state: the reference begins with it as the run did

    def run_both() -> tuple[Trained, dict[str, Any]]:
        trained = session.run(
            notify=lambda event: None, audit=True, handlers=handlers, wrap=wrap, process_group=process_group
        )
        kept.restore(except_kinds=("buffer", "parameter"))
        call = partial(_compare_with_reference, session, origin, anew, trained)
        forks = session.reading.transport.forks
        return trained, apart(call, "the one-process reference") if forks else call()

    again = (lambda: kept.restore(("buffer", "parameter"))) if process_group is None else None
    (trained, fields), odd = _exactly(run_both, session.plan, again, odd)
    fields["equal"] = not fields["difference"] and (fidelity is None or fidelity.equal)
    result = Verification(**fields, workers=trained.workers, fidelity=fidelity, nondeterministic=odd)
    if tamper is not None and not result.difference:
        raise UsageError(
            f"--tamper {tamper} at stage {next(iter(handlers))}",
            got=f"a run of {result.steps} updates in which it changed no bit",
            expected="a run on which it makes a difference",
            remedy="Give more --steps, or another way to tamper.",
        )
    return result


def follow_verification(session: Session, tamper: str | None, process_group: ProcessGroup) -> int:
    """Run one worker of a verification that another process leads; returns the exit code of the proof.

    Args:
        session: not yet run.
        tamper: as of :func:`verify_session`.
        process_group: the launcher's processes.

    Raises:
        WorkerLostError: the leader is lost.
    """
    handlers = _broken(session, tamper)
    compares_s = PLAN_S + SIDES * session.plan.deadline_s
    strict = not process_group.fetch(_ODD, compares_s)
    with deterministic(_exact(session.plan), strict=strict, threads=session.plan.threads):
        return session.run_follower(process_group, audit=True, handlers=handlers)


def _broken(session: Session, tamper: str | None) -> dict[int, dict[str, Handler]]:
    """Break a session in some way; returns the handlers to run it with, by stage."""
    if tamper is None:
        return {}
    graph, batches, plan = session.captured.graph, session.extent.batches, session.plan
    victim = tampered_stage(tamper, graph, session.partition, batches, plan)
    session.programs = tampered_programs(tamper, session.programs, victim)
    return {victim: tampered_handlers(tamper, plan, victim)}


def _exact(plan: Plan) -> bool:
    """Whether a verification asks torch for deterministic forms: on the CPU every operation has one."""
    return plan.deterministic or uses_device(plan.devices)


def _exactly(call: Callable[[], _T], plan: Plan, again: Callable[[], object] | None, odd: str = "") -> tuple[_T, str]:
    """Call a function with operations in their deterministic form; where one has none, with that one as it comes.

    Args:
        call: what to call.
        plan: what it computes by.
        again: called before the second call; None: there can be none, as other processes take part.
        odd: an operation that is known to have none.

    Returns:
        its result, and the operation that has none; empty if all have one.

    Raises:
        NondeterministicError: there is one, and the plan asks that there be none, or the call cannot be repeated.
    """
    if not odd:
        try:
            with deterministic(_exact(plan), threads=plan.threads):
                return call(), ""
        except NondeterministicError as error:
            if plan.deterministic or again is None:
                raise
            odd = error.got
        again()
    with deterministic(_exact(plan), strict=False, threads=plan.threads):
        return call(), odd


def _compare_with_reference(session: Session, origin: ReferenceStart, anew: bool, trained: Trained) -> dict[str, Any]:
    """Run the reference and compare; returns fields of :class:`Verification` that can be written as JSON."""
    _check_same_data(session)
    session.compile()  # already done, but in another process
    notes: list[Note] = []
    with on_threads(session.plan.leader_threads), user_code("the one-process reference"):
        replayed = replayed_run(session, origin, trained, notes) if session.reading.free else None
        reference = _reference(session, origin, anew, trained, notes) if replayed is None else replayed.result
    if session.start is not None and anew:
        reference, notes = since_checkpoint(session, reference, notes)
    found = _compare(session, trained, reference, notes)
    if replayed is not None:
        found |= {"letters": replayed.letters, "digests": replayed.digests, "odd_digests": len(replayed.differing)}
        found["difference"] = found["difference"] or told(replayed)
    return {**found, "begins": 0 if anew else session.initial.updates}


def _check_same_data(session: Session) -> None:
    """Refuse data that differ when they are read again: the run reads them, and then the reference.

    Raises:
        JobError: the first batch differs.
    """
    batches = session.job.loader
    if not isinstance(batches, Peekable) or batches.first is None or batches.first[0] != session.seed:
        return
    if not same_batch(first_batch(batches, session.seed, session.plan.deadline_s), batches.first[1]):
        raise JobError(
            "batches(0), read for the reference",
            got="another first batch than the run read: a stream that continues, or unseeded random numbers",
            expected="the same data whenever an epoch is read: `verify` reads it twice",
            remedy="Let batches(epoch) start over at each call, and seed what is random by the epoch; `train` reads "
            "an epoch once, and accepts a stream.",
        )


def _reference(
    session: Session, origin: ReferenceStart, anew: bool, trained: Trained, notes: list[Note]
) -> ReferenceResult:
    """Run the rule's equations on copies, epoch by epoch as the run did, and append digests in causal order."""
    captured, plan, job = session.captured, session.plan, session.job
    stages = reference_stages(session)
    named = copied(captured, origin, stages)
    for spec in session.partition.stages:
        captured.flatten_recurrent(spec, dict(named))
    extent = from_update_0(session.extent) if anew else session.extent
    states = None if anew else session.initial.optimizer
    most = max(len(stage.workers) for stage in plan.stages) // plan.mesh_size
    buffers = [dict(origin.buffers_of(replica)) for replica in range(most)]
    slots = session.reading.slotted
    whole = ReferenceResult(buffers=buffers, loss_scale=None if anew else session.initial.loss_scale)

    def audit(kind: str, stage: int, holder: int, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
        notes.append(((kind, stage, holder, number), digest(tensors)))

    optimizers = ReferenceOptimizers(job, trained.snapshot.optimizer.get(WHOLE, {}), plan.devices)
    while True:
        numbers = trained.numbers[: extent.start_epoch] if session.waits else ()
        part = replace(extent, epochs=extent.start_epoch + 1) if session.waits else extent
        registers = Registers(1, plan.deadline_s)  # without a thread, but with a deadline
        least = captured.graph.min_rows
        stream = read_micro_batches(
            job.loader,
            session.seed,
            plan.micro_batches,
            part,
            captured.values,
            replicas=plan.replicas,
            min_rows=least,
            padded=slots,
            registers=registers,
        )
        result = run_reference(
            setting_of(session.reading, captured.graph, states, whole.loss_scale, numbers),
            stages,
            named,
            whole.buffers,
            stream,
            optimizers.make,
            job.scheduler,
            lambda number: RngKey(session.seed, number),
            audit=audit,
            start=None if states is None else partial(optimizers.restore, states),
        )
        result = replace(result, optimizer_state=optimizers.states(result.optimizer_state))
        whole = replace(
            result,
            losses=whole.losses | result.losses,
            metrics=whole.metrics | result.metrics,
            scales=whole.scales | result.scales,
        )
        last = trained.snapshot.header
        if not session.waits or result.updates > last.batch:
            return whole
        states = result.optimizer_state
        done = result.updates - extent.start_batch
        start = extent.start_g + done * plan.micro_batches if slots else max(whole.losses) // plan.replicas + 1
        extent = Extent(start, result.updates, extent.start_epoch + 1, 0, last.batch + 1 - result.updates, None)


def _compare(
    session: Session,
    trained: Trained,
    reference: ReferenceResult,
    notes: list[Note],
) -> dict[str, Any]:
    stage, difference = _first_in_time(trained, notes)
    pairs = _pairs(trained, reference)
    differing = next((name for name, ours, theirs in pairs if not _is_equal(ours, theirs)), "")
    losses = {g: loss for g, (loss, _) in trained.micro_losses.items()}
    if not differing and losses != reference.losses:
        differing = "losses"
    if not differing and repr(sorted(trained.micro_metrics.items())) != repr(
        sorted(reference.metrics.items())
    ):  # NaN is equal to NaN
        differing = "metrics of the loss"
    if not differing and trained.micro_scales != reference.scales:
        differing = "loss scales"
    if differing and not difference:
        difference = f"{differing} at the end of the run"
    elif differing:
        difference += f"; at the end {differing} differs"
    return {
        "tensors": sum(isinstance(ours, torch.Tensor) for _, ours, _ in pairs),
        "steps": reference.updates - session.initial.updates,
        "difference": difference,
        "stage": stage,
        "reference_pid": os.getpid(),
        "losses": len(losses),
    }


def _holder_text(plan: Plan, holder: int) -> str:
    replica, part = plan.grid.where(holder)
    in_replica = f" in replica {replica}" if plan.replicas > 1 else ""
    return in_replica + (f" at place {part} of the mesh" if plan.mesh_size > 1 else "")


def _first_in_time(trained: Trained, notes: list[Note]) -> tuple[int, str]:
    """(stage, text) of the first computation, in the reference's order, whose digest differs in the run."""
    for key, expected in notes:
        kind, stage, holder, number = key
        if trained.digests.get(key) != expected:
            of = f"update {number}" if kind == "update" else f"{kind} of micro-batch {number}"
            of += _holder_text(trained.plan, holder)
            missing = " (it never happened)" if key not in trained.digests else ""
            return stage, f"stage {stage}: {of} differs{missing}"
    extra = set(trained.digests) - {key for key, _ in notes}
    if extra:
        kind, stage, _, number = min(extra)
        return stage, f"stage {stage}: {kind} {number} should not have happened"
    return -1, ""


def _pairs(trained: Trained, reference: ReferenceResult) -> list[tuple[str, Any, Any]]:
    """(name, the run's, the reference's) of everything that the run ends with."""
    ours = trained.snapshot
    pairs: list[tuple[str, Any, Any]] = [("the next loss scale", ours.loss_scale, reference.loss_scale)]
    for name, tensor in ours.parameters.items():
        pairs.append((f"parameter {name}", tensor, reference.parameters.get(name)))
    for replica, own in enumerate([ours.buffers, *ours.replica_buffers]):
        of = f" of replica {replica}" if replica else ""
        pairs += [(f"buffer {name}{of}", tensor, reference.buffers[replica].get(name)) for name, tensor in own.items()]
    for name in sorted({*ours.optimizer, *reference.optimizer_state}):
        mine, theirs = ours.optimizer.get(name, {}), reference.optimizer_state.get(name, {})
        for key in sorted({*mine, *theirs} - {EVALUATED}):  # computed from the others
            of = f" of {name}" if name else ""
            pairs.append((f"optimizer state {key!r}{of}", mine.get(key), theirs.get(key)))
    return pairs


def _is_equal(one: Any, two: Any) -> bool:
    """Whether two final values are equal; NaN equals nothing, so that a run that has diverged is not called equal."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):  # each may lie where it was computed
        return one.dtype == two.dtype and torch.equal(one.cpu(), two.cpu())
    return type(one) is type(two) and bool(one == two)
