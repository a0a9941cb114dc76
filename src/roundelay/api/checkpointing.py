"""What is done with the states that the stages hand over, beside the training: keep, save, evaluate."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch

from roundelay.api.background import Background
from roundelay.api.resume import laid_out
from roundelay.api.state_gather import Evaluated, Event, Notify, NotSaved, Saved, Snapshot, Stopping
from roundelay.checkpoint import checkpoint as store
from roundelay.checkpoint.checkpoint import Checkpoint, Position, Until
from roundelay.checkpoint.in_flight import InFlight
from roundelay.errors import JobError, RunError, UserCodeError
from roundelay.frontend import DEFAULT_GENERATOR_LOCK, Captured
from roundelay.frontend.loss_closure import MODEL_LOCK
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import EMA, EVALUATED, Plan
from roundelay.job import Job, StopTraining
from roundelay.runtime.batch_reader import Extent, RunControl
from roundelay.runtime.stage_state import Initial

ABANDON_S = 3.0
"""Seconds that a checkpoint being written, or an evaluation, gets to end when the run has failed."""


INTERIM_S = 60.0
"""Seconds that lie at least between two checkpoints that are for an interruption only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Where checkpoints go: after every epoch, at the end, and after every ``every`` updates if that is not 0.

    Args:
        path: their folder.
        every: updates from one to the next.
        interim: they are for an interruption only: at most one in :data:`INTERIM_S` seconds, and none at the end.
    """

    path: Path
    every: int = 0
    interim: bool = False


class Kept(Protocol):
    """The training whose states are kept."""

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
        """What the run began with and what it computes by."""
        ...


@final
class Checkpointer:
    """Takes snapshots in order; puts each into the person's model, saves it and evaluates it, in the background.

    Args:
        session: the training.
        saving: where checkpoints go, if anywhere.
        evaluates: whether to call the job's ``evaluate``.
    """

    def __init__(self, session: Kept, saving: Saving | None, *, evaluates: bool) -> None:
        self._session, self._saving, self._evaluates = session, saving, evaluates
        self._saved_at = time.monotonic()
        self._background, self._told = Background(), queue.SimpleQueue[Event]()
        self._last: Snapshot | None = None
        self._lock = threading.Lock()
        self._waiting: list[tuple[Snapshot, Position]] = []  # the one within an epoch that waits; taken out when begun
        self.evaluations: list[Evaluated] = []
        #: what the evaluations have said that the next epoch's learning rate waits for
        self.numbers = list(session.initial.numbers)

    def keep(self, snapshot: Snapshot, epoch_starts: Mapping[int, int]) -> None:
        """Take one snapshot; of those within an epoch that wait to be written, the newest takes the others' place.

        Args:
            snapshot: all stages at one version.
            epoch_starts: epoch to its first batch.
        """
        self._last = snapshot
        position = position_of(snapshot.header, epoch_starts, self._session.extent)
        between = _is_between(snapshot.header)
        with self._lock:
            if between and self._waiting:
                self._waiting[0] = snapshot, position
                return
            place = [(snapshot, position)]
            self._waiting = place if between else []
        self._background.submit(lambda: self._begin(place))

    def pass_on(self, notify: Notify) -> None:
        """Tell what has been done, in the caller's thread; raise what went wrong."""
        self._background.check()
        self._tell(notify)

    def settle(self) -> Snapshot:
        """Wait until everything so far is done; the newest snapshot. What comes has a thread of its own."""
        last = self.finish()
        self._background = Background()
        return last

    def finish(self) -> Snapshot:
        """Wait until everything is done; the last snapshot."""
        self._background.finish()
        assert self._last is not None, "every run ends with a snapshot"
        return self._last

    def leave(self, notify: Notify) -> None:
        """End, whatever has happened."""
        self._background.abandon(ABANDON_S)
        self._tell(notify)

    def _tell(self, notify: Notify) -> None:
        while not self._told.empty():
            notify(self._told.get())

    def _begin(self, place: list[tuple[Snapshot, Position]]) -> None:
        with self._lock:
            snapshot, position = place.pop()
        self._keep(snapshot, position)

    def _keep(self, snapshot: Snapshot, position: Position) -> None:
        put(self._session.captured, snapshot)
        if self._session.waits and not _is_between(snapshot.header):  # the checkpoint is to hold what it says
            self._look_at(snapshot)
            self._write(snapshot, position)
        else:
            self._write(snapshot, position)
            if self._evaluates and not _is_between(snapshot.header):
                self._look_at(snapshot)

    def _write(self, snapshot: Snapshot, position: Position) -> None:
        if self._saving is not None and (not self._saving.interim or self._is_time(snapshot.header)):
            self._told.put(self._save(self._saving.path, snapshot, position))
            self._saved_at = time.monotonic()

    def _look_at(self, snapshot: Snapshot) -> None:
        """Evaluate a snapshot, and keep what a learning rate waits for."""
        with holding_averages(self._session.captured, snapshot.optimizer):
            found, reason = self._evaluate(snapshot.header)
        put_again(self._session.captured, snapshot)
        self._session.captured.settings.check()
        self.evaluations.append(found)
        self._told.put(found)
        if reason is not None:
            self._told.put(Stopping(reason))
        if self._session.waits and snapshot.header.ends_epoch:
            self.numbers.append(monitored(self._session.job, found.metrics))

    def _is_time(self, header: MicroBatch) -> bool:
        """Whether to write a checkpoint that is for an interruption only."""
        return not header.final and time.monotonic() - self._saved_at >= INTERIM_S

    def _evaluate(self, header: MicroBatch) -> tuple[Evaluated, str | None]:
        with self._session.captured.settings.suspended():
            return evaluate(self._session.job, self._session.captured.model, header.batch + 1, header.epoch)

    def _save(self, path: Path, snapshot: Snapshot, position: Position) -> Saved | NotSaved:
        """Write a checkpoint. One that cannot be written is told; the last of a run must be written."""
        session = self._session
        parameters, buffers = _whole(session.captured.model, snapshot)
        made = Checkpoint(
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
            store.save(path, made, _aliases(session.captured.model))
        except RunError as error:
            if snapshot.header.final:
                raise
            return NotSaved(str(path), error.got)
        return Saved(str(path), position.updates)


def _until(extent: Extent) -> Until:
    """Where a run ends, counted from the first update of all."""
    return Until(None if extent.batches is None else extent.start_batch + extent.batches, extent.epochs)


def _is_between(header: MicroBatch) -> bool:
    """Whether a snapshot is one within an epoch, which is saved and not evaluated."""
    return not (header.ends_epoch or header.final)


def put(captured: Captured, snapshot: Snapshot) -> None:
    """The snapshot's weights into the person's own model, as new memory: the old is where the session began.

    What no stage has, since nothing that the loss reads depends on it, stays as it is.
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


def put_again(captured: Captured, snapshot: Snapshot) -> None:
    """Take back what an evaluation has done to the weights: adapters that merge leave rounding in them.

    Raises:
        JobError: it has changed them, or buffers, by more than that, which training in plain PyTorch would go on with.
    """
    own, buffers = captured.parameters(), captured.buffers()
    for kind, held, kept in (("parameter", own, snapshot.parameters), ("buffer", buffers, snapshot.buffers)):
        for name, tensor in kept.items():
            if name in held and not _about(held[name].detach(), tensor):
                raise _moved_by_evaluate(f"{kind} {name!r}")
    for name, tensor in snapshot.parameters.items():
        if not torch.equal(own[name].data, tensor):
            captured.set_parameter(name, laid_out(own[name].data, tensor).clone())


def _about(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a tensor is what it was up to rounding; a cache that was made larger is another matter."""
    if now.shape != before.shape or now.dtype != before.dtype or torch.equal(now, before):
        return True
    if not (now.is_floating_point() or now.is_complex()):
        return False
    return torch.allclose(now, before, rtol=1e-2, atol=1e-2 * float(before.abs().nan_to_num().max()), equal_nan=True)


def _moved_by_evaluate(subject: str) -> JobError:
    return JobError(
        f"{subject}, changed by Job(evaluate=...)",
        got="other values behind the evaluation than before it",
        expected="an evaluation that leaves the model as it is: stages go on with their own, where plain PyTorch would "
        "go on with what it has left",
        remedy="Evaluate a copy (copy.deepcopy(model)), or put back what evaluate changes; a model in train() mode "
        "moves the statistics of its BatchNorm.",
    )


def averages(optimizer: Mapping[str, Mapping[str, Any]], *, moving: bool = True) -> dict[str, torch.Tensor]:
    """The weights to evaluate with, by parameter name, where they are not those that are trained.

    Args:
        optimizer: state by parameter name.
        moving: take moving averages, too, not only what the optimizer itself evaluates with.
    """
    keys = (EMA, EVALUATED) if moving else (EVALUATED,)
    return {name: state[key] for name, state in optimizer.items() for key in reversed(keys) if key in state}


@contextmanager
def holding_averages(captured: Captured, optimizer: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """The model with the weights to evaluate with, if there are such; what it had comes back."""
    own, found = captured.parameters(), averages(optimizer)
    before = {name: own[name].data for name in found}
    try:
        for name, average in found.items():
            captured.set_parameter(name, laid_out(before[name], average).clone())
        yield
    finally:
        for name, weight in before.items():
            captured.set_parameter(name, weight)


def evaluate(job: Job, model: torch.nn.Module, updates: int, epoch: int) -> tuple[Evaluated, str | None]:
    """Call the job's ``evaluate`` on its own model: what it says, and why the training is to end, if it says so.

    Args:
        job: the job.
        model: its model.
        updates: that its weights have seen.
        epoch: of the last of them.

    Raises:
        UserCodeError: it raises, or returns something else than numbers by name.
    """
    reason = None
    try:
        with DEFAULT_GENERATOR_LOCK, MODEL_LOCK, evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            assert job.evaluate is not None
            try:
                said: Mapping[str, float] | None = job.evaluate(model)  # None of one that prints
            except StopTraining as stop:
                said, reason = stop.metrics, stop.reason
            metrics = {_name(name): float(value) for name, value in (said or {}).items()}
    except Exception as error:  # the person's own code
        raise UserCodeError(
            f"Job(evaluate=...) after update {updates - 1}",
            got=f"{type(error).__name__}: {error}",
            expected="a dict of names to numbers",
            remedy="Correct the function; it gets the original module in eval mode.",
        ) from error
    return Evaluated(updates, epoch, metrics), reason


def monitored(job: Job, metrics: Mapping[str, float]) -> float:
    """The number that a learning rate waits for.

    Raises:
        UserCodeError: ``evaluate`` does not say it, or not which it is.
    """
    name = job.monitor if job.monitor is not None else next(iter(metrics)) if len(metrics) == 1 else "loss"
    if name in metrics:
        return metrics[name]
    raise UserCodeError(
        "Job(evaluate=...) beside a ReduceLROnPlateau scheduler",
        got=f"{', '.join(metrics) or 'no number'}",
        expected=f"a number called {name!r}, which the learning rate waits for"
        + ("" if job.monitor else ", or one number alone"),
        remedy='Name it: Job(monitor="accuracy"), for example; mode="max" in the scheduler where more is better.',
    )


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name {name!r} of type {type(name).__name__}, which is no text")
    return name


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in eval mode; every part gets its own mode back.

    ``eval()`` and ``train()`` are called as such: a model may do more in them, as adapters do that merge their weights.
    """
    training, modes = model.training, {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(training)
        for part, training in modes.items():
            part.training = training


def position_of(header: MicroBatch, epoch_starts: Mapping[int, int], extent: Extent) -> Position:
    """Where a run goes on that has made the update of ``header``.

    Args:
        header: the last micro-batch of that update.
        epoch_starts: epoch to the number of its first batch in this run.
        extent: where the run began.
    """
    first = epoch_starts.get(header.epoch, header.batch)
    skip = extent.skip if header.epoch == extent.start_epoch else 0
    used = 0 if header.ends_epoch else header.batch + 1 - first + skip
    return Position(header.batch + 1, header.g + 1, header.epoch + header.ends_epoch, used)


def _whole(model: torch.nn.Module, snapshot: Snapshot) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Every parameter and stored buffer of the model: the snapshot's, and the model's own where no stage has them."""
    parameters = {n: snapshot.parameters.get(n, p.detach()) for n, p in model.named_parameters()}
    stored = set(model.state_dict())
    return parameters, {n: snapshot.buffers.get(n, b) for n, b in model.named_buffers() if n in stored}


def _aliases(model: torch.nn.Module) -> dict[str, str]:
    """Other names of tied parameters and shared buffers."""
    first = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    stored = set(model.state_dict())
    return {n: first[id(t)] for n, t in every if first[id(t)] != n and n in stored}
