"""Scopes for torch and the user's code: intra-op threads, no output on stderr, errors by their cause, a child."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from typing import Any, TextIO, TypeVar

import msgspec
import torch

from roundelay.cores import all_threads
from roundelay.errors import RoundelayError, UserCodeError
from roundelay.launching.forked_call import apart
from roundelay.runtime.processes.determinism import deterministic, nondeterministic, use_threads
from roundelay.runtime.processes.device_failure import device_error

_T = TypeVar("_T")


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Let this thread compute with so many intra-op threads within the block, and so that the same bits come again."""
    before = torch.get_num_threads()
    use_threads(count)
    try:
        with deterministic(False, threads=count):
            yield
    finally:
        use_threads(before)


def on_all_threads() -> AbstractContextManager[None]:
    """:func:`on_threads` with as many as plain PyTorch would use in one process of this host."""
    return on_threads(all_threads(torch.get_num_threads))


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Run the user's model or loss; raise its exceptions as UserCodeError."""
    try:
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
