"""What waits at a queue is woken by an item or by its deadline, however short that is."""

from __future__ import annotations

import queue
import threading
import time

import pytest

from roundelay.transport.checked_endpoint import next_item

TRIES = 20_000
"""Of waits of a tenth of a microsecond; where Python's own `get` is called, one in two thousand never ends."""


def test_no_wait_outlasts_its_deadline() -> None:
    source: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: list[int] = []

    def main() -> None:
        for number in range(TRIES):
            with pytest.raises(queue.Empty):
                next_item(source, 1e-7)
            source.put(number)
            assert next_item(source, 0.0) == number
        done.append(TRIES)

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    thread.join(60)
    assert done == [TRIES]


def test_an_item_ends_a_wait() -> None:
    source: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Timer(0.05, source.put, ["come"]).start()
    assert next_item(source, 30.0) == "come"


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 0.05])
def test_an_empty_queue_is_told(timeout_s: float) -> None:
    start = time.monotonic()
    with pytest.raises(queue.Empty):
        next_item(queue.SimpleQueue(), timeout_s)
    assert time.monotonic() - start >= timeout_s
