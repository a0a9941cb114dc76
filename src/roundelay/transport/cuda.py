"""The interface to CUDA: streams, events, pinned memory, and keeping memory alive until a stream has used it.

It can be replaced so that the ordering between streams can be tested without a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream's work, as `torch.cuda.Event`."""

    def record(self, stream: Any) -> None:
        """Record the event after everything submitted to the stream so far."""
        ...

    def query(self) -> bool:
        """Whether the recorded work is complete."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the recorded work is complete."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to ``end``; both are complete and were created with timing."""
        ...


class Stream(Protocol):
    """A queue of work that a device executes in order, as `torch.cuda.Stream`."""

    def wait_event(self, event: Any) -> None:
        """Make work submitted from now on wait for the event, without blocking the caller."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the stream has done all its work."""
        ...


@cache
def _stream(device: torch.device, use: str) -> Stream:
    stream: Stream = torch.cuda.Stream(device)
    return stream


class Cuda:
    """CUDA, through ``torch.cuda``; tests override it where there is no GPU."""

    def stream(self, device: torch.device, use: str) -> Stream:
        """The stream on the device for one use; the same in every run, as torch keeps memory for each stream."""
        return _stream(device, use)

    def event(self, *, timing: bool = False) -> Event:
        """Create an event."""
        event: Event = torch.cuda.Event(enable_timing=timing)
        return event

    def free_bytes(self, device: torch.device) -> int:
        """Bytes of the device that nobody has allocated."""
        return int(torch.cuda.mem_get_info(device)[0])

    def peak_bytes(self, device: torch.device) -> int:
        """Most bytes that this process has allocated on the device at one time, since :meth:`reset_peak`."""
        return torch.cuda.max_memory_allocated(device)

    def reset_peak(self, device: torch.device) -> None:
        """Begin anew to look for the most bytes."""
        torch.cuda.reset_peak_memory_stats(device)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Make the stream and its device current for the calling thread."""
        return torch.cuda.stream(stream)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor into pinned host memory; torch keeps it until its copies to the device are done."""
        return tensor.pin_memory()

    def keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep the tensor's memory, allocated on another stream, from reuse until the stream has used it."""
        tensor.record_stream(stream)
