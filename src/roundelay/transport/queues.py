"""Wait for an item of a queue, with a deadline that holds.

`SimpleQueue.get(timeout=...)` of CPython 3.11 may wait forever: after a first, non-blocking attempt at its lock it
computes the time left without checking whether that has become negative, which the lock takes as "no timeout". A
`get_nowait` before it leaves the lock held, and that path is not taken.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import TypeVar

_Item = TypeVar("_Item")


def next_item(source: SimpleQueue[_Item], timeout_s: float) -> _Item:
    """Return the next item of a queue from which no other thread takes.

    Raises:
        queue.Empty: none came within `timeout_s` seconds.
    """
    try:
        return source.get_nowait()
    except Empty:  # the lock is held now
        return source.get(timeout=max(0.0, timeout_s))
