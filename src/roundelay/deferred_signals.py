"""Interrupts at moments that can bear them: between a fork and the note of it there is none, nor in a clean-up.

Python handles a signal in the main thread, between any two of its steps, whichever thread the system gives it to: a
mask, which is one thread's, would not do. So for a time the handlers are exchanged for one that lets signals wait.
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


def always(frame: FrameType | None, again: bool) -> bool:
    """Every signal waits."""
    return True


def inside_torch(frame: FrameType | None, again: bool) -> bool:
    """Signals wait that strike inside torch, or in what it calls of Python's library; a second of its kind does not.

    While it exports, torch calls Python from C++ that cannot pass an exception on: an interrupt there ended the process
    (``terminate called after throwing``) once in some hundred times, became a TypeError's text, or was dropped.
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
class Interrupts:
    """While it lasts, signals that have a handler in Python wait for :meth:`handle`, :meth:`open`, or the end.

    In a forked child none waits. Only the main thread handles signals: in another one this does nothing.

    Args:
        waits: whether one waits, by the frame that it strikes in, and by whether one of its kind waits already.

    Attributes:
        held: whether they wait. Set it: an assignment cannot be interrupted, and a call can.
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
        except BaseException:  # a signal whose handler is not exchanged yet
            self.held = self._lasts = False  # first: another may strike in the call
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
        """Exchange the handlers that are others than they were ``before``."""
        for number, handler in _handlers().items():
            if callable(handler) and handler != before.get(number):  # else it is the system's, or not Python's
                self._handlers[number] = handler
                signal.signal(number, self._hear)

    def _put_back(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._hear:  # else somebody has set another
                signal.signal(number, handler)

    def open(self) -> None:
        """Handle what waits, and from now on all that comes, until ``held`` is set."""
        self.held = False
        self.handle()

    def handle(self) -> None:
        """Handle what waits."""
        if self._waiting:
            number = self._waiting.pop(0)
            try:
                self._call(number, sys._getframe())
            finally:
                self.handle()

    def _hear(self, number: int, frame: FrameType | None) -> None:
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
                self._put_in_place(before)  # what it has set: the command's own sets an alarm


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def hides_interrupt(error: Exception, before: BaseException | None = None) -> bool:
    """Whether an error hides an interrupt, but none of what was being handled ``before``.

    One that strikes while torch reads a symbolic size becomes the text of a TypeError.
    """
    seen, left = {id(before)}, [error.__cause__, error.__context__]
    while left:
        reason = left.pop()
        if reason is not None and id(reason) not in seen:  # an error may be among its own causes
            seen.add(id(reason))
            left += [reason.__cause__, reason.__context__]
            if isinstance(reason, KeyboardInterrupt):
                return True
    return isinstance(error, TypeError) and KeyboardInterrupt.__name__ in str(error)
