"""A worker that measures: it makes all steps on its own end of the transport, sweep after sweep."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch

from roundelay.calibration.sweep import PHASES, Step, Sweep
from roundelay.errors import WorkerLostError
from roundelay.ir.sbp import bounds
from roundelay.planner.machine_profile import MESSAGE
from roundelay.runtime.device import Device
from roundelay.runtime.links import open_link
from roundelay.runtime.processes.determinism import use_threads
from roundelay.runtime.processes.worker_messages import Report, Reporter
from roundelay.runtime.workload import Loop, Workload
from roundelay.transport.endpoint import Arrived, Endpoint, Lost, Message

Waiting = Generator[bool, None, Message]
"""What waits as a :data:`~roundelay.runtime.workload.Loop` does, for a message."""

_SENT, _MOST, _LEAST = 1 << 22, 16, 3
"""Bytes that a step sends in all, with so many repetitions at most and at least."""

_INSTRUCTION_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements(Workload):
    """Measures; each worker's last report has, by step, a row for each sweep: seconds, and CPU seconds or a backward's.

    Args:
        sweep: what is measured.
    """

    sweep: Sweep

    def loop(self, worker: int, endpoint: Endpoint, report: Reporter, device: Device) -> Loop:
        """Make sweeps until there is no time left."""
        return _Worker(self, worker, endpoint, report, device).run()


class _Worker:
    def __init__(self, task: Measurements, worker: int, endpoint: Endpoint, report: Reporter, device: Device) -> None:
        self.sweep, self.worker, self.endpoint, self.report = task.sweep, worker, endpoint, report
        self.device, self.work = device, task.works[worker]
        channels, planned = self.work.program.channels, self.work.exchanges
        self.links = {
            c.id: open_link(c, worker, endpoint, planned.get(c.id), self.deliver, lambda *_: None) for c in channels
        }
        self.inbox: dict[tuple[int, int], Message] = {}
        self.given: Counter[int] = Counter()  # messages, by channel
        self.came: Counter[int] = Counter()
        self.rows: defaultdict[str, list[list[float]]] = defaultdict(list)

    def run(self) -> Loop:
        began, sweeps, over = time.perf_counter(), 0, False
        while not over:
            for number, step in enumerate(self.sweep.steps):
                yield from self.in_step(0.0)
                use_threads(self.work.threads)
                if self.worker in self.sweep.members(step):
                    yield from self.make(number, step)
            sweeps, spent = sweeps + 1, time.perf_counter() - began
            if self.worker == 0:
                self.report(Report("progress", 0, {"sweeps": sweeps, "seconds": spent}))
                over = sweeps >= self.sweep.least and spent >= self.sweep.seconds
            over = (yield from self.in_step(float(over))) > 0
        self.report(Report("finished", self.worker, {"rows": self.rows}))

    def make(self, number: int, step: Step) -> Loop:
        if step.what == "link":
            link = self.messages(number, step) if step.kind == MESSAGE else self.exchanges(number, step)
            row = yield from link
        elif step.operator is not None:
            row = step.operator.seconds() if step.what == "operator" else [self.burst(step.operator.make()[0])]
        self.rows[str(number)].append(row)

    def in_step(self, value: float) -> Generator[bool, None, float]:
        """Wait for all workers; returns the largest value that one of them has given."""
        channel, given = len(self.sweep.steps), torch.tensor([value] * self.sweep.workers)
        if self.sweep.workers > 1:
            given = (yield from self.exchanged(channel, given)).values[0]  # type: ignore[assignment]
        return float(given[0])

    def exchanges(self, number: int, step: Step) -> Generator[bool, None, list[float]]:
        shape, row = list(step.shape), list[float]()
        if PHASES[step.kind][0].join is not None:  # each has some of it
            start, end = bounds(shape[0], step.group)[self.worker]
            shape[0] = end - start
        given = torch.ones(shape)
        for _ in self.timed(step, row):
            yield from self.exchanged(number, given)
        return row

    def messages(self, number: int, step: Step) -> Generator[bool, None, list[float]]:
        """There and back again."""
        value, back, row = torch.ones(step.size // 4), self.sweep.back(number), list[float]()
        for _ in self.timed(step, row):
            if self.worker == 0:
                self.give(number, value)
                yield from self.taken(back)
            else:
                yield from self.taken(number)
                self.give(back, value)
        return [seconds / 2 for seconds in row]

    def timed(self, step: Step, row: list[float]) -> Iterator[None]:
        """Repeat a step; the row gets the seconds and this worker's CPU seconds of each time but the first."""
        yield
        count = max(_LEAST, min(_MOST, _SENT // step.size))
        start_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            yield
        seconds, spent = time.perf_counter() - start_s, time.process_time() - cpu_s
        here = step.group if self.sweep.transport == "memory" else 1  # workers of this process
        row += [seconds / count, spent / count / here]

    def exchanged(self, channel: int, given: torch.Tensor) -> Waiting:
        self.give(channel, given)
        return (yield from self.taken(channel))

    def give(self, channel: int, value: torch.Tensor) -> None:
        self.links[channel].give(Message(channel, (self.given[channel],), (value,)))
        self.given[channel] += 1

    def taken(self, channel: int) -> Waiting:
        """The next message of a channel, waited for as a worker of a run does."""
        key = channel, self.came[channel]
        while key not in self.inbox:
            yield False
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
        self.links[channel].free(self.came[channel])
        self.came[channel] += 1
        return self.inbox.pop(key)

    def deliver(self, message: Message) -> None:
        self.inbox[message.channel, message.header[0]] = message

    def burst(self, call: Callable[[], object]) -> float:
        """Seconds of a call in instructions that follow each other, made as the worker of a run makes them."""
        calls = 0

        def handler(*_: object) -> None:
            nonlocal calls
            until_s = time.perf_counter() + _INSTRUCTION_S
            while time.perf_counter() < until_s:
                call()
                calls += 1

        instruction = self.device.instrumented({"forward": handler})["forward"]
        instruction(None, None)  # type: ignore[arg-type]
        calls, start_s = 0, time.perf_counter()
        while (spent := time.perf_counter() - start_s) < self.sweep.burst_s:
            instruction(None, None)  # type: ignore[arg-type]
        return spent / calls
