"""Train a job by its plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roundelay.api.gathering import Evaluated, Gatherer, Notify, Snapshot, Updated
from roundelay.api.keeping import Keeper
from roundelay.api.planning import capture, fitted
from roundelay.api.planning import plan as make_plan
from roundelay.api.threads import one_thread
from roundelay.errors import CheckpointError, UsageError
from roundelay.frontend import Captured
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.lower.check import programs_of
from roundelay.observe import checkpoint as store
from roundelay.observe.checkpoint import Checkpoint, Position
from roundelay.observe.files import present
from roundelay.runtime.device import check_here
from roundelay.runtime.handlers import Handler
from roundelay.runtime.launch import run
from roundelay.runtime.party import Party, attend
from roundelay.runtime.reader import Extent
from roundelay.runtime.report import Report
from roundelay.runtime.stage import Initial
from roundelay.runtime.worker import Task, Wrap, unchanged


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
        if plan.transport == "memory":  # all stages run in this process; other processes look for themselves
            check_here(plan.devices)
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
        keeper = Keeper(self, save_to, evaluates=self.job.evaluate is not None and not audit)

        def listen(report: Report) -> None:
            gatherer.take(report)
            keeper.pass_on(notify)

        def on_snapshot(snapshot: Snapshot) -> None:
            keeper.keep(snapshot, gatherer.epoch_starts)

        gatherer = Gatherer(self.plan.num_stages, notify, on_snapshot)
        try:
            with one_thread():
                run(self._task(audit, handlers or {}), listen, wrap, party)
            last = keeper.finish()
        finally:
            keeper.leave(notify)
        return Trained(
            plan=self.plan,
            updates=tuple(gatherer.updates),
            evaluations=tuple(keeper.evaluations),
            snapshot=last,
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
