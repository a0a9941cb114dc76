"""Work that a training does not wait for, in order, in one thread: writing checkpoints and evaluating."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import final

from roundelay.api.torch_scope import one_thread

Work = Callable[[], None]


@final
class Background:
    """Does one piece of work after the other. The thread begins with the first piece: what forks comes before it.

    The first error ends it: what waits is dropped, and the error is raised by the next call.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._dropping = False

    def submit(self, work: Work) -> None:
        """Have ``work`` done when everything before it is."""
        self.check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="background", daemon=True)
            self._thread.start()
        self._waiting.put(work)

    def check(self) -> None:
        """Raise the error of what has been done so far, if there was one."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until everything is done; raise the error if there was one."""
        self._end(None)
        self.check()

    def abandon(self, seconds: float) -> None:
        """Drop what waits, and give what runs so many seconds; then it goes on as a daemon, which dies with us."""
        self._dropping = True
        self._end(seconds)

    def _end(self, seconds: float | None) -> None:
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(seconds)

    def _main(self) -> None:
        with one_thread():
            while (work := self._waiting.get()) is not None:
                if self._dropping or self._error is not None:
                    continue
                try:
                    work()
                except BaseException as error:  # raised again in the thread that asks
                    self._error = error
