"""An accelerator that is none: work is done at once on the CPU, but who waits for whom is written down and checked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from roundelay.transport.cuda import Cuda

Clock = dict[int, int]
"""Stream to how much of its work is known to be done before."""


class FakeStream:
    """A stream that knows what its work comes behind."""

    def __init__(self, number: int, device: torch.device) -> None:
        self.number, self.device = number, device
        self.clock: Clock = {number: 0}
        self.synchronized = 0

    def wait_event(self, event: FakeEvent) -> None:
        for number, count in event.clock.items():
            self.clock[number] = max(self.clock.get(number, 0), count)

    def synchronize(self) -> None:
        self.synchronized += 1

    def behind(self, clock: Clock) -> bool:
        """Whether all of ``clock`` is done before what this stream is given next."""
        return all(self.clock.get(number, 0) >= count for number, count in clock.items())


class FakeEvent:
    """A place in a stream's work, with the time on the fake's clock."""

    def __init__(self, driver: Fake) -> None:
        self._driver = driver
        self.clock: Clock = {}
        self.at_ms = 0.0
        self.waited = 0

    def record(self, stream: FakeStream) -> None:
        stream.clock[stream.number] += 1
        self.clock = dict(stream.clock)
        self.at_ms = self._driver.now_ms

    def query(self) -> bool:
        return self.at_ms <= self._driver.done_ms

    def synchronize(self) -> None:
        self.waited += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        return float(torch.tensor(end.at_ms - self.at_ms, dtype=torch.float32))


class Fake(Cuda):
    """Notes everything; ``now_ms`` is its clock, and events up to ``done_ms`` have been passed."""

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.kept: list[tuple[int, int]] = []
        self.pins, self.resets = 0, 0
        self.now_ms, self.done_ms = 0.0, float("inf")
        self._current = threading.local()
        self._lock = threading.Lock()

    @property
    def current(self) -> FakeStream | None:
        """The calling thread's stream."""
        return getattr(self._current, "stream", None)

    def stream(self, device: torch.device, use: str = "") -> Any:
        with self._lock:
            self.streams.append(FakeStream(len(self.streams), device))
            return self.streams[-1]

    def event(self, *, timing: bool = False) -> Any:
        return FakeEvent(self)

    @contextmanager
    def using(self, stream: Any) -> Iterator[None]:
        before, self._current.stream = self.current, stream
        yield
        self._current.stream = before

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pins += 1
        return tensor.clone()

    def peak_bytes(self, device: torch.device) -> int:
        return 1000 * self.resets

    def reset_peak(self, device: torch.device) -> None:
        self.resets += 1

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        self.kept.append((tensor.data_ptr(), stream.number))
