"""Prove that a distributed run computed exactly what its update rule says, of the program that the person wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from roundelay.api.cuts import users_code
from roundelay.api.fidelity import Fidelity, judge, why_not
from roundelay.api.fidelity_precheck import batches_to_verify
from roundelay.api.planning import captured_and_planned
from roundelay.api.reference_start import (
    Note,
    ReferenceStart,
    begins_at_update_0,
    from_update_0,
    reference_start_of,
    since_checkpoint,
)
from roundelay.api.resume import load_checkpoint
from roundelay.api.run_record import Trained
from roundelay.api.statelessness import world_of
from roundelay.api.stop_condition import Length, extent
from roundelay.api.torch_scope import one_thread
from roundelay.api.training import Session
from roundelay.errors import JobError, UsageError
from roundelay.frontend import Captured, RngKey, StageFunction
from roundelay.ir.clip import Clip
from roundelay.ir.graph import Graph
from roundelay.ir.loss_scale import LossScale
from roundelay.ir.plan import EMA, EVALUATED, Plan
from roundelay.ir.rule import rule_named
from roundelay.ir.stage import StageSpec
from roundelay.job import Job, Peekable
from roundelay.lower.validate_plan import FORKING
from roundelay.observe.digest import digest
from roundelay.reference import ReferenceResult, ReferenceStage, Setting, run_reference
from roundelay.runtime.batch_reader import Extent, read
from roundelay.runtime.device import repeatable
from roundelay.runtime.forked_call import apart
from roundelay.runtime.loader_epoch import alike
from roundelay.runtime.loader_probe import first_batch
from roundelay.runtime.optimizer_state import WHOLE, OptimizerState, told
from roundelay.runtime.prefetch import Registers
from roundelay.runtime.tamper import WAYS, tampered
from roundelay.runtime.worker import Wrap

STEPS = 8


@dataclass(frozen=True, slots=True)
class Verification:
    """What the comparison found.

    Args:
        equal: every weight, buffer, optimizer state and loss of the run has the reference's bits, and the captured job
            does not differ from plain PyTorch, where these were compared.
        tensors: how many tensors were compared.
        steps: updates made.
        difference: the first thing in which the run differs from its reference, in causal order; empty if nothing does.
        stage: the stage at which it differs, or -1.
        reference_pid: process that ran the reference.
        workers: worker to its process, thread and bytes received.
        losses: how many losses were compared.
        fidelity: how the captured job compares with plain PyTorch; None if nobody has asked.
        begins: updates before the first that the reference has made: 0, or those of a checkpoint whose state it took.
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

    def __repr__(self) -> str:
        odd = "" if self.equal else f", difference={self.differences()!r}"
        return (
            f"Verification(equal={self.equal}{odd}, tensors={self.tensors}, losses={self.losses}, steps={self.steps}, "
            f"workers={len(self.workers)})"
        )

    def differences(self) -> str:
        """The first difference of all: of the captured job from plain PyTorch, else of the run from its reference."""
        return (self.fidelity.difference if self.fidelity is not None else "") or self.difference


def verify(  # noqa: PLR0913  as many parameters as the command has options
    job: Job,
    *,
    plan: Plan | None = None,
    workers: int | None = None,
    rule: str | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    tamper: str | None = None,
    resume: str | Path | None = None,
    **choices: Any,
) -> Verification:
    """Train distributed and in the one-process reference, and compare everything with ``torch.equal``.

    Before that the captured job is held to the person's own program: :mod:`roundelay.api.fidelity`.

    Args:
        job: the job; its model ends with the distributed run's weights.
        plan: what to run; if it is not given, one is made, as :func:`roundelay.plan` makes it of the choices below.
        workers: D; by default one per core, at most two, and no more than the model can be cut for.
        rule: update rule; ``pipeoptim`` by default.
        steps: updates; 8 if neither it nor ``epochs`` is given.
        epochs: epochs.
        seed: of both runs.
        tamper: break the distributed run on purpose, in one of the ways of :data:`WAYS`.
        resume: checkpoint to continue from; what follows it is compared. Where the run goes on in mid-flight, or by the
            same plan under a rule that flushes, the reference begins with the first update of all: it was never
            interrupted (:func:`roundelay.api.reference_start.begins_at_update_0`).
        choices: whatever else :func:`roundelay.plan` takes: ``cuts``, ``micro_batches``, ``predictor``, ``backward``,
            ``recompute``, ``compile``, ``precision``, ``loss_scale``, ``clip``, ``ema``, ``transport``,
            ``deadline_s``, ``devices``.

    Raises:
        TypeError: a choice is unknown.
        UsageError: something given cannot be used, or a plan was given beside a choice; a way to tamper that cannot act
            on this model.
        RunError: the distributed run failed.
    """
    check_way(tamper)
    captured, chosen = captured_and_planned(verify, job, plan, seed, {"workers": workers, "rule": rule, **choices})
    first = ReferenceStart.of(captured)
    length = length_of(steps, epochs)
    fidelity = judged(job, captured, chosen, seed, length, resumed=resume is not None)
    start = None if resume is None else load_checkpoint(Path(resume), captured)
    return verify_session(Session(job, captured, chosen, seed, length, start), tamper, first=first, fidelity=fidelity)


def judged(job: Job, captured: Captured, plan: Plan, seed: int, length: Length, *, resumed: bool) -> Fidelity:
    """How the captured job compares with plain PyTorch, from the model's own start; see :func:`verify`.

    Args:
        job: the job; a checkpoint has not been loaded yet.
        captured: its model.
        plan: what to run.
        seed: of the run.
        length: of the run.
        resumed: a checkpoint will be loaded.

    Raises:
        UsageError: the plan does not fit, or the length is none.
        DeadlineError: a batch did not come in time.
    """
    if why := why_not(job, plan):
        return Fidelity(unchecked=why)
    with one_thread():
        batches = batches_to_verify(job, seed, extent(job, length, None), plan.deadline_s)
        found = judge(job, captured, plan, seed, batches, evaluates=True, limit_s=plan.deadline_s)
    beside = "from the model's own start, not from the checkpoint"
    return replace(found, notes=(*found.notes, beside)) if resumed else found


def length_of(steps: int | None, epochs: int | None) -> Length:
    """What is compared when little or nothing is said."""
    return Length(steps=STEPS if steps is None and epochs is None else steps, epochs=epochs)


def verify_session(
    session: Session,
    tamper: str | None = None,
    wrap: Wrap | None = None,
    first: ReferenceStart | None = None,
    fidelity: Fidelity | None = None,
) -> Verification:
    """Verify a session; see :func:`verify`.

    Args:
        session: not yet run.
        tamper: a way to break it.
        wrap: put around every endpoint, to delay messages on purpose.
        first: what the model held before a checkpoint was loaded; needed by a session that goes on in mid-flight.
        fidelity: how the captured job compares with plain PyTorch, if that has been found out.
    """
    check_way(tamper)
    origin, anew = reference_start_of(session, first), begins_at_update_0(session, first)
    handlers = {} if tamper is None else {_victim(session, tamper): tampered(tamper)}
    kept = world_of(session.job)  # what the person's code keeps: the reference begins with it as the run did
    with repeatable(session.plan.devices):
        trained = session.run(notify=lambda event: None, audit=True, handlers=handlers, wrap=wrap)
        kept.restore(apart=("buffer", "parameter"))
        if session.plan.transport in FORKING:
            found = apart(partial(_judged, session, origin, anew, trained), "the one-process reference")
        else:
            found = _judged(session, origin, anew, trained)
    found["equal"] = not found["difference"] and (fidelity is None or fidelity.equal)
    result = Verification(**found, workers=trained.workers, fidelity=fidelity)
    if tamper is not None and not result.difference:
        raise UsageError(
            f"--tamper {tamper} at stage {next(iter(handlers))}",
            got=f"a run of {result.steps} updates in which it changed no bit",
            expected="a run on which it makes a difference",
            remedy="Give more --steps, or another way to tamper.",
        )
    return result


def _judged(session: Session, origin: ReferenceStart, anew: bool, trained: Trained) -> dict[str, Any]:
    """What the comparison with the reference found, as fields of :class:`Verification` that JSON can hold."""
    _check_same_data(session)
    session.compile()  # known already, but in a process of its own
    notes: list[Note] = []
    with one_thread(), users_code("the one-process reference"):
        reference = _on_cpu(_reference(session, origin, anew, trained, notes))
    if session.start is not None and anew:
        reference, notes = since_checkpoint(session, reference, notes)
    return {**_compare(session, trained, reference, notes), "begins": 0 if anew else session.initial.updates}


def _check_same_data(session: Session) -> None:
    """Refuse data that are others at the second time: the run has read them, and the reference would.

    Raises:
        JobError: they are.
    """
    batches = session.job.batches
    if not isinstance(batches, Peekable) or batches.first is None or batches.first[0] != session.seed:
        return
    if not alike(first_batch(batches, session.seed, session.plan.deadline_s), batches.first[1]):
        raise JobError(
            "batches(0), read for the reference",
            got="another first batch than the run was given: a stream that goes on, or random numbers of its own",
            expected="the same data whenever an epoch is read: `verify` reads them twice",
            remedy="Let batches(epoch) begin anew at each call, and seed what is random by the epoch; `train` reads "
            "an epoch once, and takes a stream as it is.",
        )


def check_way(tamper: str | None) -> None:
    """Refuse a way to tamper that there is not; None is no way.

    Raises:
        UsageError: it is unknown.
    """
    if tamper is not None and tamper not in WAYS:
        known = "one of " + ", ".join(WAYS)
        raise UsageError("--tamper", got=repr(tamper), expected=known, remedy="Choose one of these.")


def _victim(session: Session, way: str) -> int:
    """The stage whose worker is broken: the last one at which the way makes a difference.

    Raises:
        UsageError: the way makes no difference anywhere.
    """
    if way != "rng" and session.extent.batches == 1:
        raise UsageError(
            f"--tamper {way}",
            got="a run of one update, in which it changes nothing",
            expected="at least two updates",
            remedy="Give --steps 2 or more.",
        )
    graph = session.captured.graph
    for spec in reversed(session.partition.stages):
        draws = any(op.draws >= 0 for part in spec.segments for op in graph.ops[part.start : part.stop])
        trains = any(graph.parameters[n].trainable for n in spec.parameters)
        if draws if way == "rng" else trains:
            return spec.stage
    raise UsageError(
        f"--tamper {way}",
        got="a model that " + ("draws no random numbers" if way == "rng" else "has no trainable parameter"),
        expected="a model on which it makes a difference",
        remedy="Choose another way to tamper.",
    )


def _reference(
    session: Session, origin: ReferenceStart, anew: bool, trained: Trained, notes: list[Note]
) -> ReferenceResult:
    """The literal equations, on copies, with digests of everything in causal order; in parts, as the run was."""
    captured, plan, job = session.captured, session.plan, session.job
    trainable = {n: p.requires_grad for n, p in captured.model.named_parameters()}
    stages = [
        ReferenceStage(
            _function(captured, spec, plan.backward, torch.device(name)),
            spec.parameters,
            spec.buffers,
            torch.device(name),
        )
        for spec, name in zip(session.partition.stages, plan.devices, strict=True)
    ]
    device = {name: stage.device for stage in stages for name in stage.parameters}
    named = [
        (n, torch.nn.Parameter(p.to(device.get(n, "cpu"), copy=True), trainable[n]))
        for n, p in origin.parameters.items()
    ]
    extent = from_update_0(session.extent) if anew else session.extent
    states = None if anew else session.initial.optimizer
    whole = ReferenceResult(buffers=dict(origin.buffers), loss_scale=None if anew else session.initial.loss_scale)

    def audit(kind: str, stage: int, number: int, tensors: Mapping[str, torch.Tensor]) -> None:
        notes.append(((kind, stage, number), digest(tensors)))

    kept = _Kept(job, trained.snapshot.optimizer.get(WHOLE, {}))
    while True:
        numbers = trained.numbers[: extent.start_epoch] if session.waits else ()
        part = replace(extent, epochs=extent.start_epoch + 1) if session.waits else extent
        registers = Registers(1, plan.deadline_s)  # in line, and not for ever
        least = captured.graph.min_rows
        stream = read(
            job.batches, session.seed, plan.micro_batches, part, captured.values, min_rows=least, registers=registers
        )
        result = run_reference(
            _setting(plan, captured.graph, states, whole.loss_scale, numbers),
            stages,
            named,
            whole.buffers,
            stream,
            kept.make,
            job.scheduler,
            lambda g: RngKey(session.seed, g),
            audit=audit,
            start=None if states is None else partial(kept.restore, states),
        )
        result = replace(result, optimizer_state=kept.told(result.optimizer_state))
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
        extent = Extent(
            max(whole.losses) + 1, result.updates, extent.start_epoch + 1, 0, last.batch + 1 - result.updates, None
        )


def _setting(
    plan: Plan,
    graph: Graph,
    states: Mapping[str, Mapping[str, Any]] | None,
    loss_scale_at: tuple[float, int] | None,
    numbers: tuple[float, ...],
) -> Setting:
    """What a reference is told of the plan, and of where it starts."""
    return Setting(
        rule=rule_named(plan.rule),
        predictor=plan.predictor,
        mode=plan.backward,  # type: ignore[arg-type]
        clip=Clip.parse(plan.clip),
        loss_scale=LossScale.parse(plan.loss_scale),
        loss_scale_at=loss_scale_at,
        numbers=numbers,
        ema=plan.ema,
        labels_per_row=graph.labels_per_row,
        ema_at={name: state[EMA] for name, state in (states or {}).items() if EMA in state} or None,
    )


def _function(captured: Captured, spec: StageSpec, mode: str, device: torch.device) -> StageFunction:
    """A stage's function; where that must make no difference, one that keeps what the run's computes again."""
    return captured.stage(replace(spec, recomputed=()) if mode == "stash" else spec, device)


def _on_cpu(result: ReferenceResult) -> ReferenceResult:
    """The result with its tensors where those of the run are handed over."""
    state = {
        name: {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in one.items()}
        for name, one in result.optimizer_state.items()
    }
    parameters = {name: tensor.cpu() for name, tensor in result.parameters.items()}
    buffers = {name: tensor.cpu() for name, tensor in result.buffers.items()}
    return replace(result, parameters=parameters, buffers=buffers, optimizer_state=state)


class _Kept:
    """What the reference's optimizers keep, read and put back as a stage's is.

    Args:
        job: the job.
        like: what the run's optimizer told that belongs to the whole of it.
    """

    def __init__(self, job: Job, like: Mapping[str, Any]) -> None:
        self._make, self._changed = job.optimizer, told(like)
        self._made: dict[int, tuple[OptimizerState, dict[str, torch.nn.Parameter]]] = {}
        #: of the last run: the one that trains, before those that look ahead for rates
        self._first: tuple[OptimizerState, dict[str, torch.nn.Parameter]] | None = None

    def make(self, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        """An optimizer of the job's."""
        optimizer = self._make(named)
        kept = OptimizerState(optimizer, named), dict(named)
        self._made[id(optimizer)] = kept
        self._first = self._first or kept
        return optimizer

    def restore(self, states: Mapping[str, Mapping[str, Any]], optimizer: torch.optim.Optimizer) -> None:
        """Put a checkpoint's state into an optimizer that was made here."""
        kept, own = self._made[id(optimizer)]
        kept.restore(own, states)

    def told(self, states: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps that has trained, with the averages among what the reference tells of it."""
        assert self._first is not None
        kept, own = self._first
        kept.changed |= self._changed
        entries, self._first = kept.entries(own), None
        for name, state in states.items():
            if EMA in state:
                entries.setdefault(name, {})[EMA] = state[EMA]
        return entries


def _compare(
    session: Session,
    trained: Trained,
    reference: ReferenceResult,
    notes: list[Note],
) -> dict[str, Any]:
    stage, difference = _first_in_time(trained, notes)
    pairs = _pairs(trained, reference)
    odd = next((name for name, ours, theirs in pairs if not _same(ours, theirs)), "")
    losses = {g: loss for g, (loss, _) in trained.micro_losses.items()}
    if not odd and losses != reference.losses:
        odd = "losses"
    if not odd and repr(trained.micro_metrics) != repr(reference.metrics):  # told alike, not-a-number included
        odd = "metrics beside the losses"
    if not odd and trained.micro_scales != reference.scales:
        odd = "loss scales"
    if odd and not difference:
        difference = f"{odd} at the end of the run"
    elif odd:
        difference += f"; at the end {odd} differs"
    return {
        "tensors": sum(isinstance(ours, torch.Tensor) for _, ours, _ in pairs),
        "steps": reference.updates - session.initial.updates,
        "difference": difference,
        "stage": stage,
        "reference_pid": os.getpid(),
        "losses": len(losses),
    }


def _first_in_time(trained: Trained, notes: list[Note]) -> tuple[int, str]:
    """The first computation, in the reference's order, that the distributed run did otherwise."""
    for key, wanted in notes:
        kind, stage, number = key
        if trained.digests.get(key) != wanted:
            of = f"update {number}" if kind == "update" else f"{kind} of micro-batch {number}"
            missing = " (it never happened)" if key not in trained.digests else ""
            return stage, f"stage {stage}: {of} differs{missing}"
    extra = set(trained.digests) - {key for key, _ in notes}
    if extra:
        kind, stage, number = min(extra)
        return stage, f"stage {stage}: {kind} {number} should not have happened"
    return -1, ""


def _pairs(trained: Trained, reference: ReferenceResult) -> list[tuple[str, Any, Any]]:
    """(what, ours, the reference's) of everything that the run leaves."""
    ours = trained.snapshot
    pairs: list[tuple[str, Any, Any]] = [("the loss scale that comes next", ours.loss_scale, reference.loss_scale)]
    for name, tensor in ours.parameters.items():
        pairs.append((f"parameter {name}", tensor, reference.parameters.get(name)))
    for name, tensor in ours.buffers.items():
        pairs.append((f"buffer {name}", tensor, reference.buffers.get(name)))
    for name in sorted({*ours.optimizer, *reference.optimizer_state}):
        mine, theirs = ours.optimizer.get(name, {}), reference.optimizer_state.get(name, {})
        for key in sorted({*mine, *theirs} - {EVALUATED}):  # made of the others, on copies
            of = f" of {name}" if name else ""
            pairs.append((f"optimizer state {key!r}{of}", mine.get(key), theirs.get(key)))
    return pairs


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b
