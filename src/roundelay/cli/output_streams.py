"""Output streams that tolerate a closed pipe or a full disk: the output is lost, the command continues."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, TextIO, final


@final
class TolerantStream:
    """A stream that discards further output once writing has failed.

    Args:
        stream: where to write.

    Attributes:
        fault: the error of the first failed write, if any.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.fault: OSError | None = None

    def write(self, text: str) -> int:
        """Write a text, or discard it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        """Write buffered text, or discard it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Redirect the descriptor to the null device, also for what Python writes at its exit."""
        self.fault = self.fault or error
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def tolerate() -> None:
    """Make stdout and stderr tolerant. Closed descriptors are opened, or the next file would take their numbers."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number: this one
    sys.stdout, sys.stderr = _tolerant(sys.stdout, 1), _tolerant(sys.stderr, 2)


def _tolerant(stream: Any, number: int) -> Any:
    if isinstance(stream, TolerantStream):
        return stream
    return TolerantStream(open(number, "w", closefd=False) if stream is None else stream)


def lost() -> str:
    """Why output to stdout was lost; empty if none was, or if its reader has closed the pipe."""
    fault = sys.stdout.fault if isinstance(sys.stdout, TolerantStream) else None
    if fault is None or fault.errno == errno.EPIPE:
        return ""
    return fault.strerror or str(fault)
