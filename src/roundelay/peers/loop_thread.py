"""An event loop in a thread of its own, beside a trainer that must not wait for the network."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from contextlib import suppress
from typing import Any, TypeVar, final

from roundelay.errors import DeadlineError

CLOSE_S = 5.0
"""Seconds that the loop has to end."""

ENDING_S = 0.5
"""Seconds of these in which tasks may end by themselves."""

R = TypeVar("R")


@final
class LoopThread:
    """Runs coroutines; all servers of a process may share one.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, R], deadline_s: float) -> R:
        """Return what a coroutine returns; called from another thread.

        Raises:
            DeadlineError: it took too long, and is cancelled.
        """
        running = self.begin(coroutine)
        try:
            return running.result(deadline_s)
        except LateError:
            running.cancel()
            raise DeadlineError(
                f"thread {self._thread.name}",
                got="no end of what it was asked to do",
                expected=f"one within {deadline_s:g} s",
                remedy="Check whether the machine is overloaded.",
            ) from None

    def begin(self, coroutine: Coroutine[Any, Any, R]) -> Future[R]:
        """Start a coroutine; called from another thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, function: Callable[..., object], *given: object) -> None:
        """Call a function in the loop, soon; called from another thread."""
        self._loop.call_soon_threadsafe(function, *given)

    def close(self) -> None:
        """Cancel what still runs, and end the thread; closing it again does nothing."""
        if not self._loop.is_closed():
            with suppress(DeadlineError):
                self.run(_end_others(), CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_S)
            if not self._thread.is_alive():
                self._loop.close()


async def _end_others() -> None:
    """Let the tasks that are ending end, and cancel those that are not."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if not others:
        return
    _, staying = await asyncio.wait(others, timeout=ENDING_S)
    for task in staying:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
