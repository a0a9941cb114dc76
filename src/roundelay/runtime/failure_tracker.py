"""Who has finished, who has failed, and when to stop waiting. It does no input or output and reads no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from roundelay import errors
from roundelay.errors import RoundelayError
from roundelay.runtime.user_errors import unexpected
from roundelay.runtime.worker_messages import Report

Listener = Callable[[Report], None]

GRACE_S = 1.0
"""Seconds between the first news of a worker that is lost or silent and the end of the wait for what the others say."""


@final
class FailureTracker:
    """Counts reports until the run is over.

    The run is over when every worker has ended; when one has failed by what it met itself; or, if workers have only
    been lost or waited for in vain, a little after the first was: the others may tell the cause.

    Args:
        num_workers: how many there are.
        listen: told of every report but failures.
    """

    def __init__(self, num_workers: int, listen: Listener) -> None:
        self.num_workers, self.listen = num_workers, listen
        self.ended: set[int] = set()
        self.failures: list[Report] = []
        self._first_failure_s: float | None = None

    def over(self, now_s: float) -> bool:
        """Whether there is nothing to wait for at the time ``now_s``, of any monotonic clock."""
        if len(self.ended) == self.num_workers or any(_rank(f) == 0 for f in self.failures):
            return True
        if self.failures and self._first_failure_s is None:
            self._first_failure_s = now_s
        return self._first_failure_s is not None and now_s - self._first_failure_s > GRACE_S

    def take(self, report: Report) -> None:
        """Count a report and pass it on."""
        self.late(report)
        if report.kind in ("finished", "failed"):
            self.ended.add(report.worker)
        if report.kind != "failed":
            self.listen(report)

    def late(self, report: Report) -> None:
        """Keep a failure that came after the end."""
        if report.kind == "failed":
            self.failures.append(report)

    def raise_failure(self) -> None:
        """Raise the first cause, if there is one: what a worker met itself before what it met in another.

        Of a worker that is gone, its own death (with its signal) comes before what the others saw of it. If all that
        is known is a wait, who has told nothing is named: once one has given up, the others who wait lose it, and tell.
        """
        ordered = sorted(self.failures, key=_rank)
        if not ordered:
            return
        error = restored(ordered[0])
        heard = self.ended | {failed.worker for failed in self.failures if _rank(failed) == 2}
        busy = [str(worker) for worker in range(self.num_workers) if worker not in heard]
        if _rank(ordered[0]) == 2 and busy:
            which = f"worker{'s' * (len(busy) > 1)} {', '.join(busy)}, which told of no wait"
            error.remedy = f"See what hangs or takes long in {which}; raise deadline_s if that may be."
        raise error


def _rank(failure: Report) -> int:
    """0 for what a worker met itself, 1 for its death, 2 for its wait for others, 3 for what follows from such things.

    A wait is that for a message, but also for the others to be met or to take what was sent. What follows is another
    worker that it has lost, or its endpoint, which was aborted when the run was over.
    """
    kind, subject = failure.data["kind"], failure.data["subject"]
    if kind == "WorkerLostError":
        own = f"worker {failure.worker} "
        return 1 if subject.startswith(own) and not subject.startswith(f"{own}sending to ") else 3
    return 2 if kind == "DeadlineError" and f"{subject} ".startswith(f"worker {failure.worker} ") else 0


def failure(worker: int, error: RoundelayError, trace: str = "") -> Report:
    """An error as a report, which :func:`restored` makes an error again."""
    what = {"subject": error.subject, "got": error.got, "expected": error.expected, "remedy": error.remedy}
    return Report("failed", worker, {"kind": type(error).__name__, **what, "trace": trace})


def instead(report: Report, error: Exception) -> Report:
    """Why a report cannot be sent, in its place: a state of which no copy is to be had, or that JSON cannot hold."""
    told = error if isinstance(error, RoundelayError) else unexpected(f"worker {report.worker}, {report.kind}", error)
    return failure(report.worker, told)


def restored(report: Report) -> RoundelayError:
    """The error that a ``failed`` report tells of."""
    data = report.data
    kind = getattr(errors, data["kind"])
    error: RoundelayError = kind(data["subject"], got=data["got"], expected=data["expected"], remedy=data["remedy"])
    error.add_note(str(data["trace"]))
    return error
