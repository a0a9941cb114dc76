"""Waiting at a queue, with a deadline that is kept.

`SimpleQueue.get(timeout=...)` of CPython 3.11 may wait for ever. It first tries its lock without waiting; where that
succeeds on an empty queue it computes the time left, and does not look whether that has become negative, which the lock
takes for "without end". A try that does not wait, made before, leaves the lock held, and that path is not taken.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import TypeVar

_Item = TypeVar("_Item")


def next_item(source: SimpleQueue[_Item], timeout_s: float) -> _Item:
    """The next item of a queue from which no other thread takes.

    Raises:
        queue.Empty: none came within `timeout_s` seconds.
    """
    try:
        return source.get_nowait()
    except Empty:  # the lock is held now
        return source.get(timeout=max(0.0, timeout_s))
