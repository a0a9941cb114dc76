"""What a worker's process says when nobody listens any more."""

from __future__ import annotations

import os
import threading

import pytest

from roundelay.runtime import processes
from roundelay.runtime.report import Report


def test_a_worker_whose_launcher_was_killed_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a moment left, in which a traceback would hide why the launcher was killed."""
    told: list[object] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    reading, writing = os.pipe()
    try:
        os.close(reading)
        sender = processes._Sender(writing)
        sender.put(Report("progress", 0, {}))
        sender.put(Report("progress", 0, {}))
        sender.finish()
    finally:
        os.close(writing)
    assert not told
