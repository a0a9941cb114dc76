"""Every error that Roundelay raises on purpose.

::

    RoundelayError
    ├── UsageError            what the person gave cannot be used: exit code 2
    │   ├── JobError          the job file, its model, loss, data or optimizer
    │   ├── CaptureError      the model cannot be exported or cut
    │   ├── FidelityError     the captured job does not train as plain PyTorch trains it
    │   ├── PlanError         a plan that is unreadable, does not fit, or breaks a law of its rule
    │   └── CheckpointError   a checkpoint that is missing, damaged or of another model
    ├── RunError              the run itself failed: exit code 1
    │   ├── UserCodeError     an exception in the person's own code on a worker
    │   ├── DivergedError     a loss that is not a number
    │   ├── DeviceError       a device without enough memory, or one that has failed
    │   ├── NondeterministicError  an operation that has no deterministic form
    │   ├── WorkerLostError   a worker ended or stopped answering
    │   │   ├── PeerLostError     a machine of a run that others have joined did, and which one is known
    │   │   └── UnfitMessageError a worker sent another what is no message, or none of the plan's
    │   └── DeadlineError     a wait that outlasted its deadline
    └── InternalError         a law of the house was broken: a bug of ours

Each carries the same four things, so that one screen can tell them: *subject*, *got*, *expected*, *remedy*.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class RoundelayError(Exception):
    """Base of all errors; ``str(error)`` is one readable paragraph.

    Args:
        subject: what the error is about, with stage and micro-batch where they matter.
        got: what was found.
        expected: what would have been right.
        remedy: what the person can do about it.
    """

    exit_code = 1

    def __init__(self, subject: str, *, got: str, expected: str, remedy: str) -> None:
        super().__init__(subject, got, expected, remedy)
        self.subject = subject
        self.got = got
        self.expected = expected
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.subject}: got {self.got}; expected {self.expected}. {self.remedy}"


class UsageError(RoundelayError):
    """What the person gave cannot be used."""

    exit_code = 2


class JobError(UsageError):
    """The job file, its model, loss, data or optimizer cannot be used."""


class CaptureError(UsageError):
    """The model cannot be exported, or cannot be cut as asked."""


class FidelityError(UsageError):
    """The captured job does not train as plain PyTorch trains it."""


class PlanError(UsageError):
    """The plan is unreadable, belongs to another model, or breaks a law of its rule."""


class CheckpointError(UsageError):
    """The checkpoint is missing, damaged, or belongs to another model."""


class RunError(RoundelayError):
    """The run itself failed."""


class UserCodeError(RunError):
    """The person's own code raised on a worker."""


class DivergedError(RunError):
    """A loss is not a finite number."""


class DeviceError(RunError):
    """A device has not enough memory, or has failed."""


class NondeterministicError(RunError):
    """An operation gives other bits whenever it is repeated, and was asked not to."""


class WorkerLostError(RunError):
    """A worker ended or stopped answering."""


class PeerLostError(WorkerLostError):
    """A machine of a run that others have joined ended or stopped answering; the subject is its name."""

    @staticmethod
    def of(peer: str, cause: str) -> PeerLostError:
        """The loss of a peer, and what is known of it in one line."""
        return PeerLostError(
            peer,
            got=cause,
            expected="a machine that goes on until the run has ended",
            remedy="Check that machine and the network; go on with `roundelay host --from` the run's folder.",
        )


class UnfitMessageError(WorkerLostError):
    """A worker sent another what is no message, or what the plan does not have it send; the subject is its number."""


class DeadlineError(RunError):
    """A wait outlasted its deadline."""


class InternalError(RoundelayError):
    """A law of the house was broken: a bug in Roundelay itself."""


class PlanWarning(UserWarning):
    """A plan trains something else than whole batches in plain PyTorch do, as was asked for."""


_FEW = 4


def counted(number: int, word: str) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def listed(names: Sequence[str]) -> str:
    """The names if they are few, else the first of them, and how many there are."""
    shown = ", ".join(names[:_FEW])
    return shown if len(names) <= _FEW else f"{shown}, ... ({len(names)} in all)"


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``Did you mean 1f1b? `` for a name that is nearly one of those known; else nothing."""
    near = difflib.get_close_matches(str(name), list(known), n=2)
    return f"Did you mean {' or '.join(near)}? " if near else ""
