"""One worker: passes what its endpoint receives to its machine, and executes the instructions of the machine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from roundelay.actor.machine import Run
from roundelay.actor.machines import machine_for
from roundelay.errors import DeadlineError, InternalError, UnfitMessageError, WorkerLostError
from roundelay.frontend.worker_model import WorkerModel
from roundelay.ir.exchange import ExchangePlan
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.program import EDGES, STATES, SUMS, Channel, Program
from roundelay.ir.stage import Edge, Partition, StageSpec
from roundelay.ir.work import Work
from roundelay.job import Job
from roundelay.runtime.action_recorder import ActionRecorder
from roundelay.runtime.boxing_parts import Boxing
from roundelay.runtime.device import Device
from roundelay.runtime.due_values import DueValues, due_values
from roundelay.runtime.grad_norm import GradNorms
from roundelay.runtime.handlers import HANDLERS, PASSED_OVER, Context, Handler, axis_of, pass_over
from roundelay.runtime.initial_state import Initial
from roundelay.runtime.links import Link, open_link
from roundelay.runtime.loading.batch_reader import read_micro_batches
from roundelay.runtime.loading.checkpoint_schedule import Extent, RunControl
from roundelay.runtime.loading.instruction_log import kept_micro_batches
from roundelay.runtime.loading.prefetch import Registers
from roundelay.runtime.loss_scaler import LossScaler
from roundelay.runtime.processes.determinism import use_threads
from roundelay.runtime.processes.device_failure import RecentIntegers, has_failed, keep
from roundelay.runtime.processes.worker_messages import Reporter
from roundelay.runtime.shm_chained_sums import SumBlocks
from roundelay.runtime.stage_state import Stage
from roundelay.runtime.state_reports import StateReporter, StateUse
from roundelay.runtime.worker_reports import WorkerReports
from roundelay.runtime.workload import Loop, Workload
from roundelay.transport.endpoint import Arrived, Endpoint, Granted, Lost, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(Workload):
    """Everything a run needs, the same for all workers.

    Args:
        partition: its stages.
        captured: the model.
        job: the user's job.
        seed: seed of the run.
        extent: where the run starts and ends.
        initial: weights and states to start from.
        handlers: stage to handlers that replace those of :data:`HANDLERS`, by opcode.
        states: what the stages' states are needed for.
        control: lets the launcher request a checkpoint or the end of the run from the reader.
    """

    partition: Partition
    captured: WorkerModel
    job: Job
    seed: int
    extent: Extent
    initial: Initial
    handlers: Mapping[int, Mapping[str, Handler]]
    states: StateUse
    control: RunControl | None = None

    def recent_integers(self) -> RecentIntegers:
        """Those of the model."""
        return RecentIntegers(self.captured.graph)

    def loop(self, worker: int, endpoint: Endpoint, report: Reporter, device: Device) -> Loop:
        """Run one worker to the end of its program."""
        running = _Worker(self, worker, endpoint, report, device)
        try:
            yield from running.run()
        finally:
            if has_failed():
                keep(running)


class _Worker:
    """The loop of one worker."""

    def __init__(self, task: Task, worker: int, endpoint: Endpoint, report: Reporter, device: Device) -> None:
        self.task, self.worker, self.endpoint, self.report, self.device = task, worker, endpoint, report, device
        self.work = own = task.works[worker]
        program, settings = own.program, own.settings
        #: intra-op threads; set before every instruction, as those of workers in one process may share a thread
        self.threads = own.threads
        use_threads(self.threads)
        redone = _in_flight(task.initial, own)
        self.machine = machine_for(program, task.extent.start_g, task.extent.start_batch, redone)
        self.targets = {c.id: _own_stage(c, worker) for c in program.channels if c.read_by(worker)}
        self.states_from = {c.id for c in program.channels if c.kind in STATES}
        #: by stage, the memory that its holders share for sums, if they do
        self.sum_blocks = {
            of.stage: SumBlocks(memory, of.summed)
            for of in own.stages
            if of.sums >= 0 and (memory := endpoint.shared(of.sums)) is not None
        }
        self.due = self._due_values()
        self.links = {c.id: self._link(c) for c in program.channels}
        self.handlers = {
            stage: device.instrumented({**HANDLERS, **task.handlers.get(stage, {})}) for stage in program.stages
        }
        kept = kept_micro_batches(max(len(work.program.body) for work in task.works))
        self.reports = WorkerReports(worker, report, device, kept)
        self.registers = Registers(program.registers, settings.deadline_s)
        data = read_micro_batches(
            task.job.loader,
            task.seed,
            settings.micro_batches,
            task.extent,
            task.captured.values,
            replicas=settings.replicas,
            min_rows=task.captured.graph.min_rows,
            padded=program.over == "slots",
            registers=self.registers,
            control=task.control,
        )
        self.data = device.feed(data)
        self.states = StateReporter(worker, task.states, report)
        #: by number of the stage
        self.contexts = {stage: self._context(stage, program) for stage in program.stages}
        #: of stages whose order is free
        self.recorders = {
            k: ActionRecorder(worker, context.stage, report) for k, context in self.contexts.items() if program.free
        }
        self.reports.begin()

    def _context(self, number: int, program: Program) -> Context:
        """Create the context of the handlers of one stage."""
        task, settings, exchanges = self.task, self.work.settings, self.work.exchanges
        spec, holder = task.partition.stages[number], self.work.stage(number).holder
        scale = settings.loss_scale
        scaler = LossScaler(scale, task.initial.loss_scale) if scale.on else None
        norms = None
        if (number, holder) == (0, 0) and settings.needs_norm:
            norms = GradNorms(scaler, task.initial.flight_of(number))
        return Context(
            self.worker,
            self._stage(spec, program),
            task.seed,
            self.data,
            (*task.captured.graph.inputs, *task.captured.graph.batch),
            {channel: room for channel, link in self.links.items() if (room := link.room) is not None},
            {channel: axis_of(exchange) for channel, exchange in exchanges.items()},
            _boxings(task.captured, exchanges),
            frozenset(channel.id for channel in program.channels if channel.kind == "partial"),
            _edges(task.partition, program.channels),
            self.report,
            partial(self.reports.computed, number, holder) if task.audit else None,
            self.states,
            norms,
            scale.on,
            settings.awaits_norm,
        )

    def _stage(self, spec: StageSpec, program: Program) -> Stage:
        task, number = self.task, spec.stage
        stage = Stage(task.captured, spec, task.job, self.work, task.initial, self.device.torch_device)
        if self.work.stage(number).moves and number not in program.holds:
            stage.leave_state()
        return stage

    def _link(self, channel: Channel) -> Link:
        """This worker's end of a channel."""
        planned = self.work.exchanges.get(channel.id)
        blocks = self.sum_blocks.get(channel.sources[0].stage) if channel.kind in SUMS else None
        return open_link(channel, self.worker, self.endpoint, planned, self.deliver, self.machine.grant, blocks)

    def _due_values(self) -> DueValues:
        """What looks at messages, where workers may not know each other."""
        channels = self.work.program.channels
        if self.work.settings.transport != "grpc":
            return DueValues({}, {})
        return due_values(self.worker, _edges(self.task.partition, channels), channels, self.task.captured.layout)

    def run(self) -> Loop:
        """Run to the end of the program; then the loader's processes, if it has any, are ended."""
        with closing(self.data):
            yield from self.execute()

    def execute(self) -> Loop:
        """Execute the program and report its events; yields before it waits. After an abort nothing is reported."""
        machine, endpoint = self.machine, self.endpoint
        for context in self.contexts.values():
            self.states.note_sums("start", context.stage)
        while not machine.halted:
            if endpoint.aborted:
                return
            run = machine.fire()
            if run is not None:
                self.execute_instruction(run)
            elif not machine.halted:
                yield machine.wants_credit
                self.wait()
        for recorder in self.recorders.values():
            recorder.end()
        self.reports.tell_events(self.registers.loads, self.task.extent.start_batch)
        self.states.finish(self.work.settings.deadline_s)
        self.reports.finish(endpoint, self.contexts, self.states.sums)

    def execute_instruction(self, run: Run) -> None:
        """Execute an instruction, send its results and free the slots of the messages that it took."""
        opcode, context = run.instruction.opcode, self.contexts[run.stage]
        handler = self.handlers[run.stage][opcode]
        if run.header is not None and not run.header.rows and opcode in PASSED_OVER:
            handler = pass_over
        recorder = self.recorders.get(run.stage)
        if recorder is not None:
            recorder.begin(opcode)
        start = time.perf_counter()
        use_threads(self.threads)
        try:
            header = handler(context, run)
        except BaseException as error:  # also a loader that was cancelled
            explained = self.device.explain(error, f"stage {run.stage}, {opcode} of micro-batch {run.g}", run.g)
            if explained is error:
                raise
            raise explained from error
        end = time.perf_counter()
        self.machine.finish(header)
        sent = 0
        for channel, _ in run.gives:
            message = context.outbox.pop(channel)
            if channel in self.due.sent:
                self.due.sent[channel](message)
            sent += self.links[channel].give(message)
        for channel, _ in run.takes:
            self.links[channel].free(run.g)
        batch = (header or run.header or _UNKNOWN).batch
        self.reports.executed(run, batch, start, end, sent)
        if opcode == "update":
            self.reports.updated(run, end)
            if recorder is not None and run.header is not None and run.header.saved:
                recorder.take_digest()

    def deliver(self, message: Message) -> None:
        """Put a message into the inbox of the stage that reads it, and notify the machine."""
        g = message.header[0]
        channel = message.channel
        self.contexts[self.targets[channel]].inbox[channel, g] = message
        if channel in self.states_from:
            self.machine.arrive(channel, _UNKNOWN._replace(g=g, entry=message.header[1]))
        else:
            self.machine.arrive(channel, self.machine.header(g) or MicroBatch.of(message.header))

    def wait(self) -> None:
        """Wait until the endpoint receives something, and pass it to the machine.

        Raises:
            DeadlineError: nothing arrived in time.
            UnfitMessageError: a worker has sent what is no message, or does not fit the plan.
            WorkerLostError: a worker is lost.
        """
        machine, endpoint = self.machine, self.endpoint
        try:
            delivery = endpoint.receive(self.work.settings.deadline_s, machine.wants_credit)
        except DeadlineError as error:
            raise self._deadline_error() from error
        if type(delivery) is Arrived:
            self._arrived(delivery)
            for source, channel in endpoint.credits():
                self._granted(source, channel)
        elif type(delivery) is Granted:
            self._granted(*delivery)
        elif not endpoint.aborted:  # otherwise the run is over for this worker too
            raise _loss(delivery)

    def _arrived(self, delivery: Arrived) -> None:
        try:
            if (channel := delivery.message.channel) in self.due.came:
                self.due.came[channel](delivery.message)
            self.links[channel].arrived(delivery.source, delivery.message)
        except (InternalError, LookupError, TypeError, ValueError, AssertionError) as error:
            raise _misfit(delivery.source, f"a message on channel {delivery.message.channel}", error) from error

    def _granted(self, source: int, channel: int) -> None:
        try:
            self.machine.grant(channel, source)
        except (InternalError, LookupError) as error:
            raise _misfit(source, f"a credit of channel {channel}", error) from error

    def _deadline_error(self) -> DeadlineError:
        return DeadlineError(
            f"worker {self.worker}",
            got=f"silence for {self.work.settings.deadline_s:g} s while {self.machine.waits_for()}",
            expected="a message within the plan's deadline_s",
            remedy="Check what the other workers do; raise deadline_s if one instruction takes longer.",
        )


def _in_flight(initial: Initial, work: Work) -> dict[int, int] | None:
    """Return micro-batch to version of the forwards to redo; None if the stages start empty."""
    flights = [initial.flight_of(own.stage, own.holder) for own in work.stages]
    resumed = [flight for flight in flights if flight is not None]
    return {g: version for flight in resumed for g, version in flight.versions.items()} if resumed else None


def _loss(lost: Lost) -> WorkerLostError:
    if lost.unfit:
        return _unfit(lost.source, lost.reason)
    return WorkerLostError(
        f"worker {lost.source}",
        got=lost.reason,
        expected="a living worker",
        remedy="See its own message; continue with `roundelay train --from` the last checkpoint.",
    )


def _misfit(source: int, got: str, error: Exception) -> UnfitMessageError:
    return _unfit(source, f"it sent {got} that does not fit the plan ({type(error).__name__}: {error})")


def _unfit(source: int, got: str) -> UnfitMessageError:
    return UnfitMessageError(
        f"worker {source}",
        got=got,
        expected="what its plan has it send",
        remedy="Check that it runs the same version and plan; if it does, report this as a bug.",
    )


_UNKNOWN = MicroBatch(0, 0, 0, 1, 1, 1, 0, 0, 0)


def _own_stage(channel: Channel, worker: int) -> int:
    """The stage of this worker that takes from a channel."""
    return next(port.stage for port in channel.targets if port.worker == worker)


def _edges(partition: Partition, channels: Iterable[Channel]) -> dict[int, tuple[Channel, Edge]]:
    """Return the edge of every channel that carries values from one stage to another."""
    by_ends = {(edge.source, edge.target): edge for edge in partition.edges}
    edges = {}
    for channel in channels:
        if channel.kind in EDGES:
            ends = channel.sources[0].stage, channel.targets[0].stage
            edges[channel.id] = (channel, by_ends[ends if channel.kind == "forward" else ends[::-1]])
    return edges


def _boxings(captured: WorkerModel, exchanges: Mapping[int, ExchangePlan]) -> dict[int, Boxing]:
    """What is boxed within stages, by channel."""
    found = {}
    for channel, exchange in exchanges.items():
        if exchange.value:
            forward = exchange.kind == "boxed"
            source, target = captured.boxing(exchange.value, gradient=not forward)
            found[channel] = Boxing(exchange.value, forward, source, target)
    return found
