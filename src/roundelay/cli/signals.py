"""Handlers of Ctrl-C, SIGTERM and SIGUSR1."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from roundelay import env
from roundelay.errors import RoundelayError

_AGAIN_S, _CHECK_S = 0.02, 0.5


@dataclass(frozen=True, slots=True)
class Grace:
    """The time that a training gets for a last checkpoint when a signal asks for its end.

    Args:
        seconds: until the training is interrupted; 0: at once.
        numbers: the signals.
    """

    seconds: float = 0.0
    numbers: tuple[signal.Signals, ...] = (signal.SIGTERM,)


@final
class Signals:
    """Ctrl-C and SIGTERM raise ``KeyboardInterrupt`` in the main thread; the first signal is recorded.

    A library that is interrupted at a bad moment (rich, while it redraws) may raise an error of its own that hides the
    interrupt; the interrupt is then still reported as the cause. A launcher that has lost one process ends the others
    by SIGTERM: while an error is on its way to be reported, the first SIGTERM changes nothing; a process that has not
    joined its process group yet ends without a message, since it cannot know what was reported.

    An interrupt is not lost where other code drops it, or handles the error that it became: it is raised again as long
    as the main thread continues without handling an exception.

    Within :meth:`gracefully`, the first SIGTERM only requests a graceful end.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        #: the signal that has requested a graceful end
        self.asked: int | None = None
        self._grace: tuple[Grace, Callable[[], None], Callable[[], bool]] | None = None
        self._listens = False  # stays so where a test calls a command
        self._left = False

    @property
    def interrupted(self) -> bool:
        """Whether the user has ended the command; a launcher sends SIGTERM because of an error that is reported."""
        return self.first == signal.SIGINT or (self.first is not None and not env.is_launched())

    @property
    def cause(self) -> int:
        """The number of the signal that has ended the command."""
        return self.asked or self.first or signal.SIGINT

    def listen(self) -> None:
        """Handle both signals from now on; under a launcher, SIGTERM only after :meth:`join`."""
        self._listens = True
        sys.unraisablehook = self._unraised
        signal.signal(signal.SIGINT, self._raise)
        if not env.is_launched():
            signal.signal(signal.SIGTERM, self._raise)

    def join(self) -> None:
        """Handle SIGTERM under a launcher, too, from now on."""
        if self._listens:
            signal.signal(signal.SIGTERM, self._raise)

    @contextmanager
    def ending_at_once(self) -> Iterator[None]:
        """Within the context both signals end the process: libraries that are being imported may drop an interrupt."""
        if self._listens:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            yield
        finally:
            if self._listens:
                self.listen()

    @contextmanager
    def gracefully(self, grace: Grace, ask: Callable[[], None], ready: Callable[[], bool]) -> Iterator[None]:
        """Within the context, the first signal requests a graceful end; a second one, or the time limit, interrupts.

        Args:
            grace: the signals, and the time limit.
            ask: requests the end.
            ready: whether there is something to save; else the first signal interrupts, too.
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
        """Install another handler for both signals: this process is about to end."""
        self._left = True
        if self._listens:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGINT, handler)
            signal.signal(signal.SIGTERM, handler)

    def _unraised(self, ignored: sys.UnraisableHookArgs) -> None:
        """Repeat an interrupt that Python has dropped because it was raised in a destructor."""
        if self.first is None or ignored.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(ignored)
            return
        self._check_in(_AGAIN_S)

    def _raise(self, number: int, frame: object) -> None:
        if self._is_gentle(number):
            assert self._grace is not None
            self.asked = number
            self._check_in(self._grace[0].seconds)
            self._grace[1]()
            return
        first, self.first = self.first is None, self.first or number
        self._check_in(_CHECK_S)
        ending = isinstance(sys.exc_info()[1], RoundelayError)  # on its way out, through contexts still to be left
        if not (first and ending and number == signal.SIGTERM and env.is_launched()):
            raise KeyboardInterrupt

    def _is_gentle(self, number: int) -> bool:
        """Whether a signal requests a graceful end, and there are time and something to save."""
        if self._grace is None or self.asked is not None or self.first is not None:
            return False
        grace, _, ready = self._grace
        return grace.seconds > 0 and number in grace.numbers and ready()

    def _check_in(self, seconds: float) -> None:
        signal.signal(signal.SIGALRM, self._check)  # each time: other code may have installed its own handler
        signal.setitimer(signal.ITIMER_REAL, seconds)

    def _check(self, number: int, frame: object) -> None:
        """Interrupt again if the main thread continues without handling an exception."""
        if self._left:  # the timer had fired already
            return
        self.first = self.first or self.asked
        self._check_in(_CHECK_S)
        if sys.exc_info()[1] is None:
            raise KeyboardInterrupt


SIGNALS = Signals()
"""The handlers of this process."""
