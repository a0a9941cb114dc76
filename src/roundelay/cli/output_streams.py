"""Where a command writes: an output that is closed, full or gone costs what was to be written there, and no more."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, TextIO, final


@final
class TolerantStream:
    """A stream that goes on when nothing more can be written to it; the rest goes nowhere.

    Args:
        stream: where to write.

    Attributes:
        fault: why writing has failed, if it has.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.fault: OSError | None = None

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Write what waits, or drop it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Have all that still comes go nowhere, what Python writes as it ends included."""
        self.fault = self.fault or error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tolerate() -> None:
    """Make this process's output tolerant. A closed descriptor is opened, or the next file would take its place."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    sys.stdout, sys.stderr = _tolerant(sys.stdout, 1), _tolerant(sys.stderr, 2)


def _tolerant(stream: Any, number: int) -> Any:
    if isinstance(stream, TolerantStream):
        return stream
    return TolerantStream(open(number, "w", closefd=False) if stream is None else stream)


def lost() -> str:
    """Why stdout does not hold all that was written to it; empty if it does, or if its reader has had enough."""
    fault = sys.stdout.fault if isinstance(sys.stdout, TolerantStream) else None
    if fault is None or fault.errno == errno.EPIPE:
        return ""
    return fault.strerror or str(fault)
