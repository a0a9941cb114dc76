"""What went wrong in a worker, in words: the person's own errors with their place, and memory that ran out."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from roundelay.errors import JobError, RoundelayError, UserCodeError


def explained(error: BaseException, where: str) -> BaseException:
    """What an instruction has raised; with its place, if it comes from the person's data, model or optimizer.

    Args:
        error: as it was raised; itself if it explains itself.
        where: the stage, the instruction and the micro-batch.
    """
    if isinstance(error, JobError):
        what = f"{where}: {error.subject}"
        return JobError(what, got=error.got, expected=error.expected, remedy=error.remedy)
    return error if isinstance(error, (RoundelayError, MemoryError)) else unexpected(where, error)


def unexpected(subject: str, error: BaseException) -> UserCodeError:
    """An error of no kind that is raised on purpose, with the last line of the person's code that it came through."""
    if (known := out_of_threads(subject, error)) is not None:
        return known
    inside = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(inside)]
    where = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return UserCodeError(
        subject,
        got=f"{type(error).__name__}: {str(error).strip()[:500]}{where}",
        expected="an instruction that ends well",
        remedy="Correct the model, loss or optimizer; ROUNDELAY_DEBUG=1 shows the traceback.",
    )


def out_of_threads(subject: str, error: BaseException) -> UserCodeError | None:
    """The system starts no further thread; None if that is not what went wrong."""
    if not isinstance(error, RuntimeError) or "can't start new thread" not in str(error):
        return None
    return UserCodeError(
        subject,
        got="the system starts no further thread",
        expected="room for a handful of threads in each process",
        remedy="Raise the limit of processes and threads (`ulimit -u`, docker run --pids-limit, Slurm's), or give "
        "fewer --workers and fewer processes of the loader.",
    )


def out_of_memory(subject: str, error: MemoryError) -> UserCodeError:
    """A process had no memory left."""
    return UserCodeError(
        subject,
        got=f"out of memory {error}",
        expected="memory for weights, tapes and messages",
        remedy='Use smaller micro-batches, `recompute = ["all"]` in the plan, or more workers.',
    )
