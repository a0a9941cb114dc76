"""A member of a party that does not lead."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest

from roundelay.runtime import party as members
from roundelay.runtime.party import Party, attend
from roundelay.runtime.report import Report, Reporter
from roundelay.runtime.worker import Task, unchanged
from roundelay.transport.contract import Endpoint
from roundelay.transport.memory import memory_endpoints


class _Member:
    """Worker 1 of two, whose connections are queues."""

    rank, leads, others = 1, False, (0,)

    def __init__(self) -> None:
        self.ends = [memory_endpoints(2), memory_endpoints(2)]

    def endpoint(self, line: str, deadline_s: float) -> Endpoint:
        return self.ends[0][1]

    def data(self, plan: object, device: object) -> Endpoint:
        return self.ends[1][1]

    def tell_where(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["finished", "failed"])
def test_a_member_does_not_end_before_its_worker_has_left(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left = threading.Event()

    def tells_and_leaves_late(task: Task, rank: int, endpoint: Endpoint, report: Reporter, device: object) -> None:
        report(Report(kind, rank, {}))
        time.sleep(0.3)
        endpoint.abort("it has left")
        left.set()

    monkeypatch.setattr(members, "work", tells_and_leaves_late)
    member = _Member()
    threading.Thread(target=member.ends[0][0].close, daemon=True).start()  # the leader's end of the control line
    task = SimpleNamespace(plan=SimpleNamespace(devices=("cpu", "cpu"), deadline_s=10.0))
    assert attend(cast(Task, task), cast(Party, member), unchanged) == (kind == "finished")
    assert left.is_set(), "threads that outlive the main one abort the process while the interpreter shuts down"
