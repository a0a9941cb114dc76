"""Interrupts while torch exports a model: they are raised between two of its operations, never within one.

Under its modes torch calls Python from C++ that cannot pass an exception on: an interrupt there ended the process
(``terminate called after throwing``) once in some hundred times, became a TypeError's text, or was dropped.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Self, final

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
_TORCH = frozenset({"torch", "sympy", "mpmath"})


@final
class Interrupts:
    """While it lasts, signals that strike inside torch wait for :meth:`come`, or for the end.

    In the person's own code they come at once, so that a forward that waits can be interrupted; a second one of the
    same kind does everywhere.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._waiting: list[int] = []
        self._lasts = False  # where entering or leaving is interrupted, a handler that stays passes all on

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._hear)
        self._lasts = True
        return self

    def __exit__(self, *raised: object) -> None:
        self._lasts = False
        try:
            for number, handler in self._handlers.items():
                if signal.getsignal(number) == self._hear:  # else a handler has set another
                    signal.signal(number, handler)
        finally:
            self.come()

    def come(self) -> None:
        """Handle what waits; the place is one where torch expects that an operation may raise."""
        if self._waiting:
            number = self._waiting.pop(0)
            try:
                self._handlers[number](number, sys._getframe())
            finally:
                self.come()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self._lasts and number not in self._waiting and _in_torch(frame):
            self._waiting.append(number)
        else:
            self._handlers[number](number, frame)


def _in_torch(frame: FrameType | None) -> bool:
    """Whether torch runs there, itself or through what it calls of Python's library."""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _TORCH:
            return True
        if package and package not in sys.stdlib_module_names:  # generated code has no name
            return False
        frame = frame.f_back
    return False
