"""Ctrl-C, SIGTERM and SIGUSR1, as the commands take them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from roundelay import env
from roundelay.errors import RoundelayError

_AGAIN_S, _ASKED_S = 0.02, 0.5


@dataclass(frozen=True, slots=True)
class Grace:
    """What a training is granted when a scheduler asks for its end.

    Args:
        seconds: for a checkpoint; then it is interrupted.
        numbers: signals that ask for it.
    """

    seconds: float = 0.0
    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM,)


@final
class Signals:
    """Ctrl-C and SIGTERM raise ``KeyboardInterrupt``, wherever the main thread is, and the first is remembered.

    A library that is hit at a bad moment (rich, while it redraws) may end in an error of its own that hides the
    interrupt; what the person did is then still the cause to tell. A launcher that has lost one process ends the others
    by SIGTERM: where an error is on its way to be told, the first of these changes nothing, and one that has not found
    its party yet ends without a word, for there it could not learn what was told.

    Nor is an interrupt lost where somebody's code drops it, or takes the error that it became for one it can mend: it
    is raised again as long as the main thread goes on and handles no exception, in which it would be leaving.

    While :meth:`gracefully` lasts, the first SIGTERM only asks for a good end.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        #: the signal that has asked for a good end
        self.asked: int | None = None
        self._grace: tuple[Grace, Callable[[], None], Callable[[], bool]] | None = None
        self._listens = False  # not where a test calls a command
        self._left = False

    @property
    def interrupted(self) -> bool:
        """Whether the person has ended the command; a launcher sends SIGTERM because of an error that is told."""
        return self.first == signal.SIGINT or (self.first is not None and not env.is_launched())

    @property
    def cause(self) -> int:
        """The number of the signal that has ended the command."""
        return self.asked or self.first or signal.SIGINT

    def listen(self) -> None:
        """Take both signals from now on; under a launcher SIGTERM only with :meth:`join`."""
        self._listens = True
        sys.unraisablehook = self._unraised
        signal.signal(signal.SIGINT, self._raise)
        if not env.is_launched():
            signal.signal(signal.SIGTERM, self._raise)

    def join(self) -> None:
        """Take a launcher's SIGTERM, too, from now on."""
        if self._listens:
            signal.signal(signal.SIGTERM, self._raise)

    @contextmanager
    def gracefully(self, grace: Grace, ask: Callable[[], None], ready: Callable[[], bool]) -> Iterator[None]:
        """While it lasts, the first of the signals asks for a good end; one more, or the time, interrupts.

        Args:
            grace: the signals, and the time.
            ask: asks for the end.
            ready: whether there is something to end well; else the first interrupts, too.
        """
        before = {number: signal.getsignal(number) for number in grace.numbers}
        if self._listens and grace.seconds:
            for number in grace.numbers:
                signal.signal(number, self._raise)
        self._grace = grace, ask, ready
        try:
            yield
        finally:
            self._grace = None
            if self._listens and not self._left and self.asked is None:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def leave_to(self, handler: signal.Handlers) -> None:
        """Have both handled so from now on: this process is about to end."""
        self._left = True
        if self._listens:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGINT, handler)
            signal.signal(signal.SIGTERM, handler)

    def _unraised(self, ignored: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised while it collects something."""
        if self.first is None or ignored.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(ignored)
            return
        self._ask_in(_AGAIN_S)

    def _raise(self, number: int, frame: object) -> None:
        if self._is_gentle(number):
            assert self._grace is not None
            self.asked = number
            self._ask_in(self._grace[0].seconds)
            self._grace[1]()
            return
        first, self.first = self.first is None, self.first or number
        self._ask_in(_ASKED_S)
        ending = isinstance(sys.exc_info()[1], RoundelayError)  # on its way out, through what is still to be left
        if not (first and ending and number == signal.SIGTERM and env.is_launched()):
            raise KeyboardInterrupt

    def _is_gentle(self, number: int) -> bool:
        """Whether a signal asks for a good end, and there is time and something for it."""
        if self._grace is None or self.asked is not None or self.first is not None:
            return False
        grace, _, ready = self._grace
        return grace.seconds > 0 and number in grace.numbers and ready()

    def _ask_in(self, seconds: float) -> None:
        signal.signal(signal.SIGALRM, self._asked)  # each time: somebody's time limit may have put his own there
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _asked(self, number: int, frame: object) -> None:
        """Whether the command goes on as if nothing had been."""
        if self._left:  # this one was under way then
            return
        self.first = self.first or self.asked
        self._ask_in(_ASKED_S)
        if sys.exc_info()[1] is None:
            raise KeyboardInterrupt


SIGNALS = Signals()
"""This process's."""
