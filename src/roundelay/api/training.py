"""Train a job by its plan."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from roundelay.api.background import Background
from roundelay.api.gathering import Evaluated, Event, Gatherer, Notify, NotSaved, Saved, Snapshot, Updated
from roundelay.api.planning import capture, fitted
from roundelay.api.planning import plan as make_plan
from roundelay.api.threads import one_thread
from roundelay.errors import CheckpointError, RunError, UsageError, UserCodeError
from roundelay.frontend import DEFAULT_GENERATOR_LOCK, Captured
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.lower.check import programs_of
from roundelay.observe import checkpoint as store
from roundelay.observe.checkpoint import Checkpoint, Position
from roundelay.observe.files import present
from roundelay.runtime.handlers import Handler
from roundelay.runtime.launch import run
from roundelay.runtime.party import Party, attend
from roundelay.runtime.reader import Extent
from roundelay.runtime.report import Report
from roundelay.runtime.stage import Initial
from roundelay.runtime.worker import Task, Wrap, unchanged

ABANDON_S = 3.0
"""Seconds that a checkpoint being written, or an evaluation, gets to end when the run has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long to train: a number of updates, or up to an epoch; the job's own ``steps``, or one epoch, if neither."""

    steps: int | None = None
    epochs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A finished training.

    Args:
        plan: the plan that was run.
        updates: every update's loss.
        evaluations: what ``evaluate`` returned, in order.
        snapshot: the final state.
        samples_per_second: the first tenth left out.
        micro_losses: micro-batch to (loss, terms summed).
        events: worker to its instructions: [opcode, g, batch, version, distance, start_s, end_s, bytes sent, text].
        digests: (kind, stage, number) to a digest, if audited.
        workers: worker to its final account.
    """

    plan: Plan
    updates: tuple[Updated, ...]
    evaluations: tuple[Evaluated, ...]
    snapshot: Snapshot
    samples_per_second: float
    micro_losses: dict[int, tuple[float, float]] = field(hash=False)
    events: dict[int, list[list[Any]]] = field(hash=False)
    digests: dict[tuple[str, int, int], str] = field(hash=False)
    workers: dict[int, dict[str, Any]] = field(hash=False)


def train(
    job: Job,
    *,
    plan: Plan | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    resume: str | Path | None = None,
    save_to: str | Path | None = None,
) -> Trained:
    """Train; to follow a run while it lasts, use :class:`Session` and its ``notify``.

    Args:
        job: the job; its model has the trained weights afterwards.
        plan: by default one for two workers.
        steps: number of updates; the job's own number, or one epoch, if neither it nor ``epochs`` is given.
        epochs: number of epochs, those of a resumed checkpoint included.
        seed: of data order and of every random number in the model.
        resume: checkpoint to continue from, made with any number of stages.
        save_to: where to write a checkpoint after every epoch and at the end.

    Raises:
        UsageError: something given cannot be used.
        RunError: the run failed; the last checkpoint is whole.
    """
    captured = capture(job, seed=seed)
    chosen = plan or make_plan(job, captured=captured, seed=seed)
    start = None if resume is None else load_checkpoint(Path(resume), captured)
    session = Session(job, captured, chosen, seed, Length(steps=steps, epochs=epochs), start)
    return session.run(notify=lambda event: None, save_to=None if save_to is None else Path(save_to))


class Session:
    """One training from start to end.

    Args:
        job: the job.
        captured: its model.
        plan: the plan.
        seed: the run's seed.
        length: how long.
        start: checkpoint to start from.
    """

    def __init__(
        self, job: Job, captured: Captured, plan: Plan, seed: int, length: Length, start: Checkpoint | None = None
    ) -> None:
        self.job, self.captured, self.plan, self.seed, self.start = job, captured, plan, seed, start
        if start is not None and start.seed != seed:
            raise UsageError(
                "--seed beside --from",
                got=str(seed),
                expected=f"{start.seed}, with which the checkpoint was made, so that data and random numbers go on",
                remedy=f"Give --seed {start.seed}.",
            )
        self.partition = fitted(captured, plan)
        self.extent = extent(job, length, start)
        self.initial = _initial(captured, start)

    def run(
        self,
        *,
        notify: Notify,
        save_to: Path | None = None,
        audit: bool = False,
        handlers: Mapping[int, Mapping[str, Handler]] | None = None,
        wrap: Wrap | None = None,
        party: Party | None = None,
    ) -> Trained:
        """Train to the end; see :func:`train`.

        Args:
            notify: told of updates, evaluations and checkpoints.
            save_to: where checkpoints go.
            audit: collect digests of everything that is computed.
            handlers: worker to handlers of its own, to break a run on purpose.
            wrap: put around every endpoint, to delay messages on purpose.
            party: the processes that a launcher has started, if one has; this one leads them.
        """
        evaluations: list[Evaluated] = []
        snapshots: list[Snapshot] = []
        background, told = Background(), queue.SimpleQueue[Event]()

        def on_snapshot(snapshot: Snapshot) -> None:
            snapshots[:] = [snapshot]
            position = self._position(snapshot.header, gatherer)
            background.submit(lambda: keep(snapshot, position))

        def keep(snapshot: Snapshot, position: Position) -> None:
            self._put(snapshot)
            if save_to is not None:
                told.put(self._save(save_to, snapshot, position))
            if self.job.evaluate is not None and not audit:
                evaluations.append(self._evaluate(snapshot))
                told.put(evaluations[-1])

        def pass_on() -> None:
            while not told.empty():
                notify(told.get())

        def listen(report: Report) -> None:
            gatherer.take(report)
            background.check()
            pass_on()

        gatherer = Gatherer(self.plan.num_stages, notify, on_snapshot)
        task = self._task(audit, handlers or {})
        try:
            with one_thread():
                run(task, listen, wrap, party)
            background.finish()
        finally:
            background.abandon(ABANDON_S)
            pass_on()
        return Trained(
            plan=self.plan,
            updates=tuple(gatherer.updates),
            evaluations=tuple(evaluations),
            snapshot=snapshots[0],
            samples_per_second=gatherer.samples_per_second(),
            micro_losses=gatherer.micro_losses,
            events=dict(gatherer.events),
            digests=gatherer.digests,
            workers=gatherer.summaries,
        )

    def attend(self, party: Party) -> bool:
        """Run one worker of a party that another process leads; whether all went well here.

        Raises:
            WorkerLostError: the leader is gone.
        """
        with one_thread():
            return attend(self._task(False, {}), party, unchanged)

    def _task(self, audit: bool, handlers: Mapping[int, Mapping[str, Handler]]) -> Task:
        return Task(
            plan=self.plan,
            programs=programs_of(self.plan),
            partition=self.partition,
            captured=self.captured,
            job=self.job,
            seed=self.seed,
            extent=self.extent,
            initial=self.initial,
            audit=audit,
            handlers=handlers,
        )

    def _put(self, snapshot: Snapshot) -> None:
        """The newest weights into the person's own model, as new memory: the old is where the session began."""
        for name, parameter in self.captured.parameters().items():
            parameter.data = snapshot.parameters[name].clone()
        with torch.no_grad():
            for name, buffer in self.captured.buffers().items():
                buffer.copy_(snapshot.buffers.get(name, buffer))

    def _evaluate(self, snapshot: Snapshot) -> Evaluated:
        model = self.captured.model
        try:
            with evaluating(model), DEFAULT_GENERATOR_LOCK, torch.no_grad(), torch.random.fork_rng(devices=[]):
                assert self.job.evaluate is not None
                metrics = {name: float(value) for name, value in self.job.evaluate(model).items()}
        except Exception as error:  # the person's own code
            raise UserCodeError(
                f"Job(evaluate=...) after update {snapshot.header.batch}",
                got=f"{type(error).__name__}: {error}",
                expected="a dict of names to numbers",
                remedy="Correct the function; it gets the original module in eval mode.",
            ) from error
        return Evaluated(snapshot.header.batch + 1, snapshot.header.epoch, metrics)

    def _position(self, header: MicroBatch, gatherer: Gatherer) -> Position:
        """Where a run goes on that has made the update of ``header``."""
        first = gatherer.epoch_starts.get(header.epoch, header.batch)
        skip = self.extent.skip if header.epoch == self.extent.start_epoch else 0
        used = 0 if header.ends_epoch else header.batch + 1 - first + skip
        return Position(header.batch + 1, header.g + 1, header.epoch + header.ends_epoch, used)

    def _save(self, path: Path, snapshot: Snapshot, position: Position) -> Saved | NotSaved:
        """Write a checkpoint. One that cannot be written is told; the last of a run must be written."""
        try:
            store.save(path, self._checkpoint(snapshot, position), self._aliases())
        except RunError as error:
            if snapshot.header.final:
                raise
            return NotSaved(str(path), error.got)
        return Saved(str(path))

    def _checkpoint(self, snapshot: Snapshot, position: Position) -> Checkpoint:
        model = self.captured.model
        parameters = {n: p.detach().clone() for n, p in model.named_parameters()} | snapshot.parameters
        persistent = set(model.state_dict())
        buffers = {n: b.clone() for n, b in model.named_buffers() if n in persistent} | {
            n: b for n, b in snapshot.buffers.items() if n in persistent
        }
        return Checkpoint(
            parameters=parameters,
            buffers=buffers,
            optimizer=snapshot.optimizer,
            position=position,
            seed=self.seed,
            fingerprint=self.plan.model,
            rule=self.plan.rule,
            num_stages=self.plan.num_stages,
        )

    def _aliases(self) -> dict[str, str]:
        """Other names of tied parameters and shared buffers."""
        model = self.captured.model
        first = {id(t): n for n, t in [*model.named_parameters(), *model.named_buffers()]}
        every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        persistent = set(model.state_dict())
        return {n: first[id(t)] for n, t in every if first[id(t)] != n and n in persistent}


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """The model in eval mode; every part gets its own mode back."""
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def extent(job: Job, length: Length, start: Checkpoint | None) -> Extent:
    """From where to where to read the data.

    Raises:
        UsageError: the length is not positive, or the checkpoint is already there.
    """
    for name, value in (("steps", length.steps), ("epochs", length.epochs)):
        if value is not None and value < 1:
            raise UsageError(f"--{name}", got=str(value), expected="at least 1", remedy=f"Give a positive --{name}.")
    steps = length.steps if length.epochs is not None or length.steps is not None else job.steps
    at = Position(0, 0, 0, 0) if start is None else start.position
    epochs = length.epochs if length.epochs is not None else (at.epoch + 1 if steps is None else None)
    if epochs is not None and at.epoch >= epochs:
        raise UsageError(
            "--epochs",
            got=f"{epochs}, but the checkpoint has {at.epoch} behind it",
            expected="more epochs than the checkpoint has",
            remedy=f"Give --epochs {at.epoch + 1} or more, or --steps.",
        )
    return Extent(at.micro_batches, at.updates, at.epoch, at.batches_into_epoch, steps, epochs)


def _initial(captured: Captured, start: Checkpoint | None) -> Initial:
    if start is None:
        return Initial(
            {n: p.data for n, p in captured.parameters().items()},  # stages copy what they train
            {n: b.clone() for n, b in captured.buffers().items()},
            {},
            0,
        )
    buffers = {n: start.buffers.get(n, b).clone() for n, b in captured.buffers().items()}
    return Initial(start.parameters, buffers, start.optimizer, start.position.updates)


def load_checkpoint(path: Path, captured: Captured) -> Checkpoint:
    """A checkpoint, or that of a run folder, for this model.

    Raises:
        CheckpointError: it is missing, damaged, or of another model.
    """
    inner = path / "checkpoint"
    start = store.load(inner if present(inner).exists() else path)
    names = {n: tuple(p.shape) for n, p in captured.model.named_parameters()}
    saved = {n: tuple(t.shape) for n, t in start.parameters.items()}
    if names != saved:
        odd = next(n for n in [*names, *saved] if names.get(n) != saved.get(n))
        raise CheckpointError(
            f"checkpoint {path}, parameter {odd!r}",
            got=f"shape {saved.get(odd, 'none: it is missing')}",
            expected=f"shape {names.get(odd, 'none: the model has no such parameter')}",
            remedy="Continue with the job that the checkpoint was made by.",
        )
    captured.model.load_state_dict({**start.parameters, **start.buffers}, strict=False)
    return start
