"""What workers report, in whatever order it arrives."""

from __future__ import annotations

from typing import Any

from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.processes.worker_messages import Report
from roundelay.session.run_record import RunRecord


def loss(batch: int, replica: int, rows: int) -> Report:
    """One of two replicas reports its micro-batch of a batch of four rows, or of two."""
    header = MicroBatch(batch, batch, 0, 1, 2, rows, 0, 0, 0, replica=replica, replicas=2)
    data: dict[str, Any] = {"g": header.number, "loss": 1.0, "count": 0.0, "header": header.numbers()}
    return Report("loss", replica, data)


def test_updates_are_reported_in_their_order_although_a_short_batch_is_complete_before() -> None:
    told: list[int] = []
    record = RunRecord(2, lambda event: told.append(event.update), lambda update: (0.1,), first=3)  # type: ignore[union-attr]
    record.take(loss(3, 0, rows=4))
    record.take(loss(4, 0, rows=2))  # only the first replica has rows of it
    assert told == []
    record.take(loss(3, 1, rows=4))
    assert told == [3, 4]
