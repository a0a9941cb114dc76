"""The few things that are asked of CUDA: streams, events, pinned memory, and keeping memory until a stream is done.

They stand behind one small face, so that all order between streams can be tested where there is no such device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

import torch


class Event(Protocol):
    """A place in a stream's work, passed when all work before it is done."""

    def record(self, stream: Any) -> None:
        """Place it behind everything that the stream has been given so far."""
        ...

    def query(self) -> bool:
        """Whether it has been passed."""
        ...

    def synchronize(self) -> None:
        """Let the calling thread wait until it has been passed."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to ``end``; both were made for timing and have been passed."""
        ...


class Stream(Protocol):
    """Work that a device does in order, beside that of its other streams."""

    def wait_event(self, event: Any) -> None:
        """Let what is given to the stream from now on wait for the event; the caller does not wait."""
        ...

    def synchronize(self) -> None:
        """Let the calling thread wait until the stream has done all its work."""
        ...


class Driver(ABC):
    """What an accelerator offers."""

    @abstractmethod
    def stream(self, device: torch.device) -> Stream:
        """A new stream of the device."""

    @abstractmethod
    def event(self, *, timing: bool = False) -> Event:
        """A new event."""

    @abstractmethod
    def using(self, stream: Stream) -> AbstractContextManager[Any]:
        """While this lasts, the calling thread's work goes to the stream, and to its device."""

    @abstractmethod
    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory of the host that the device can read by itself."""

    @abstractmethod
    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """The tensor's memory, made on another stream, is not given away before the stream has used it."""


@final
class Cuda(Driver):
    """CUDA, through ``torch.cuda``."""

    def stream(self, device: torch.device) -> Stream:
        """As the contract says."""
        made: Stream = torch.cuda.Stream(device)
        return made

    def event(self, *, timing: bool = False) -> Event:
        """As the contract says."""
        made: Event = torch.cuda.Event(enable_timing=timing)
        return made

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """As the contract says."""
        return torch.cuda.stream(stream)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """As the contract says; torch keeps the memory until the copies from it that it knows of are done."""
        return tensor.pin_memory()

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """As the contract says."""
        tensor.record_stream(stream)
