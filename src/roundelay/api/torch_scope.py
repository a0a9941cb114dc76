"""One intra-op thread per worker: the same bits everywhere, and no two workers in each other's way."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch's operators use one thread each while this lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        if before != 1:
            torch.set_num_threads(before)


class _Held:
    """A stream that holds back what one thread writes; others, such as a spinner's, write through."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._owner = threading.get_ident()
        self.parts: list[str] = []

    def write(self, text: str) -> int:
        """Hold the text back, or write it."""
        if threading.get_ident() != self._owner:
            return self._stream.write(text)
        self.parts.append(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def without_dumps() -> Iterator[None]:
    """Hold back what this thread writes to stderr: shown when the block ends well, dropped with an error."""
    held = _Held(sys.stderr)
    with redirect_stderr(held):
        yield
    sys.stderr.write("".join(held.parts))
