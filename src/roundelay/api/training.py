"""Train a job by its plan."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from roundelay.api.checkpointing import Checkpointer, Saving, averages, position_of
from roundelay.api.compile_stages import Compile, for_plan, stage_compiler
from roundelay.api.fidelity_precheck import check_known, checked_before
from roundelay.api.planning import captured_and_planned, fitted
from roundelay.api.resume import changed, computing_digest, initial, order_of, trained, values_digest
from roundelay.api.state_gather import (
    Drained,
    Evaluated,
    Event,
    Notify,
    Snapshot,
    StateGatherer,
    Stopping,
    Updated,
    samples_per_second,
)
from roundelay.api.statelessness import check_reused
from roundelay.api.stop_condition import Length, extent
from roundelay.api.torch_scope import one_thread
from roundelay.checkpoint import checkpoint as store
from roundelay.checkpoint.atomic_files import present
from roundelay.checkpoint.checkpoint import Checkpoint, Position
from roundelay.env import launched_as
from roundelay.errors import CheckpointError, UsageError, UserCodeError
from roundelay.frontend import Captured
from roundelay.ir.plan import EMA, EVALUATED, Plan
from roundelay.job import Job, StopTraining
from roundelay.lower.validate_plan import FORKING
from roundelay.lower.verify_schedule import programs_of
from roundelay.runtime.batch_reader import Extent, RunControl
from roundelay.runtime.device import check_here
from roundelay.runtime.forked_call import backwards_apart, check_transport, isolated
from roundelay.runtime.handlers import Handler
from roundelay.runtime.instruction_log import KEPT_MICRO_BATCHES
from roundelay.runtime.launch import run
from roundelay.runtime.loader_epoch import forget
from roundelay.runtime.rendezvous import ProcessGroup
from roundelay.runtime.stage_optimizer import RateTable, without_gradients
from roundelay.runtime.stage_optimizer_check import check_narrowing
from roundelay.runtime.stage_state import Initial
from roundelay.runtime.torchrun_worker import run_follower
from roundelay.runtime.worker import Prepare, Task, Wrap, unchanged
from roundelay.runtime.worker_messages import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A finished training.

    Args:
        plan: the plan that was run.
        updates: every update's loss.
        evaluations: what ``evaluate`` returned, in order.
        snapshot: the final state.
        samples_per_second: the first tenth left out.
        micro_losses: micro-batch to (loss, terms summed); of the last 8,192, as the trace.
        micro_metrics: micro-batch to the same of every metric beside the loss.
        micro_scales: micro-batch to what its loss was multiplied by; empty where losses are not scaled.
        events: worker to its instructions: [opcode, g, batch, version, distance, start_s, end_s, bytes sent, stage,
            text].
        loads: worker that reads to what its reader loaded meanwhile: [batch, start_s, end_s].
        digests: (kind, stage, number) to a digest, if audited.
        workers: worker to its final account.
        stopped: why ``evaluate`` or ``on_update`` had it end early; empty if neither did.
        numbers: what evaluations have said that learning rates wait for, one for each epoch from the first of all.
        check: how the captured job was held to plain PyTorch before, in one line; empty if it was not.
    """

    plan: Plan
    updates: tuple[Updated, ...]
    evaluations: tuple[Evaluated, ...]
    snapshot: Snapshot
    samples_per_second: float
    micro_losses: dict[int, tuple[float, float]] = field(hash=False)
    micro_metrics: dict[int, dict[str, tuple[float, float]]] = field(hash=False)
    micro_scales: dict[int, float] = field(hash=False)
    events: dict[int, list[list[Any]]] = field(hash=False)
    loads: dict[int, list[list[Any]]] = field(hash=False)
    digests: dict[tuple[str, int, int], str] = field(hash=False)
    workers: dict[int, dict[str, Any]] = field(hash=False)
    stopped: str = ""
    numbers: tuple[float, ...] = ()
    check: str = ""

    def __repr__(self) -> str:
        losses = f"{self.updates[0].loss:.4f} -> {self.updates[-1].loss:.4f}" if self.updates else "none"
        return (
            f"Trained(rule={self.plan.rule!r}, workers={self.plan.num_workers}, updates={len(self.updates)}, "
            f"loss: {losses}, samples_per_second={self.samples_per_second:.1f})"
        )


def train(  # noqa: PLR0913  as many parameters as the command has options
    job: Job,
    *,
    plan: Plan | None = None,
    workers: int | None = None,
    rule: str | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    resume: str | Path | None = None,
    save_to: str | Path | None = None,
    checkpoint_every: int | None = None,
    on_update: Callable[[Updated], None] | None = None,
    check: str | None = None,
    **choices: Any,
) -> Trained:
    """Train by a plan, or plan and train.

    Args:
        job: the job; its model has the trained weights afterwards.
        plan: what to run; if it is not given, one is made, as :func:`roundelay.plan` makes it of the choices below.
        workers: D; by default one per core, at most two, and no more than the model can be cut for.
        rule: update rule; ``pipeoptim`` by default.
        steps: number of updates. If neither it nor ``epochs`` is given: what the interrupted run lacks that ``resume``
            is a checkpoint of; else the job's own number, or one epoch.
        epochs: number of epochs, those of a resumed checkpoint included.
        seed: of data order and of every random number in the model.
        resume: checkpoint to continue from. With the plan that it was made by, the run goes on as if it had not been
            interrupted; with any other it starts with empty stages.
        save_to: where to write a checkpoint after every epoch and at the end.
        checkpoint_every: also after every so many updates, without draining the stages.
        on_update: called once per update, in their order, in the caller's thread. The training does not wait for it: a
            slow one is told late. One that raises ends the training; the last checkpoint is whole. One that raises
            :class:`roundelay.StopTraining` ends it in good order, soon after.
        check: ``full`` first trains the captured job and plain PyTorch over two updates, in processes of their own, and
            refuses a job that differs; ``quick`` relies on what capture has seen, ``off`` says nothing of it. By
            default the full one where it is expected to take less than five seconds and a quarter of the free memory.
        choices: whatever else :func:`roundelay.plan` takes: ``cuts``, ``micro_batches``, ``predictor``, ``backward``,
            ``recompute``, ``compile``, ``precision``, ``loss_scale``, ``clip``, ``ema``, ``transport``,
            ``deadline_s``, ``devices``.

    Raises:
        TypeError: a choice is unknown.
        UsageError: something given cannot be used, or a plan was given beside a choice.
        FidelityError: the captured job trains otherwise than plain PyTorch.
        UserCodeError: ``on_update`` raises, or other code of the person's does on a worker.
        RunError: the run failed; the last checkpoint is whole.
    """
    if checkpoint_every is not None and (checkpoint_every < 1 or save_to is None):
        raise UsageError(
            "checkpoint_every",
            got=str(checkpoint_every) if checkpoint_every < 1 else "nowhere to write a checkpoint",
            expected="a positive number of updates, and save_to",
            remedy="Give both, or leave checkpoint_every out.",
        )
    check_known(check)
    if (one := launched_as()) is not None:
        warnings.warn(
            f"this process is {one} of a launcher's, and roundelay.train() trains the whole job in each of them; "
            "`roundelay train JOB.py` under the launcher makes them the workers of one training",
            stacklevel=2,
        )
    captured, chosen = captured_and_planned(train, job, plan, seed, {"workers": workers, "rule": rule, **choices})
    start = None if resume is None else load_checkpoint(Path(resume), captured)
    session = Session(job, captured, chosen, seed, Length(steps=steps, epochs=epochs), start)
    saving = None if save_to is None else Saving(path=Path(save_to), every=checkpoint_every or 0)
    told = session.check(check)
    notify = _telling(on_update, captured.settings.check)
    return replace(session.run(notify=notify, saving=saving), check=told)


def _telling(on_update: Callable[[Updated], None] | None, check: Callable[[], None]) -> Notify:
    """Pass on the updates among the events, and say whose error it is if the person's function raises.

    Behind each ``check`` looks for what the function has changed that the stages would not notice.
    """

    def notify(event: Event) -> None:
        if on_update is None or not isinstance(event, Updated):
            return
        try:
            on_update(event)
        except StopTraining:
            raise
        except Exception as error:  # the person's own code
            raise UserCodeError(
                f"on_update at update {event.update}",
                got=f"{type(error).__name__}: {error}",
                expected="a function of one roundelay.Updated that returns",
                remedy="Correct the function; with save_to, the training goes on from its last checkpoint by resume.",
            ) from error
        check()

    return notify


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a run, which starts with empty stages unless it is the first."""

    initial: Initial
    extent: Extent


def _rest(whole: Extent, at: Position) -> Extent:
    """What is left of a run that has come to an epoch's end."""
    left = None if whole.batches is None else whole.batches - (at.updates - whole.start_batch)
    return replace(whole, start_g=at.micro_batches, start_batch=at.updates, start_epoch=at.epoch, skip=0, batches=left)


def check_optimizer(start: Checkpoint, kinds: Sequence[str]) -> None:
    """Refuse to go on with another optimizer than the one whose state a checkpoint has.

    Args:
        start: the checkpoint.
        kinds: names of the classes that the job's optimizer is of, its own first.

    Raises:
        CheckpointError: naming both.
    """
    was = start.optimizer_kind
    entries = sorted({key for state in start.optimizer.values() for key in state} - {EMA, EVALUATED})
    if not was or was in kinds or not entries:
        return
    raise CheckpointError(
        "the optimizer that the run goes on with",
        got=f"{kinds[0]}, beside a checkpoint of {was}, with {', '.join(entries)} of every parameter",
        expected=f"{was}: its state means nothing to another optimizer",
        remedy=f"Go on with {was}; or begin a new run with the weights alone: leave --from out, and call "
        "roundelay.load(model, RUN) in job().",
    )


def check_alone(party: ProcessGroup | None) -> None:
    """Refuse a learning rate that waits for evaluations where the workers are a launcher's, which meet once.

    Raises:
        UsageError: they are.
    """
    if party is not None:
        raise UsageError(
            "a ReduceLROnPlateau scheduler under a launcher",
            got=f"{party.size} processes of a launcher, which start together once",
            expected="workers that start anew with every epoch's learning rate",
            remedy="Use --transport shm or memory on one host, or a scheduler that needs no number.",
        )


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
        self.job, self.plan, self.seed, self.start = job, plan, seed, start
        self.control = RunControl()
        #: why ``evaluate`` or ``on_update`` has had the run end early, if one has
        self.stopped = ""
        self.captured = for_plan(captured, plan)
        if start is not None and start.seed != seed:
            raise UsageError(
                "--seed beside --from",
                got=str(seed),
                expected=f"{start.seed}, with which the checkpoint was made, so that data and random numbers go on",
                remedy=f"Give --seed {start.seed}.",
            )
        self.partition = fitted(captured, plan)
        check_narrowing(
            job, list(captured.model.named_parameters()), [stage.parameters for stage in self.partition.stages]
        )
        if plan.transport == "memory":  # all stages run in this process; other processes look for themselves
            check_here(plan.devices)
        self.extent = extent(job, length, start)
        check_reused(job, captured, batches=self.extent.batches, epochs=self.extent.epochs)
        self.order = order_of(plan) | trained(captured)
        flight = None if start is None else start.flight
        reason = "" if flight is None else changed(flight, self.order)
        #: what is told if the stages start empty, though they were not when the checkpoint was made
        self.drained = Drained(flight.micro_batches, reason) if flight and flight.micro_batches and reason else None
        self.initial = initial(captured, start, None if reason or flight is None else flight.stages)
        #: whether an epoch's learning rate waits for what the evaluation of the one before says
        rates = self._rates(())
        self.waits, self.optimizer_kind = rates.waits, rates.kinds[0]
        if start is not None:
            check_optimizer(start, rates.kinds)
        self.computing = computing_digest(plan, self.order, rates, seed)
        #: updates that had been made when the stages were last empty
        self.since = self.initial.updates if reason or flight is None else flight.since

    def check(self, asked: str | None, party: ProcessGroup | None = None) -> str:
        """Hold the captured job to plain PyTorch before the run, as :func:`train` says; returns how, in one line.

        Raises:
            FidelityError: it trains otherwise.
        """
        with one_thread():
            return checked_before(
                self.job,
                self.captured,
                self.plan,
                self.partition,
                self.seed,
                self.extent,
                asked,
                launched=party is not None,
            )

    @property
    def began(self) -> str:
        """What the run began with and what it has computed by since, as two digests; empty if that was not one thing.

        See :attr:`roundelay.checkpoint.checkpoint.Checkpoint.began`.
        """
        if not self.computing:
            return ""
        if self.start is not None:
            return self.start.began if self.start.began.endswith("/" + self.computing) else ""
        values = values_digest({**self.initial.parameters, **self.initial.buffers})
        return f"{values}/{self.computing}" if values else ""

    def run(
        self,
        *,
        notify: Notify,
        saving: Saving | None = None,
        audit: bool = False,
        handlers: Mapping[int, Mapping[str, Handler]] | None = None,
        wrap: Wrap | None = None,
        party: ProcessGroup | None = None,
    ) -> Trained:
        """Train to the end; see :func:`train`.

        Args:
            notify: told of updates, evaluations and checkpoints.
            saving: where checkpoints go, if anywhere.
            audit: collect digests of everything that is computed.
            handlers: stage to handlers of its own, to break a run on purpose.
            wrap: put around every endpoint, to delay messages on purpose.
            party: the processes that a launcher has started, if one has; this one leads them.
        """
        if party is None:
            check_transport(self.plan.transport)
        prepare = self._compile(party)
        notify = self._ending_early(notify)
        self.extent = replace(self.extent, save_every=None if saving is None else saving.every)
        keeper = Checkpointer(self, saving, evaluates=self.job.evaluate is not None and (self.waits or not audit))

        def listen(report: Report) -> None:
            gatherer.take(report)
            keeper.pass_on(notify)

        kept = sys.maxsize if audit else KEPT_MICRO_BATCHES
        gatherer = StateGatherer(
            self.plan.num_stages, self.plan.num_workers, notify, keeper.keep, self._rates(()).at, kept
        )
        if self.drained is not None:
            notify(self.drained)
        try:
            with one_thread():
                for part in self._parts(keeper, gatherer, party):
                    run(self._task(part, audit, handlers or {}, prepare), listen, wrap, party)
            last = keeper.finish()
            for name, weight in averages(last.optimizer, moving=False).items():  # as plain PyTorch leaves the model
                self.captured.laid(name, weight.clone())
        finally:
            keeper.leave(notify)
            forget(self.job.batches)  # what a forked worker has read on from is no other's
        return Trained(
            plan=self.plan,
            updates=tuple(gatherer.updates),
            evaluations=tuple(keeper.evaluations),
            snapshot=last,
            samples_per_second=samples_per_second(gatherer.updates),
            micro_losses=gatherer.micro_losses,
            micro_metrics=gatherer.micro_metrics,
            micro_scales=gatherer.micro_scales,
            events=dict(gatherer.events),
            loads=gatherer.loads,
            digests=gatherer.digests,
            workers=gatherer.summaries,
            stopped=self.stopped,
            numbers=tuple(keeper.numbers),
        )

    def _rates(self, numbers: Sequence[float]) -> RateTable:
        named = without_gradients(self.captured.model)
        return RateTable(self.job.optimizer, self.job.scheduler, named, numbers)

    def _parts(self, keeper: Checkpointer, gatherer: StateGatherer, party: ProcessGroup | None) -> Iterator[Part]:
        """The run's parts: one; or an epoch each where the next one's learning rate waits for its evaluation."""
        part, whole = Part(self.initial, self.extent), self.extent
        if not self.waits:
            yield part
            return
        check_alone(party)
        while True:
            gatherer.rates = self._rates(part.initial.numbers).at
            yield Part(part.initial, replace(part.extent, epochs=part.extent.start_epoch + 1))
            last = keeper.settle()
            at = position_of(last.header, gatherer.epoch_starts, whole)
            if self.control.ending or at.epoch == whole.epochs or at.updates - whole.start_batch == whole.batches:
                return
            self.since = at.updates
            part = Part(self._initial_at(last, tuple(keeper.numbers)), _rest(whole, at))

    def _initial_at(self, last: Snapshot, numbers: tuple[float, ...]) -> Initial:
        """Where the stages start again, empty, with a snapshot's state."""
        return Initial(
            {**self.initial.parameters, **last.parameters},
            {**self.initial.buffers, **last.buffers},
            last.optimizer,
            last.header.batch + 1,
            None,
            last.loss_scale,
            numbers,
        )

    def _ending_early(self, notify: Notify) -> Notify:
        """Pass events on, and have the run end soon where the person's code asks for it."""

        def end(reason: str) -> None:
            self.stopped = self.stopped or reason
            self.control.end_soon()

        def passed_on(event: Event) -> None:
            if isinstance(event, Stopping):
                end(event.reason)
            try:
                notify(event)
            except StopTraining as stop:
                end(stop.reason)
                notify(Stopping(stop.reason))

        return passed_on

    def run_follower(self, party: ProcessGroup) -> bool:
        """Run one worker of a party that another process leads; whether all went well here.

        Raises:
            WorkerLostError: the leader is gone.
        """
        if self.waits:
            check_alone(party)
        self._compile(party)
        with one_thread():
            return run_follower(self._task(Part(self.initial, self.extent), False, {}, None), party, unchanged)

    def compile(self) -> None:
        """Compile all stages in this process, if the plan says so."""
        if self.plan.compile:
            self._compiler()(range(self.plan.num_stages))

    def _compiler(self) -> Compile:
        return stage_compiler(self.job, self.captured, self.plan, self.partition, self.seed)

    def _compile(self, party: ProcessGroup | None) -> Prepare | None:
        """Compile what runs in this process, or in forks of it; what these must do themselves, if anything.

        A party goes on when all its members have compiled.
        """
        if not self.plan.compile:
            return None
        compiler, mine = self._compiler(), self.plan.worker_stages
        if party is not None:
            compiler(mine[party.rank])
            party.gather("compiled")
        elif self.plan.transport in FORKING and backwards_apart():
            isolated(lambda: compiler(range(self.plan.num_stages)), "compiling the stages")
            return lambda worker: compiler(mine[worker])
        else:
            compiler(range(self.plan.num_stages))
        return None

    def _task(
        self, part: Part, audit: bool, handlers: Mapping[int, Mapping[str, Handler]], prepare: Prepare | None
    ) -> Task:
        return Task(
            plan=self.plan,
            programs=programs_of(self.plan),
            partition=self.partition,
            captured=self.captured,
            job=self.job,
            seed=self.seed,
            extent=part.extent,
            initial=part.initial,
            audit=audit,
            handlers=handlers,
            prepare=prepare,
            control=self.control,
        )


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
    try:
        captured.model.load_state_dict({**start.parameters, **start.buffers}, strict=False)
    except Exception as error:  # a buffer of another size, or the person's own hook
        raise CheckpointError(
            f"checkpoint {path}",
            got=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            expected="tensors that the model's load_state_dict takes",
            remedy="Continue with the job that the checkpoint was made by.",
        ) from error
    return start
