"""A worker that measures: it makes the steps of a sweep on its own end of the transport, sweep after sweep."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch

from roundelay.calibration.operators import BURSTS, operators
from roundelay.calibration.sweep import PHASES, Step, Sweep, shape_of
from roundelay.errors import WorkerLostError
from roundelay.ir.sbp import bounds
from roundelay.runtime.device import Device
from roundelay.runtime.links import open_link
from roundelay.runtime.processes.determinism import use_threads
from roundelay.runtime.processes.worker_messages import Report, Reporter
from roundelay.runtime.worker import Loop, Workload
from roundelay.transport.endpoint import Arrived, Endpoint, Lost, Message

Waiting = Generator[bool, None, Message]
"""What waits as a :data:`~roundelay.runtime.worker.Loop` does, for a message."""

REPEATED_BYTES, REPEATS, LEAST = 1 << 22, 16, 3
"""Bytes that a step sends in all, so often at most and at least."""

OPERATOR_S = 0.005
"""Seconds for which an operator is repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements(Workload):
    """Measures the steps of a sweep; each worker's last report has, by step, rows of seconds, one for each sweep.

    Args:
        sweep: the steps.
    """

    sweep: Sweep

    def loop(self, worker: int, endpoint: Endpoint, report: Reporter, device: Device) -> Loop:
        """Make all steps until there is no time left."""
        return _Worker(self, worker, endpoint, report, device).run()


class _Worker:
    def __init__(self, task: Measurements, worker: int, endpoint: Endpoint, report: Reporter, device: Device) -> None:
        self.worker, self.endpoint, self.report, self.device = worker, endpoint, report, device
        self.sweep = task.sweep
        self.work = own = task.works[worker]
        self.links = {
            c.id: open_link(c, worker, endpoint, own.exchanges.get(c.id), self.deliver, lambda *_: None)
            for c in own.program.channels
        }
        self.inbox: dict[tuple[int, int], Message] = {}
        self.given: Counter[int] = Counter()  # messages, by channel
        self.came: Counter[int] = Counter()
        self.operators = operators(self.sweep.effort)
        self.rows: defaultdict[int, list[list[float]]] = defaultdict(list)

    def run(self) -> Loop:
        use_threads(self.work.threads)
        began, sweeps, over = time.perf_counter(), 0, False
        while not over:
            for number, step in enumerate(self.sweep.steps):
                yield from self.in_step(0.0)
                yield from self.make(number, step)
            sweeps += 1
            spent = time.perf_counter() - began
            enough = sweeps >= self.sweep.effort.sweeps and spent >= self.sweep.effort.seconds
            if self.worker == 0:
                self.report(Report("progress", 0, {"sweeps": sweeps, "seconds": spent}))
            over = (yield from self.in_step(float(enough and self.worker == 0))) > 0
        rows = {str(number): of_step for number, of_step in self.rows.items()}
        self.report(Report("finished", self.worker, {"rows": rows}))

    def make(self, number: int, step: Step) -> Loop:
        """Make one step, if this worker takes part."""
        if step.what == "message" and self.worker in (0, step.group - 1):
            yield from self.message(number, step)
        elif step.what == "exchange" and self.worker < step.group:
            yield from self.exchange(number, step)
        elif step.what == "together" or self.worker == 0:
            use_threads(self.work.threads)
            if step.what == "operator":
                self.note(number, *self.operators[step.size].seconds(OPERATOR_S))
            elif step.what == "copy":
                self.note(number, _copy_s(step.size))
            elif step.what in ("alone", "together"):
                self.note(number, self.burst(BURSTS[step.kind](self.sweep.effort)))

    def in_step(self, value: float) -> Generator[bool, None, float]:
        """Wait for all workers; returns the largest value that one of them has given."""
        if self.sweep.workers == 1:
            return value
        result = yield from self.exchanged(self.sweep.in_step, torch.tensor([value] * self.sweep.workers))
        return float(result.values[0][0])  # type: ignore[index]

    def exchange(self, number: int, step: Step) -> Loop:
        """Exchange tensors with the others of a group, one after another."""
        shape = list(shape_of(step))
        if PHASES[step.kind][0].join is not None:
            start, end = bounds(shape[0], step.group)[self.worker]
            shape[0] = end - start
        given = torch.ones(shape)
        for _ in self.timed(number, step, step.group):
            yield from self.exchanged(number, given)

    def message(self, number: int, step: Step) -> Loop:
        """Send messages there and back between worker 0 and the last one."""
        value, channels = torch.ones(step.size // 4), (number, self.sweep.back(number))
        for _ in self.timed(number, step, 2, parts=2):
            if self.worker == 0:
                self.give(channels[0], value)
            yield from self.taken(channels[self.worker == 0])
            if self.worker != 0:
                self.give(channels[1], value)

    def timed(self, number: int, step: Step, group: int, parts: int = 1) -> Iterator[None]:
        """Repeat a step, and note the seconds and the CPU seconds of each but the first time.

        Args:
            number: of the step.
            step: it.
            group: workers that take part.
            parts: into how many parts each time is divided.
        """
        yield
        count = max(LEAST, min(REPEATS, REPEATED_BYTES // step.size))
        start_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            yield
        seconds, spent = time.perf_counter() - start_s, time.process_time() - cpu_s
        here = group if self.sweep.transport == "memory" else 1  # of the group, in this process
        self.note(number, seconds / count / parts, spent / count / parts / here)

    def exchanged(self, channel: int, given: torch.Tensor) -> Waiting:
        """What comes of an exchange to which this worker gives a tensor."""
        self.give(channel, given)
        return (yield from self.taken(channel))

    def give(self, channel: int, value: torch.Tensor) -> None:
        """Give the next message of a channel."""
        self.links[channel].give(Message(channel, (self.given[channel],), (value,)))
        self.given[channel] += 1

    def taken(self, channel: int) -> Waiting:
        """Wait for the next message of a channel."""
        number = self.came[channel]
        self.came[channel] += 1
        while (channel, number) not in self.inbox:
            yield False
            self.receive()
        self.links[channel].free(number)
        return self.inbox.pop((channel, number))

    def receive(self) -> None:
        """Wait for a message, as a worker of a run does.

        Raises:
            DeadlineError: nothing came in time.
            WorkerLostError: another worker is lost.
        """
        delivery = self.endpoint.receive(self.work.settings.deadline_s, credits=False)
        if isinstance(delivery, Arrived):
            self.links[delivery.message.channel].arrived(delivery.source, delivery.message)
            self.endpoint.credits()
        elif isinstance(delivery, Lost):
            raise WorkerLostError(
                f"worker {delivery.source}",
                got=delivery.reason,
                expected="a living worker",
                remedy="See its own message; then measure again.",
            )

    def deliver(self, message: Message) -> None:
        """Keep what is complete."""
        self.inbox[message.channel, message.header[0]] = message

    def burst(self, instruction: Callable[[], int]) -> float:
        """Seconds of an operator in instructions that are made one after another, as a worker of a run makes them."""
        made = [0]

        def handler(*_: object) -> None:
            made[0] += instruction()

        run = self.device.instrumented({"forward": handler})["forward"]
        run(None, None)  # type: ignore[arg-type]
        made[0], start_s = 0, time.perf_counter()
        while (spent := time.perf_counter() - start_s) < self.sweep.effort.burst_s:
            run(None, None)  # type: ignore[arg-type]
        return spent / made[0]

    def note(self, number: int, *seconds: float) -> None:
        """Note what a step took."""
        self.rows[number].append(list(seconds))


def _copy_s(num_bytes: int) -> float:
    source, target = torch.ones(num_bytes // 4), torch.empty(num_bytes // 4)
    best = float("inf")
    for _ in range(5):
        start_s = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - start_s)
    return best
