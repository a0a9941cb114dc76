"""`Session`: one training from start to end."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from roundelay.checkpoint.checkpoint import Checkpoint, Position
from roundelay.errors import UsageError
from roundelay.frontend import Captured
from roundelay.guards.examine import examine_run
from roundelay.ir.plan import Plan
from roundelay.job import Job, Peekable, StopTraining
from roundelay.launching.forked_call import check_transport, isolated, must_isolate_backward
from roundelay.launching.launch import run
from roundelay.launching.launched_worker import run_follower
from roundelay.launching.process_group import ProcessGroup
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.lower.work import works_of
from roundelay.observe.progress_lines import RunLength
from roundelay.planning.compile_stages import Compile, for_plan, stage_compiler
from roundelay.planning.planning import fitted
from roundelay.runtime.device import check_devices_exist
from roundelay.runtime.handlers import Handler
from roundelay.runtime.initial_state import Initial
from roundelay.runtime.loading.checkpoint_schedule import Extent, RunControl
from roundelay.runtime.loading.instruction_log import KEPT_MICRO_BATCHES
from roundelay.runtime.loading.loader_epoch import forget
from roundelay.runtime.optimizer.stage_optimizer import RateTable, without_gradients
from roundelay.runtime.processes.determinism import deterministic
from roundelay.runtime.processes.worker_messages import Report
from roundelay.runtime.state_reports import Gathered, StateUse
from roundelay.runtime.worker import Task
from roundelay.runtime.workload import Prepare, Wrap, unchanged
from roundelay.session.checkpointing import Checkpointer, Saving, averages, position_of
from roundelay.session.events import Drained, Event, Observer, Stopping, ignore, samples_per_second
from roundelay.session.launched_states import announced_use, check_leader_reads, fetched_use
from roundelay.session.resume import (
    changed,
    check_optimizer,
    computing_digest,
    initial,
    order_of,
    reads_older,
    values_digest,
)
from roundelay.session.run_record import RunRecord, Trained
from roundelay.session.state_gather import Snapshot, StateGatherer
from roundelay.session.stop_condition import Length, extent
from roundelay.session.trace_files import heads_of


@dataclass(frozen=True, slots=True)
class RunPart:
    """A part of a run; all parts but the first start with empty stages."""

    initial: Initial
    extent: Extent


def _rest(whole: Extent, at: Position, replicas: int) -> Extent:
    """The rest of a run after an epoch's end."""
    left = None if whole.batches is None else whole.batches - (at.updates - whole.start_batch)
    g = at.micro_batches // replicas
    return replace(whole, start_g=g, start_batch=at.updates, start_epoch=at.epoch, skip=0, batches=left)


def check_not_launched(process_group: ProcessGroup | None) -> None:
    """Refuse a learning rate that depends on evaluations under a launcher, whose processes start together only once.

    Raises:
        UsageError: a launcher has started the workers.
    """
    if process_group is not None:
        raise UsageError(
            "a ReduceLROnPlateau scheduler under a launcher",
            got=f"{process_group.size} processes of a launcher, which start together only once",
            expected="workers that are restarted with every epoch's learning rate",
            remedy="Use --transport shm or memory on one host, or a scheduler that needs no metric.",
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
        #: why ``evaluate`` or ``on_update`` ended the run early, if one did
        self.stopped = ""
        self.captured = for_plan(captured, plan)
        if start is not None and start.seed != seed:
            raise UsageError(
                "--seed with --from",
                got=str(seed),
                expected=f"{start.seed}, the checkpoint's seed, so that data and random numbers continue",
                remedy=f"Give --seed {start.seed}.",
            )
        self.partition = fitted(self.captured, plan)
        self.reading = read(plan)
        #: one for each worker; changed only to break a run on purpose
        self.programs = emit(self.reading)
        if self.reading.transport.workers == "threads":  # other processes check for themselves
            check_devices_exist(plan.devices)
        self.extent = extent(job, length, start, plan)
        examine_run(job, self.captured, plan, self.partition, batches=self.extent.batches, epochs=self.extent.epochs)
        self.order = order_of(plan, captured)
        flight = None if start is None else start.flight
        reason = "" if flight is None else changed(flight, self.order)
        #: the event to report if the stages start empty although the checkpoint has micro-batches in flight
        lost = reason and flight is not None and (flight.micro_batches or flight.older_weights)
        self.drained = Drained(flight.micro_batches, reason) if lost and flight is not None else None
        if start is not None and flight is None and reads_older(plan):
            self.drained = Drained(0, "the run that wrote it had ended, and its stages with it")
        self.initial = initial(captured, start, None if reason or flight is None else flight.stages)
        #: whether an epoch's learning rate depends on the evaluation of the epoch before
        rates = self._rates(())
        self.waits, self.optimizer_kind = rates.waits, rates.kinds[0]
        if self.waits and self.reading.free:
            raise UsageError(
                f"a ReduceLROnPlateau scheduler with rule {plan.rule!r}",
                got="stages that would have to empty after every epoch",
                expected="a scheduler that needs no metric: the stages of this rule never empty",
                remedy="Use another scheduler, or a rule such as 1f1b.",
            )
        if start is not None:
            check_optimizer(start, rates.kinds)
        self.computing = computing_digest(plan, self.order, rates, seed)
        #: number of updates made when the stages were last empty
        self.since = self.initial.updates if reason or flight is None else flight.since

    def run_length(self) -> RunLength:
        """How many updates the run has, as far as is known."""
        own, batches = self.extent, self.job.loader
        per_epoch = batches.length if isinstance(batches, Peekable) else None
        epochs = None if own.epochs is None else own.epochs - own.start_epoch
        return RunLength(own.start_batch, own.batches, epochs, per_epoch, own.skip)

    @property
    def began(self) -> str:
        """Two digests: of the initial values, and of all that has determined updates since; empty if that has changed.

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
        notify: Observer = ignore,
        saving: Saving | None = None,
        audit: bool = False,
        handlers: Mapping[int, Mapping[str, Handler]] | None = None,
        wrap: Wrap | None = None,
        process_group: ProcessGroup | None = None,
        gathers: Gathered = "everything",
    ) -> Trained:
        """Train to the end.

        Args:
            notify: called with every event, in the caller's thread.
            saving: where checkpoints are written, if anywhere.
            audit: collect digests of everything that is computed.
            handlers: stage to its own handlers, to break a run on purpose.
            wrap: wraps every endpoint, to delay messages on purpose.
            process_group: the launcher's processes, if one has started this process; this one leads them. If audited,
                they wait for :meth:`ProcessGroup.conclude`.
            gathers: what of the stages' state is gathered in this process at the end, at least; with ``"nothing"`` the
                model keeps its initial weights, unless the job evaluates it.
        """
        if process_group is None:
            check_transport(self.plan.transport)
        else:
            check_leader_reads(self.plan)
        prepare = self._compile(process_group)
        self.control.end_save()  # one that a failed attempt has left unfinished
        notify = self._stopping_on_request(notify)
        self.extent = replace(self.extent, save_every=None if saving is None else saving.every)
        checkpointer = Checkpointer(self, saving, evaluates=self.job.evaluate is not None and (self.waits or not audit))
        use = checkpointer.use(gathers=gathers)
        record = RunRecord(
            self.plan.num_workers,
            notify,
            self._rates(()).at,
            sys.maxsize if audit else KEPT_MICRO_BATCHES,
            self.extent.start_batch,
            heads_of(self.plan, self.seed, (self.extent.start_g, self.extent.start_batch)) if self.reading.free else {},
        )
        shapes = self.captured.parameters()
        gatherer = StateGatherer(
            self.reading.updaters,
            {name: tuple(shapes[name].shape) for stage in self.partition.stages for name in stage.parameters},
            lambda snapshot, parts: checkpointer.keep(snapshot, parts, record.epoch_starts),
            compares=audit,
            trusting=process_group is None or process_group.trusting,
        )

        def take(report: Report) -> None:
            (gatherer if report.kind == "state" else record).take(report)
            checkpointer.deliver(notify)

        if self.drained is not None:
            notify(self.drained)
        try:
            exact = deterministic(self.plan.deterministic, threads=self.plan.threads)
            with exact, announced_use(process_group, use, self.extent.save_every):
                for part in self._parts(checkpointer, record, process_group):
                    run(self._task(part, use, prepare, audit=audit, handlers=handlers or {}), take, wrap, process_group)
            last = checkpointer.finish()
            # as plain PyTorch leaves the model
            for name, weight in averages(last.optimizer, moving=False).items():
                self.captured.set_parameter(name, weight.clone())
        finally:
            checkpointer.close(notify)
            forget(self.job.loader)  # a loader that a forked worker has read from cannot be continued here
        return self._trained(record, checkpointer, last)

    def _trained(self, record: RunRecord, checkpointer: Checkpointer, last: Snapshot) -> Trained:
        return Trained(
            plan=self.plan,
            updates=tuple(record.updates),
            evaluations=tuple(checkpointer.evaluations),
            snapshot=last,
            samples_per_second=samples_per_second(record.updates),
            micro_losses=record.losses,
            micro_metrics=record.metrics,
            micro_scales=record.scales,
            events=dict(record.events),
            loads=dict(record.loads),
            digests=record.digests,
            workers=record.workers,
            stopped=self.stopped,
            numbers=tuple(checkpointer.numbers),
            actions=record.actions,
        )

    def _rates(self, numbers: Sequence[float]) -> RateTable:
        named = without_gradients(self.captured.model)
        return RateTable(self.job.optimizer, self.job.scheduler, named, numbers)

    def _parts(
        self, checkpointer: Checkpointer, record: RunRecord, process_group: ProcessGroup | None
    ) -> Iterator[RunPart]:
        """The parts of the run: one; or one per epoch where the next epoch's learning rate depends on an evaluation."""
        part, whole = RunPart(self.initial, self.extent), self.extent
        if not self.waits:
            yield part
            return
        check_not_launched(process_group)
        while True:
            record.rates = self._rates(part.initial.numbers).at
            yield RunPart(part.initial, replace(part.extent, epochs=part.extent.start_epoch + 1))
            last = checkpointer.settle()
            at = position_of(last.header, record.epoch_starts, whole)
            if self.control.ending or at.epoch == whole.epochs or at.updates - whole.start_batch == whole.batches:
                return
            self.since = at.updates
            part = RunPart(self._initial_at(last, tuple(checkpointer.numbers)), _rest(whole, at, self.plan.replicas))

    def _initial_at(self, last: Snapshot, numbers: tuple[float, ...]) -> Initial:
        """The initial state of stages that start empty from a snapshot."""
        return Initial(
            {**self.initial.parameters, **last.parameters},
            {**self.initial.buffers, **last.buffers},
            last.optimizer,
            last.header.batch + 1,
            None,
            last.loss_scale,
            numbers,
            last.replica_buffers,
        )

    def _stopping_on_request(self, notify: Observer) -> Observer:
        """Pass events on; end the run soon where ``evaluate`` or an observer asks for it."""

        def end(reason: str) -> None:
            self.stopped = self.stopped or reason
            self.control.end_soon()

        def observe(event: Event) -> None:
            if isinstance(event, Stopping):
                end(event.reason)
            try:
                notify(event)
            except StopTraining as stop:
                end(stop.reason)
                with suppress(StopTraining):
                    notify(Stopping(stop.reason))

        return observe

    def run_follower(
        self,
        process_group: ProcessGroup,
        *,
        audit: bool = False,
        handlers: Mapping[int, Mapping[str, Handler]] = MappingProxyType({}),
    ) -> int:
        """Run one worker of a process group that another process leads; returns its exit code.

        Args:
            process_group: the launcher's processes.
            audit: collect digests, and wait for the exit code that the leader concludes.
            handlers: as of :meth:`run`.

        Raises:
            WorkerLostError: the leader is lost.
        """
        if self.waits:
            check_not_launched(process_group)
        check_leader_reads(self.plan)
        self._compile(process_group)
        use, save_every = fetched_use(process_group)  # published when all have compiled
        part = RunPart(self.initial, replace(self.extent, save_every=save_every))
        with deterministic(self.plan.deterministic, threads=self.plan.threads):
            task = self._task(part, use, None, audit=audit, handlers=handlers)
            return run_follower(task, process_group, unchanged)

    def compile(self) -> None:
        """Compile all stages in this process, if the plan asks for it."""
        if self.plan.compile:
            self._compiler()(range(self.plan.num_stages))

    def _compiler(self) -> Compile:
        return stage_compiler(self.job, self.captured, self.plan, self.partition, self.seed)

    def _compile(self, process_group: ProcessGroup | None) -> Prepare | None:
        """Compile what runs in this process or in forks of it; returns what the forks must still do, if anything.

        Processes of a launcher continue when all of them have compiled.
        """
        if not self.plan.compile:
            return None
        compiler, mine = self._compiler(), self.plan.worker_stages
        if process_group is not None:
            compiler(mine[process_group.rank])
            process_group.barrier("compiled")
        elif self.reading.transport.forks and must_isolate_backward():
            isolated(lambda: compiler(range(self.plan.num_stages)), "compiling the stages")
            return lambda worker: compiler(mine[worker])
        else:
            compiler(range(self.plan.num_stages))
        return None

    def _task(
        self,
        part: RunPart,
        use: StateUse,
        prepare: Prepare | None,
        *,
        audit: bool = False,
        handlers: Mapping[int, Mapping[str, Handler]] = MappingProxyType({}),
    ) -> Task:
        return Task(
            works=works_of(self.reading, self.programs),
            partition=self.partition,
            captured=self.captured,
            job=self.job,
            seed=self.seed,
            extent=part.extent,
            initial=part.initial,
            audit=audit,
            handlers=handlers,
            prepare=prepare,
            states=use,
            control=self.control,
        )
