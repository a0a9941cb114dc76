"""Scopes for torch and the user's code: one intra-op thread, no output on stderr, errors by their cause, a child.

One thread per worker gives the same bits everywhere, and keeps workers from competing for cores.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO, TypeVar

import msgspec
import torch

from roundelay.errors import RoundelayError, UserCodeError
from roundelay.runtime.determinism import nondeterministic
from roundelay.runtime.device_failure import device_error
from roundelay.runtime.forked_call import apart

_T = TypeVar("_T")


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


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Run the user's model or loss with one intra-op thread; raise its exceptions as UserCodeError."""
    try:
        with one_thread():
            yield
    except (RoundelayError, MemoryError):
        raise
    except Exception as error:
        if known := device_error(what, error) or nondeterministic(what, error):
            raise known from error
        raise UserCodeError(
            what,
            got=f"{type(error).__name__}: {error}",
            expected="a model and a loss that can be computed again and again",
            remedy="Correct the model or the loss; ROUNDELAY_DEBUG=1 shows the traceback.",
        ) from error


def in_child(call: Callable[[], _T], what: str, result: type[_T]) -> _T:
    """Call a function that computes gradients, in a forked child if a backward here would break later forks.

    Args:
        call: the function.
        what: what it does, for messages.
        result: the type of what it returns: a dataclass, or a list of dataclasses.
    """
    return msgspec.convert(apart(lambda: msgspec.to_builtins(call()), what), result)


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
