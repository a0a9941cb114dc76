"""Workers as threads: whatever interrupts a run, none of them goes on."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

import roundelay
from roundelay.transport.memory import MemoryEndpoint
from tests.api.jobs import make
from tests.runtime.interrupts import handled


def test_an_interrupt_in_the_clean_up_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one, behind that of a person's who presses Ctrl-C twice."""
    abort, aborted, before = MemoryEndpoint.abort, list[object](), threading.active_count()

    def interrupted(endpoint: MemoryEndpoint, why: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            aborted.append(endpoint)
            signal.raise_signal(signal.SIGINT)
        abort(endpoint, why)

    job = make()
    plan = roundelay.plan(job, workers=2, transport="memory")
    monkeypatch.setattr(MemoryEndpoint, "abort", interrupted)
    with handled(signal.SIGINT), pytest.raises(KeyboardInterrupt):
        roundelay.train(job, plan=plan, steps=4000, on_update=lambda update: signal.raise_signal(signal.SIGINT))
    deadline = time.monotonic() + 5.0
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert len(aborted) == 2
