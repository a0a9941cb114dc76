"""Context managers around torch: one intra-op thread, and no output on stderr.

One thread per worker gives the same bits everywhere, and keeps workers from competing for cores.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch's operators to one thread each within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        if before != 1:
            torch.set_num_threads(before)


class _ThreadBuffer:
    """A stream that buffers what its creating thread writes; other threads, such as a spinner's, write through."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._owner = threading.get_ident()
        self.parts: list[str] = []

    def write(self, text: str) -> int:
        """Buffer the text, or write it."""
        if threading.get_ident() != self._owner:
            return self._stream.write(text)
        self.parts.append(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def without_dumps() -> Iterator[None]:
    """Buffer what this thread writes to stderr: written when the block succeeds, dropped when it raises."""
    buffer = _ThreadBuffer(sys.stderr)
    with redirect_stderr(buffer):
        yield
    sys.stderr.write("".join(buffer.parts))
