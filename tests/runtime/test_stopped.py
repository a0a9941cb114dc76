"""What the launcher of forked workers waits for, and what it does not."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import cast

import pytest

from roundelay.errors import WorkerLostError
from roundelay.launching import forked_workers
from roundelay.runtime.processes.worker_messages import Report, Reporter
from roundelay.runtime.worker import Task
from roundelay.transport.endpoint import Endpoint

PATIENCE_S = 20.0


def test_a_worker_stopped_when_all_others_have_ended_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def finishes_or_stops(task: Task, worker: int, endpoint: Endpoint, report: Reporter) -> None:
        if worker == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1.0)  # another thread may have taken the signal, and stops this one a moment later
        report(Report("finished", worker, {}))

    monkeypatch.setattr(forked_workers, "work", finishes_or_stops)
    monkeypatch.setattr(forked_workers, "STOPPED_S", 0.2)
    monkeypatch.setattr(forked_workers, "END_S", PATIENCE_S)
    began = time.monotonic()
    with pytest.raises(WorkerLostError, match="worker 1"):
        forked_workers._run(
            cast(Task, SimpleNamespace(works=(None, None), prepare=None)),
            lambda report: None,
            lambda worker: cast(Endpoint, None),
            lambda: None,
        )
    assert time.monotonic() - began < PATIENCE_S
