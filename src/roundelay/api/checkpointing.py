"""Snapshots during a training: load them into the model, write checkpoints, evaluate; in a background thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch

from roundelay.api.background import Background
from roundelay.api.events import Evaluated, Event, NotSaved, Observer, Saved, Stopping
from roundelay.api.resume import laid_out
from roundelay.api.state_gather import Snapshot
from roundelay.checkpoint import checkpoint as store
from roundelay.checkpoint.checkpoint import Checkpoint, Position, Until
from roundelay.checkpoint.in_flight_state import InFlight
from roundelay.errors import JobError, RunError, UserCodeError
from roundelay.frontend import DEFAULT_GENERATOR_LOCK, Captured
from roundelay.frontend.loss_closure import MODEL_LOCK
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import EMA, EVALUATED, Plan
from roundelay.job import Job, StopTraining
from roundelay.runtime.checkpoint_schedule import Extent, RunControl
from roundelay.runtime.stage_state import Initial

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
    """Takes snapshots in order; loads each into the user's model, saves it and evaluates it, in the background.

    Args:
        session: the training.
        saving: where checkpoints are written, if anywhere.
        evaluates: whether to call the job's ``evaluate``.
    """

    def __init__(self, session: Checkpointed, saving: Saving | None, *, evaluates: bool) -> None:
        self._session, self._saving, self._evaluates = session, saving, evaluates
        self._background, self._events = Background(), queue.SimpleQueue[Event]()
        self._last: Snapshot | None = None
        self._lock = threading.Lock()
        # the snapshot within an epoch that waits to be written, if any; removed when its writing begins
        self._waiting: list[tuple[Snapshot, Position]] = []
        self.evaluations: list[Evaluated] = []
        #: the metric that the next epoch's learning rate depends on, one number per evaluated epoch
        self.numbers = list(session.initial.numbers)

    def keep(self, snapshot: Snapshot, epoch_starts: Mapping[int, int]) -> None:
        """Take one snapshot; of those within an epoch that wait to be written, only the newest is kept.

        Args:
            snapshot: all stages at one version.
            epoch_starts: epoch to its first batch.
        """
        self._last = snapshot
        position = position_of(snapshot.header, epoch_starts, self._session.extent)
        within_epoch = _is_within_epoch(snapshot.header)
        with self._lock:
            if within_epoch and self._waiting:
                self._waiting[0] = snapshot, position
                return
            place = [(snapshot, position)]
            self._waiting = place if within_epoch else []
        self._background.submit(lambda: self._process(place))

    def deliver(self, notify: Observer) -> None:
        """Report what has been done since the last call, in the caller's thread; raise its error if there was one."""
        self._background.check()
        self._deliver(notify)

    def settle(self) -> Snapshot:
        """Wait until everything so far is done, and end the thread; returns the newest snapshot."""
        last = self.finish()
        self._background = Background()
        return last

    def finish(self) -> Snapshot:
        """Wait until everything is done; returns the last snapshot."""
        self._background.finish()
        assert self._last is not None, "every run ends with a snapshot"
        return self._last

    def close(self, notify: Observer) -> None:
        """End the thread, within :data:`ABANDON_S` seconds if the run has failed, and report what it has done."""
        self._background.abandon(ABANDON_S)
        self._deliver(notify)

    def _deliver(self, notify: Observer) -> None:
        while not self._events.empty():
            notify(self._events.get())

    def _process(self, place: list[tuple[Snapshot, Position]]) -> None:
        with self._lock:
            snapshot, position = place.pop()
        put(self._session.captured, snapshot)
        if self._session.waits and not _is_within_epoch(snapshot.header):  # the checkpoint is to have the new number
            self._evaluate_snapshot(snapshot)
            self._write(snapshot, position)
        else:
            self._write(snapshot, position)
            if self._evaluates and not _is_within_epoch(snapshot.header):
                self._evaluate_snapshot(snapshot)

    def _write(self, snapshot: Snapshot, position: Position) -> None:
        if self._saving is not None:
            self._events.put(self._save(self._saving.path, snapshot, position))

    def _evaluate_snapshot(self, snapshot: Snapshot) -> None:
        """Evaluate a snapshot, and keep the metric that a learning rate depends on."""
        job, captured, header = self._session.job, self._session.captured, snapshot.header
        with holding_averages(captured, snapshot.optimizer), captured.settings.suspended():
            evaluated, reason = evaluate(job, captured.model, header.batch + 1, header.epoch)
        restore(captured, snapshot)
        captured.settings.check()
        self.evaluations.append(evaluated)
        self._events.put(evaluated)
        if reason is not None:
            self._events.put(Stopping(reason))
        if self._session.waits and header.ends_epoch:
            self.numbers.append(monitored(job, evaluated.metrics))

    def _save(self, path: Path, snapshot: Snapshot, position: Position) -> Saved | NotSaved:
        """Write a checkpoint, or report that it cannot be written.

        Raises:
            RunError: the run's last checkpoint cannot be written.
        """
        session = self._session
        parameters, buffers = _all_tensors(session.captured.model, snapshot)
        checkpoint = Checkpoint(
            parameters=parameters,
            buffers=buffers,
            optimizer=snapshot.optimizer,
            position=position,
            seed=session.seed,
            fingerprint=session.plan.model,
            rule=session.plan.rule,
            num_stages=session.plan.num_stages,
            until=Until() if snapshot.header.final and session.control.ending else _until(session.extent),
            loss_scale=snapshot.loss_scale,
            numbers=tuple(self.numbers),
            optimizer_kind=session.optimizer_kind,
            began=session.began,
            flight=None if snapshot.flight is None else InFlight(session.order, session.since, snapshot.flight),
        )
        try:
            store.save(path, checkpoint, _aliases(session.captured.model))
        except RunError as error:
            if snapshot.header.final:
                raise
            return NotSaved(str(path), error.got)
        return Saved(str(path), position.updates)


def _until(extent: Extent) -> Until:
    """Where a run ends, counted from update 0."""
    return Until(None if extent.batches is None else extent.start_batch + extent.batches, extent.epochs)


def _is_within_epoch(header: MicroBatch) -> bool:
    """Whether a snapshot was made within an epoch: it is saved and not evaluated."""
    return not (header.ends_epoch or header.final)


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
        with DEFAULT_GENERATOR_LOCK, MODEL_LOCK, evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
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
    return Position(header.batch + 1, header.g + 1, header.epoch + header.ends_epoch, used)


def _all_tensors(model: torch.nn.Module, snapshot: Snapshot) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """All parameters and persistent buffers: the snapshot's, and the model's own where no stage has them."""
    parameters = {n: snapshot.parameters.get(n, p.detach()) for n, p in model.named_parameters()}
    stored = set(model.state_dict())
    return parameters, {n: snapshot.buffers.get(n, b) for n, b in model.named_buffers() if n in stored}


def _aliases(model: torch.nn.Module) -> dict[str, str]:
    """Other names of tied parameters and shared buffers."""
    first = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    stored = set(model.state_dict())
    return {n: first[id(t)] for n, t in every if first[id(t)] != n and n in stored}
