"""Tracks which workers have finished or failed, and decides when to stop waiting; does no I/O and reads no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from roundelay.errors import PeerLostError, RoundelayError, WorkerLostError
from roundelay.runtime.processes.worker_messages import Report, error_of

Listener = Callable[[Report], None]

GRACE_S = 1.0
"""Seconds to wait for other workers' reports after the first lost worker or timeout: they may report the cause."""


@final
class FailureTracker:
    """Records reports until the run is over.

    The run is over when every worker has ended; when one has reported an error of its own; when a machine that has
    joined is lost; or, if all reported failures are lost workers and timeouts, :data:`GRACE_S` after the first.

    Args:
        num_workers: number of workers.
        listen: called with every report except failures.
    """

    def __init__(self, num_workers: int, listen: Listener) -> None:
        self.num_workers, self.listen = num_workers, listen
        self.ended: set[int] = set()
        self.failures: list[Report] = []
        self._first_failure_s: float | None = None

    def is_over(self, now_s: float) -> bool:
        """Whether the run is over at the time ``now_s`` of a monotonic clock."""
        if len(self.ended) == self.num_workers or any(_is_certain(f) for f in self.failures):
            return True
        if self.failures and self._first_failure_s is None:
            self._first_failure_s = now_s
        return self._first_failure_s is not None and now_s - self._first_failure_s > GRACE_S

    def add(self, report: Report) -> None:
        """Record a report and pass it to the listener."""
        self.add_failure(report)
        if report.kind in ("finished", "failed"):
            self.ended.add(report.worker)
        if report.kind != "failed":
            self.listen(report)

    def add_failure(self, report: Report) -> None:
        """Record a report if it is a failure; also used for reports that arrive after the end."""
        if report.kind == "failed":
            self.failures.append(report)

    def raise_failure(self) -> None:
        """Raise the first cause of the failures, if there are any."""
        if (first := self.first_cause()) is not None:
            raise first[1]

    def first_cause(self) -> tuple[int, RoundelayError] | None:
        """Who has reported the first cause, and the error: a worker's own error before what it saw of others.

        The death of a worker (with its signal) comes before what the others saw of it. If there are only timeouts, the
        remedy names the workers that reported none: when one worker times out, the others that wait lose their
        connection to it and report that.
        """
        ordered = sorted(self.failures, key=_precedence)
        if not ordered:
            return None
        error = error_of(ordered[0])
        reported = self.ended | {failed.worker for failed in self.failures if _precedence(failed) == 2}
        busy = [str(worker) for worker in range(self.num_workers) if worker not in reported]
        if _precedence(ordered[0]) == 2 and busy:
            which = f"worker{'s' * (len(busy) > 1)} {', '.join(busy)}, which reported no timeout"
            error.remedy = f"Check what hangs or takes long in {which}; raise deadline_s if that is expected."
        return ordered[0].worker, error


def _is_certain(failure: Report) -> bool:
    """Whether no later report can be nearer to the cause: a machine that is lost has nothing more to say."""
    return _precedence(failure) == 0 or failure.data["kind"] == PeerLostError.__name__


def _precedence(failure: Report) -> int:
    """Return 0 for a worker's own error, 1 for its death, 2 for a timeout, 3 for a consequence of other failures.

    Timeouts include those of connecting and of sending. Consequences are the loss of another worker, and an endpoint
    that was aborted when the run was over.
    """
    kind, subject = failure.data["kind"], failure.data["subject"]
    if kind == PeerLostError.__name__:
        return 1
    if kind == WorkerLostError.__name__:
        own = f"worker {failure.worker} "
        return 1 if subject.startswith(own) and not subject.startswith(f"{own}sending to ") else 3
    return 2 if kind == "DeadlineError" and f"{subject} ".startswith(f"worker {failure.worker} ") else 0
