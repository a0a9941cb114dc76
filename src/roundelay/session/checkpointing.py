"""Snapshots during a training: load them into the model, evaluate, complete checkpoints; in background threads."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch
from safetensors import SafetensorError

from roundelay.checkpoint import checkpoint as store
from roundelay.checkpoint.atomic_files import reason_of, unwritten_because
from roundelay.checkpoint.checkpoint import Facts, FlightFacts, Manifest, Position, Until
from roundelay.checkpoint.held_state import UNUSED, HeldState
from roundelay.checkpoint.shards import Shard, whole_ranges
from roundelay.checkpoint.stored_files import remove_updates, write_state
from roundelay.errors import JobError, RunError, UserCodeError
from roundelay.frontend import DEFAULT_GENERATOR_LOCK, Captured
from roundelay.frontend.loss_closure import MODEL_LOCK
from roundelay.frontend.stages.on_device import OnDevice
from roundelay.frontend.stages.retarget_device import CPU
from roundelay.ir.averages import EMA, EVALUATED
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.ir.stage import Partition
from roundelay.job import Job, StopTraining
from roundelay.runtime.initial_state import Initial
from roundelay.runtime.loading.checkpoint_schedule import Extent, RunControl
from roundelay.runtime.state_reports import AMOUNTS, Gathered, StateUse, of_checkpoint
from roundelay.session.background import Background
from roundelay.session.events import Evaluated, Event, NotSaved, Observer, Saved, Stopping
from roundelay.session.resume import laid_out
from roundelay.session.state_gather import CheckpointParts, Snapshot

ABANDON_S = 3.0
"""Seconds that an unfinished checkpoint or evaluation may still take when the run has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Where and when checkpoints are written: after every epoch, at the end, and after every ``every`` updates.

    Args:
        path: the checkpoint's folder; each checkpoint replaces the one before.
        every: updates between checkpoints; 0: only at the ends of epochs and of the run.
    """

    path: Path
    every: int = 0


class Checkpointed(Protocol):
    """The training that the snapshots are of."""

    job: Job
    captured: Captured
    plan: Plan
    partition: Partition
    seed: int
    extent: Extent
    order: dict[str, str]
    since: int
    control: RunControl
    initial: Initial
    waits: bool
    optimizer_kind: str

    @property
    def began(self) -> str:
        """Digests of the initial values, and of all that determines updates."""
        ...


@final
class Checkpointer:
    """Takes snapshots in order: loads each that is gathered into the user's model, evaluates it, completes checkpoints.

    Evaluations and checkpoints have a background thread each; if a checkpoint is to have the evaluation's metric, it is
    completed after that.

    Args:
        session: the training.
        saving: where checkpoints are written, if anywhere.
        evaluates: whether to call the job's ``evaluate``.

    Raises:
        CheckpointError: something else is at the checkpoint's place.
    """

    def __init__(self, session: Checkpointed, saving: Saving | None, *, evaluates: bool) -> None:
        self._session, self._saving, self._evaluates = session, saving, evaluates
        self._start_threads()
        self._events = queue.SimpleQueue[Event]()
        self._last: Snapshot | None = None
        self._left_out = session.control.left_out
        self._names = StoredNames(session.captured.model, session.partition)
        self.evaluations: list[Evaluated] = []
        #: the metric that the next epoch's learning rate depends on, one number per evaluated epoch
        self.numbers = list(session.initial.numbers)
        if saving is not None:
            store.prepare(saving.path.resolve())

    def use(self, *, gathers: Gathered) -> StateUse:
        """What the stages' states are needed for.

        Args:
            gathers: what is gathered at the end of the run, at least.
        """
        waits = self._session.waits  # workers that are restarted get everything
        loads = self._evaluates or gathers == "everything"  # an interrupted caller has the weights of the last epoch
        needed: Gathered = "everything" if waits else "weights" if loads else "nothing"
        return StateUse(
            folder=None if self._saving is None else self._saving.path.resolve(),
            buffers=self._names.buffers,
            after_epoch=needed,
            at_end=max(needed, gathers, key=AMOUNTS.index),
        )

    def keep(self, snapshot: Snapshot, parts: CheckpointParts, epoch_starts: Mapping[int, int]) -> None:
        """Take what all holders report of one version.

        Args:
            snapshot: all stages at that version, as far as it is gathered.
            parts: of the checkpoint, if one is made.
            epoch_starts: epoch to its first batch.
        """
        self._last = snapshot
        header, session = snapshot.header, self._session
        at = position_of(header, epoch_starts, session.extent)
        evaluates = self._evaluates and bool(header.ends_epoch or header.final)
        if evaluates or snapshot.parameters:
            self._evaluating.submit(lambda: self._take_gathered(snapshot, evaluates))
        if self._saving is not None and (header.saved or header.final):
            thread = self._evaluating if session.waits else self._writing
            thread.submit(lambda: self._complete(snapshot, parts, at))

    def deliver(self, notify: Observer) -> None:
        """Report what has been done since the last call, in the caller's thread; raise its error if there was one."""
        for thread in (self._writing, self._evaluating):
            thread.check()
        self._deliver(notify)

    def settle(self) -> Snapshot:
        """Wait until everything so far is done, and end the threads; returns the newest snapshot."""
        last = self.finish()
        self._start_threads()
        return last

    def _start_threads(self) -> None:
        threads = self._session.plan.leader_threads  # the numbers of `evaluate` may depend on how many compute them
        self._writing, self._evaluating = Background(1), Background(threads)

    def finish(self) -> Snapshot:
        """Wait until everything is done; returns the last snapshot."""
        for thread in (self._writing, self._evaluating):
            thread.finish()
        assert self._last is not None, "every run ends with a snapshot"
        return self._last

    def close(self, notify: Observer) -> None:
        """End the threads, within :data:`ABANDON_S` seconds each if the run has failed, and report what is done."""
        for thread in (self._writing, self._evaluating):
            thread.abandon(ABANDON_S)
        self._deliver(notify)

    def _deliver(self, notify: Observer) -> None:
        while not self._events.empty():
            notify(self._events.get())

    def _take_gathered(self, snapshot: Snapshot, evaluates: bool) -> None:
        put(self._session.captured, snapshot)
        if evaluates:
            self._evaluate_snapshot(snapshot)

    def _evaluate_snapshot(self, snapshot: Snapshot) -> None:
        """Evaluate a snapshot, and keep the metric that a learning rate depends on."""
        job, captured, header = self._session.job, self._session.captured, snapshot.header
        with holding_averages(captured, snapshot.optimizer), captured.effects.settings.suspended():
            evaluated, reason = evaluate(job, captured.model, header.batch + 1, header.epoch)
        restore(captured, snapshot)
        captured.effects.settings.check()
        self.evaluations.append(evaluated)
        self._events.put(evaluated)
        if reason is not None:
            self._events.put(Stopping(reason))
        if self._session.waits and header.ends_epoch and (reason is None or evaluated.metrics):
            self.numbers.append(monitored(job, evaluated.metrics))  # a loop that was left has stepped no scheduler

    def _complete(self, snapshot: Snapshot, parts: CheckpointParts, at: Position) -> None:
        """Complete a checkpoint, or report that it cannot be written.

        Raises:
            RunError: the run's last checkpoint cannot be written.
        """
        assert self._saving is not None
        path, reason = self._saving.path.resolve(), parts.unwritten
        try:
            if not reason:
                store.commit(path, self._manifest(path, snapshot.header, parts, at))
        except (OSError, SafetensorError) as error:
            reason = reason_of(error)
        except RunError as error:
            reason = error.got
        self._session.control.end_save()
        if reason:
            remove_updates(path, at.updates)
            if snapshot.header.final:
                raise unwritten_because(self._saving.path, reason)
        left_out, self._left_out = self._left_out, self._session.control.left_out
        saved = Saved(str(self._saving.path), at.updates, self._left_out - left_out)
        self._events.put(NotSaved(str(self._saving.path), reason) if reason else saved)

    def _manifest(self, path: Path, header: MicroBatch, parts: CheckpointParts, at: Position) -> Manifest:
        """Write what the holders could not write themselves; returns the manifest that joins all files."""
        session, names = self._session, self._names
        unstored = [(worker, of_checkpoint(held, names.buffers)) for worker, held in parts.unstored]
        written = [write_state(path, held, worker, at.updates) for worker, held in unstored]
        if names.unused is not None:
            written.append(write_state(path, names.unused, 0, at.updates))
        return Manifest(
            facts=Facts(
                position=at,
                seed=session.seed,
                fingerprint=session.plan.model,
                rule=session.plan.rule,
                num_stages=session.plan.num_stages,
                until=Until() if header.final and session.control.ending else _until(session.extent),
                numbers=tuple(self.numbers),
                optimizer_kind=session.optimizer_kind,
                began=session.began,
            ),
            shapes=names.shapes,
            aliases=names.aliases,
            flight=FlightFacts(session.order, session.since) if header.saved else None,
            holders=sorted([*parts.stored, *written], key=lambda holder: holder.table.stage),
        )


def _until(extent: Extent) -> Until:
    """Where a run ends, counted from update 0."""
    return Until(None if extent.batches is None else extent.start_batch + extent.batches, extent.epochs)


def put(captured: Captured, snapshot: Snapshot) -> None:
    """Load the snapshot into the user's model, in new memory: the session's initial state uses the old.

    Tensors that no stage has, since the loss does not depend on them, stay as they are.
    """
    own = captured.parameters()
    for name, tensor in snapshot.parameters.items():
        captured.set_parameter(name, laid_out(own[name].data, tensor).clone())
    with torch.no_grad():
        for name, buffer in captured.buffers().items():
            new = snapshot.buffers.get(name, buffer)
            if new.shape != buffer.shape:  # the forward has resized it, as observers of quantisation do
                buffer.resize_(new.shape)
            buffer.copy_(new)


def restore(captured: Captured, snapshot: Snapshot) -> None:
    """Undo an evaluation's changes of the weights: adapters that merge leave rounding errors in them.

    Raises:
        JobError: it has changed weights or buffers by more than rounding. Plain PyTorch would train on with these.
    """
    own, buffers = captured.parameters(), captured.buffers()
    for kind, held, kept in (("parameter", own, snapshot.parameters), ("buffer", buffers, snapshot.buffers)):
        for name, tensor in kept.items():
            if name in held and not _is_close(held[name].detach(), tensor):
                raise _changed_by_evaluate(f"{kind} {name!r}")
    for name, tensor in snapshot.parameters.items():
        if not torch.equal(own[name].data, tensor):
            captured.set_parameter(name, laid_out(own[name].data, tensor).clone())


def _is_close(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether two tensors are equal up to rounding; True for another shape or dtype, such as that of a grown cache."""
    if now.shape != before.shape or now.dtype != before.dtype or torch.equal(now, before):
        return True
    if not (now.is_floating_point() or now.is_complex()):
        return False
    return torch.allclose(now, before, rtol=1e-2, atol=1e-2 * float(before.abs().nan_to_num().max()), equal_nan=True)


def _changed_by_evaluate(subject: str) -> JobError:
    return JobError(
        f"{subject}, changed by Job(evaluate=...)",
        got="other values after the evaluation than before it",
        expected="an evaluation that leaves the model unchanged: the stages continue with their own values, where "
        "plain PyTorch would continue with the changed ones",
        remedy="Evaluate a copy (copy.deepcopy(model)), or restore what evaluate changes; a model in train() mode "
        "updates the statistics of its BatchNorm.",
    )


def averages(optimizer: Mapping[str, Mapping[str, Any]], *, moving: bool = True) -> dict[str, torch.Tensor]:
    """The weights to evaluate with, by parameter name, where they are not those that are trained.

    Args:
        optimizer: state by parameter name.
        moving: include moving averages, not only the optimizer's own evaluation weights.
    """
    keys = (EMA, EVALUATED) if moving else (EVALUATED,)
    return {name: state[key] for name, state in optimizer.items() for key in reversed(keys) if key in state}


@contextmanager
def holding_averages(captured: Captured, optimizer: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Within the context, the model has the weights to evaluate with, if they differ from those that are trained."""
    own, averaged = captured.parameters(), averages(optimizer)
    before = {name: own[name].data for name in averaged}
    try:
        for name, average in averaged.items():
            captured.set_parameter(name, laid_out(before[name], average).clone())
        yield
    finally:
        for name, weight in before.items():
            captured.set_parameter(name, weight)


def evaluate(job: Job, model: torch.nn.Module, updates: int, epoch: int) -> tuple[Evaluated, str | None]:
    """Call the job's ``evaluate`` on its model; returns its metrics, and its reason to stop the training or None.

    Args:
        job: the job.
        model: its model.
        updates: version of its weights.
        epoch: of its last update.

    Raises:
        UserCodeError: it raises, or returns anything but a dict of names to numbers.
    """
    reason = None
    try:
        here = OnDevice(CPU) if torch.cuda.is_initialized() else nullcontext()  # what a loss has left on a device
        fork = torch.random.fork_rng(devices=[])
        with DEFAULT_GENERATOR_LOCK, MODEL_LOCK, evaluating(model), torch.no_grad(), fork, here:
            assert job.evaluate is not None
            try:
                returned: Mapping[str, float] | None = job.evaluate(model)  # None from a function that only prints
            except StopTraining as stop:
                returned, reason = stop.metrics, stop.reason
            metrics = {_name(name): float(value) for name, value in (returned or {}).items()}
    except Exception as error:  # user code
        raise UserCodeError(
            f"Job(evaluate=...) after update {updates - 1}",
            got=f"{type(error).__name__}: {error}",
            expected="a dict of names to numbers",
            remedy="Correct the function; it gets the original module in eval mode.",
        ) from error
    return Evaluated(updates, epoch, metrics), reason


def monitored(job: Job, metrics: Mapping[str, float]) -> float:
    """The metric that ReduceLROnPlateau is given.

    Raises:
        UserCodeError: ``evaluate`` does not return it, or returns several and none is called ``loss``.
    """
    name = job.monitor if job.monitor is not None else next(iter(metrics)) if len(metrics) == 1 else "loss"
    if name in metrics:
        return metrics[name]
    raise UserCodeError(
        "Job(evaluate=...) with a ReduceLROnPlateau scheduler",
        got=f"{', '.join(metrics) or 'no number'}",
        expected=f"a number called {name!r}, which the learning rate depends on"
        + ("" if job.monitor else ", or a single number"),
        remedy='Name it: Job(monitor="accuracy"), for example; mode="max" in the scheduler where more is better.',
    )


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name {name!r} of type {type(name).__name__}, not str")
    return name


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within the context, the model is in eval mode; then every module gets its own mode back.

    ``eval()`` and ``train()`` are called on the model: it may override them, as adapters do that merge their weights.
    """
    training, modes = model.training, {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        for module, training in modes.items():
            module.training = training


def position_of(header: MicroBatch, epoch_starts: Mapping[int, int], extent: Extent) -> Position:
    """Where a run continues after an update.

    Args:
        header: the update's last micro-batch.
        epoch_starts: epoch to the number of its first batch in this run.
        extent: of the run.
    """
    first = epoch_starts.get(header.epoch, header.batch)
    skip = extent.skip if header.epoch == extent.start_epoch else 0
    used = 0 if header.ends_epoch else header.batch + 1 - first + skip
    done = (header.g + 1) * header.replicas
    return Position(header.batch + 1, done, header.epoch + header.ends_epoch, used)


@final
class StoredNames:
    """What a checkpoint of a model has, and what of it no stage has.

    Args:
        model: the user's.
        partition: its stages.
    """

    def __init__(self, model: torch.nn.Module, partition: Partition) -> None:
        parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
        persistent = set(model.state_dict())
        #: the whole shape of every parameter
        self.shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
        self.buffers = frozenset(name for name in buffers if name in persistent)
        first = {id(t): n for n, t in [*parameters.items(), *buffers.items()]}
        every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        #: other names of tied parameters and shared buffers
        self.aliases = {n: first[id(t)] for n, t in every if first[id(t)] != n and n in persistent}
        held = {name for stage in partition.stages for name in (*stage.parameters, *stage.buffers)}
        left = {n: Shard(whole_ranges(p.shape), p.detach()) for n, p in parameters.items() if n not in held}
        unused = HeldState(UNUSED, left, {n: buffers[n] for n in self.buffers if n not in held}, {})
        #: the parameters and buffers that no stage has; None if there are none
        self.unused = unused if unused.parameters or unused.buffers else None
