"""A thread for work that a training does not wait for: writing checkpoints and evaluating."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import final

from roundelay.runtime.processes.determinism import use_threads

Work = Callable[[], None]


@final
class Background:
    """Does one piece of work after the other. The thread starts with the first: workers are forked before that.

    After an error the remaining work is dropped, and the next call raises the error.

    Args:
        threads: intra-op threads with which it computes.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._waiting: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._dropping = False

    def submit(self, work: Work) -> None:
        """Do ``work`` after everything that was submitted before."""
        self.check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name="background", daemon=True)
            self._thread.start()
        self._waiting.put(work)

    def check(self) -> None:
        """Raise the error of the work so far, if there was one."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until everything is done; raise its error if there was one."""
        self._end(None)
        self.check()

    def abandon(self, seconds: float) -> None:
        """Drop the work that waits, and wait at most ``seconds`` for the current one; the thread is a daemon."""
        self._dropping = True
        self._end(seconds)

    def _end(self, seconds: float | None) -> None:
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(seconds)

    def _main(self) -> None:
        use_threads(self._threads)  # its own; torch's deterministic forms are the process's, and the run's to ask for
        while (work := self._waiting.get()) is not None:
            if self._dropping or self._error is not None:
                continue
            try:
                work()
            except BaseException as error:  # raised again in the caller's thread
                self._error = error
