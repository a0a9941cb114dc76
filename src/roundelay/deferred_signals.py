"""Defers Python signal handlers in critical sections: a fork and the recording of its pid, a clean-up, torch.export.

Python runs handlers in the main thread, between any two bytecodes, whichever thread the system delivers the signal to.
A signal mask belongs to one thread and would not help, so the handlers are replaced for a time by one that queues.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Self, final

_TORCH = frozenset({"torch", "functorch", "torchgen", "sympy", "mpmath", "networkx", "typing_extensions"})


class EndedAsAsked(KeyboardInterrupt):
    """An interrupt that a signal has asked for, after all that it asked for is done; its text says how it ended."""


def always(frame: FrameType | None, again: bool) -> bool:
    """Defer every signal."""
    return True


def inside_torch(frame: FrameType | None, again: bool) -> bool:
    """Defer signals that arrive inside torch, or in the standard library called by it, unless one is deferred already.

    While exporting, torch calls Python from C++ code that cannot propagate an exception: an interrupt there terminated
    the process (``terminate called after throwing``) about once in a hundred times, became the text of a TypeError, or
    was dropped.
    """
    while frame is not None and not again:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _TORCH:
            return True
        generated = not package or package.startswith("namedtuple_")
        if not generated and package not in sys.stdlib_module_names:
            return False
        frame = frame.f_back
    return False


@final
class DeferredSignals:
    """A context in which signals with a Python handler are deferred until :meth:`handle`, :meth:`open`, or its exit.

    Nothing is deferred in a forked child. Only the main thread handles signals: in other threads this does nothing.

    Args:
        waits: whether to defer a signal, given the interrupted frame and whether one of its kind is deferred already.

    Attributes:
        held: whether signals are deferred. It is assigned directly: an assignment cannot be interrupted, a call can.
    """

    def __init__(self, waits: Callable[[FrameType | None, bool], bool] = always) -> None:
        self.held = False
        self._waits = waits
        self._lasts = False
        self._process = os.getpid()
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: list[int] = []

    def __enter__(self) -> Self:
        self.held = self._lasts = True
        try:
            if threading.current_thread() is threading.main_thread():
                self._put_in_place({})
        except BaseException:  # from a signal whose handler is not replaced yet
            self.held = self._lasts = False  # first: another signal may arrive during the call
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._lasts = False
        try:
            self._put_back()
        finally:
            self.held = False
            try:
                self._put_back()  # the first time may have been interrupted
            finally:
                self.handle()

    def _put_in_place(self, before: Mapping[int, object]) -> None:
        """Replace the handlers that differ from those ``before``."""
        for number, handler in _handlers().items():
            if callable(handler) and handler != before.get(number):  # otherwise it is not a Python handler
                self._handlers[number] = handler
                signal.signal(number, self._receive)

    def _put_back(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._receive:  # otherwise other code has set another one
                signal.signal(number, handler)

    def open(self) -> None:
        """Handle the deferred signals, and every new one at once until ``held`` is set."""
        self.held = False
        self.handle()

    def handle(self) -> None:
        """Handle the deferred signals."""
        if self._waiting:
            number = self._waiting.pop(0)
            try:
                self._call(number, sys._getframe())
            finally:
                self.handle()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        again = number in self._waiting
        if self.held and os.getpid() == self._process and self._waits(frame, again):
            if not again:
                self._waiting.append(number)
        else:
            self._call(number, frame)

    def _call(self, number: int, frame: FrameType | None) -> None:
        before = _handlers()
        try:
            self._handlers[number](number, frame)
        finally:
            if self._lasts:
                self._put_in_place(before)  # handlers that it has set: the command's own sets an alarm


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def hides_interrupt(error: Exception, before: BaseException | None = None) -> bool:
    """Whether a KeyboardInterrupt is among an error's causes, other than the exception being handled ``before``.

    An interrupt while torch reads a symbolic size becomes the text of a TypeError.
    """
    seen, left = {id(before)}, [error.__cause__, error.__context__]
    while left:
        reason = left.pop()
        if reason is not None and id(reason) not in seen:  # causes may be cyclic
            seen.add(id(reason))
            left += [reason.__cause__, reason.__context__]
            if isinstance(reason, KeyboardInterrupt):
                return True
    return isinstance(error, TypeError) and KeyboardInterrupt.__name__ in str(error)
