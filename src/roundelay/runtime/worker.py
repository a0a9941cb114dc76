"""One worker: passes what its endpoint receives to its machine, and executes the instructions of the machine."""

from __future__ import annotations

import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch

from roundelay.actor.machine import Run
from roundelay.actor.machines import machine_for
from roundelay.errors import DeadlineError, InternalError, RoundelayError, UnfitMessageError, WorkerLostError
from roundelay.frontend.worker_model import WorkerModel
from roundelay.ir.exchange import ExchangePlan
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.program import EDGES, OPCODES, STATES, SUMS, Channel, Program
from roundelay.ir.stage import Edge, Partition, StageSpec
from roundelay.ir.work import Settings, Work
from roundelay.job import Job
from roundelay.observe.digest import digest
from roundelay.observe.process_memory import private_bytes, resident_bytes
from roundelay.runtime.action_recorder import ActionRecorder
from roundelay.runtime.boxing_parts import Boxing
from roundelay.runtime.device import HOST, Device
from roundelay.runtime.due_values import DueValues, due_values
from roundelay.runtime.grad_norm import GradNorms
from roundelay.runtime.handlers import HANDLERS, PASSED_OVER, Context, Handler, axis_of, pass_over
from roundelay.runtime.initial_state import Initial
from roundelay.runtime.links import Link, open_link
from roundelay.runtime.loading.batch_reader import read_micro_batches
from roundelay.runtime.loading.checkpoint_schedule import Extent, RunControl
from roundelay.runtime.loading.instruction_log import InstructionLog, kept_micro_batches
from roundelay.runtime.loading.prefetch import Registers
from roundelay.runtime.loss_scaler import LossScaler
from roundelay.runtime.processes.determinism import use_threads
from roundelay.runtime.processes.device_failure import RecentIntegers, has_failed, keep
from roundelay.runtime.processes.user_errors import out_of_memory, unexpected
from roundelay.runtime.processes.worker_messages import Report, Reporter, failure
from roundelay.runtime.shm_chained_sums import SumBlocks
from roundelay.runtime.stage_state import HELD, Stage
from roundelay.runtime.state_reports import StateReporter, StateUse
from roundelay.transport.endpoint import Arrived, Endpoint, Granted, Lost, Message

Loop = Generator[bool, None, None]
"""A worker as a generator: ``next`` runs it until it would wait, and yields whether a credit would unblock it.

It may be resumed in any thread, but only when something has arrived or the deadline has passed.
"""

Wrap = Callable[[Endpoint], Endpoint]
"""Wraps every endpoint of a run, for tests that delay messages."""


Prepare = Callable[[int], None]
"""What a forked worker, whose number is the argument, does before it connects to the others."""


def unchanged(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint itself: the default wrap."""
    return endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(ABC):
    """What launching must know of what it launches, the same for all workers: a run, or measurements of its parts.

    Args:
        works: what each worker is sent.
        audit: whether to report a digest of everything that is computed.
        prepare: what every forked worker does first.
    """

    works: tuple[Work, ...]
    audit: bool = False
    prepare: Prepare | None = None

    @property
    def settings(self) -> Settings:
        """What all workers have in common."""
        return self.works[0].settings

    def recent_integers(self) -> RecentIntegers | None:
        """Where the devices of a run keep the integers of micro-batches, if they do."""
        return None

    @abstractmethod
    def loop(self, worker: int, endpoint: Endpoint, report: Reporter, device: Device) -> Loop:
        """What a worker does, to its last report, ``finished``; arguments as of :func:`work`."""


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


@dataclass(slots=True)
class _Progress:
    """Time, updates and intra-op threads of one worker so far."""

    started: float
    busy_s: float = 0.0
    updates: int = 0
    threads: int = 0  # intra-op threads with which the last update was computed
    reported: float = 0.0


def work(task: Workload, worker: int, endpoint: Endpoint, report: Reporter, device: Device = HOST) -> None:
    """Run one worker to its end.

    Args:
        task: what all do.
        worker: its number.
        endpoint: its end of the transport.
        report: called with losses, progress, states and its end. An error is reported as ``failed`` and not raised.
        device: where it computes.
    """
    for _ in working(task, worker, endpoint, report, device):
        pass


def working(task: Workload, worker: int, endpoint: Endpoint, report: Reporter, device: Device = HOST) -> Loop:
    """:func:`work` as a generator. If the endpoint blocks, it may be resumed at any time."""
    try:
        with device.active():
            yield from task.loop(worker, endpoint, report, device)
        endpoint.close()
    except RoundelayError as error:
        _fail(error, worker, endpoint, report)
    except MemoryError as error:
        _fail(out_of_memory(f"worker {worker}", error), worker, endpoint, report)
    except GeneratorExit:  # closed: the run is over
        raise
    except BaseException as error:  # every end of a worker must be reported
        _fail(unexpected(f"worker {worker}", error), worker, endpoint, report)


def _fail(error: RoundelayError, worker: int, endpoint: Endpoint, report: Reporter) -> None:
    trace = "".join(traceback.format_exception(error))
    report(failure(worker, endpoint.cause(error), trace))  # first: an abort may take a second
    endpoint.abort(f"worker {worker} failed")


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
        self.resident, self.thread = resident_bytes(), threading.get_native_id()
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
        self.progress = _Progress(time.perf_counter())
        self.log = InstructionLog(kept_micro_batches(max(len(work.program.body) for work in task.works)))
        self.digests: list[list[object]] = []

    def _context(self, number: int, program: Program) -> Context:
        """Create the context of the handlers of one stage."""
        task, settings, exchanges = self.task, self.work.settings, self.work.exchanges
        spec, first = task.partition.stages[number], (number, self.work.stage(number).holder) == (0, 0)
        scale = settings.loss_scale
        scaler = LossScaler(scale, task.initial.loss_scale) if scale.on else None
        norms = None
        if first and settings.needs_norm:
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
            partial(self._digest, number) if task.audit else None,
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
        self._report_events()
        self.states.finish(self.work.settings.deadline_s)
        self.report(Report("finished", self.worker, self._summary()))

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
        self.log.add((run, batch, start, end, sent))  # formatted at the end, when nobody waits for it
        if OPCODES[opcode].share != "data":
            self.progress.busy_s += end - start
        if opcode == "update":
            self._report_progress(run, end)
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

    def _digest(self, stage: int, kind: str, number: int, tensors: Mapping[str, object]) -> None:
        self.digests.append([kind, stage, self.work.stage(stage).holder, number, digest(tensors)])

    def _report_progress(self, run: Run, now: float) -> None:
        """Report the busy seconds after an update, at most ten times a second."""
        self.progress.updates += 1
        self.progress.threads = torch.get_num_threads()
        if now - self.progress.reported > 0.1:
            self.progress.reported = now
            data = {
                "busy_s": self.device.busy_s(self.progress.busy_s),
                "wall_s": now - self.progress.started,
                "update": run.version + 1,
            }
            self.report(Report("progress", self.worker, data))

    def _report_events(self) -> None:
        if self.digests:
            self.report(Report("digest", self.worker, {"digests": self.digests}))
        timed = self.device.spans(list(self.log.events), self.log.dropped)
        events = [event for event in timed if event[0].g >= self.log.first]
        for start in range(0, len(events), 4096):
            rows = [_row(*event) for event in events[start : start + 4096]]
            self.report(Report("events", self.worker, {"events": rows}))
        first, since = self.task.extent.start_batch, events[0][2]
        own = list(self.registers.loads)  # at once: the reader goes on
        if loads := [[first + n, start, end] for n, start, end in own if end >= since]:
            self.report(Report("loads", self.worker, {"loads": loads}))

    def _summary(self) -> dict[str, object]:
        return {
            "pid": os.getpid(),
            "thread": self.thread,
            "threads": self.progress.threads,
            "busy_s": self.device.busy_s(self.progress.busy_s),
            "wall_s": time.perf_counter() - self.progress.started,
            "updates": self.progress.updates,
            "first_event_g": self.log.first,
            "bytes_sent": {str(c): n for c, n in self.endpoint.bytes_sent.items()},
            "bytes_received": {str(c): n for c, n in self.endpoint.bytes_received.items()},
            "tape_bytes": {str(k): context.stage.tape_bytes() for k, context in self.contexts.items()},
            "owed_bytes": {str(k): context.stage.owed_bytes() for k, context in self.contexts.items()},
            "skipped": sum(context.skipped for context in self.contexts.values()),
            "held_bytes": {kind: sum(c.stage.held_bytes[kind] for c in self.contexts.values()) for kind in HELD},
            "device_peak_bytes": self.device.peak_bytes(),
            "private_bytes": private_bytes(),
            **{f"{when}_sums": self.states.sums.get(when) for when in ("start", "end")},
            **_resident(self.resident),
        }


def _in_flight(initial: Initial, work: Work) -> dict[int, int] | None:
    """Return micro-batch to version of the forwards to redo; None if the stages start empty."""
    flights = [initial.flight_of(own.stage, own.holder) for own in work.stages]
    resumed = [flight for flight in flights if flight is not None]
    return {g: version for flight in resumed for g, version in flight.versions.items()} if resumed else None


def _resident(before: tuple[int, int] | None) -> dict[str, object]:
    """Return the resident bytes of this process before its stages were built, and its peak."""
    after = resident_bytes()
    return {"rss_at_start_bytes": before and before[0], "peak_rss_bytes": after and after[1]}


def _row(run: Run, batch: int, start: float, end: float, sent: int) -> list[object]:
    """Return an event in the form in which it is reported."""
    line, weights = run.instruction, (run.reads, run.distance)
    channels = list(line.takes), list(line.gives)
    return [line.opcode, run.g, batch, *weights, start, end, sent, run.stage, line.of, *channels, str(run)]


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
