"""Keep torch's own dumps off the screen.

When export fails, torch prints the whole graph that it has so far to stderr, once per attempt: thousands of lines in
front of the one screen that says what is wrong.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO


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
