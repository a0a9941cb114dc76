"""What went wrong in a worker, in words: the person's own errors with their place, and memory that ran out."""

from __future__ import annotations

import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from roundelay.errors import JobError, RoundelayError, UserCodeError


def explain_error(error: BaseException, where: str) -> BaseException:
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
    return UserCodeError(
        subject,
        got=_told(error),
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


def loading_failed(what: str, error: BaseException, processes: Sequence[BaseProcess] = ()) -> UserCodeError:
    """What the person's loader has raised, or what has become of a process that it has started.

    Args:
        what: what it was asked for.
        error: as it was raised in this process; torch puts the traceback of a loader's process into its text.
        processes: those that the loader has.
    """
    passed_on = _PASSED_ON.search(str(error))
    if passed_on is not None:
        got = f"{_last_of(passed_on['trace'])}, {passed_on['where']}"
    elif (ended := _ended(error, processes)) is not None:
        got = ended
    else:
        got = _told(error)
    text = f"{type(error).__name__}: {error} {got}"
    return UserCodeError(
        what,
        got=got,
        expected="batches of tensors until the epoch ends",
        remedy=next(remedy for words, remedy in _REMEDIES if any(word in text for word in words)),
    )


_PASSED_ON = re.compile(r"Caught \S+ (?P<where>in [^\n]*)\.\nOriginal (?P<trace>Traceback .*)", re.DOTALL)
"""How torch passes on what was raised in a process or thread of a loader."""

_FRAME = re.compile(r'^ +File "(?P<file>.*)", line (?P<line>\d+)(, in .*)?$', re.MULTILINE)
"""A place in a printed traceback."""

_SENT = (
    "A process by spawn or forkserver imports the job file, whose name must have no dot, nor be another module's, and "
    "is sent the data set: put its classes and functions at the top level, not within job(), and no lambda"
)

_REMEDIES = (
    (
        ("Too many open files", "ancdata"),
        "Every tensor that a DataLoader's process hands over is an open file: raise the limit (`ulimit -n 4096`), or "
        'call torch.multiprocessing.set_sharing_strategy("file_system") in the job file.',
    ),
    (
        ("shared memory", "torch_shm", "</torch_", "SIGBUS", "Bus error", "No space left on device"),
        "What a DataLoader's processes hand over lies in /dev/shm: make it larger (`docker run --shm-size=1g`, or "
        "`mount -o remount,size=1g /dev/shm`), or use DataLoader(num_workers=0). `roundelay doctor` shows its size; "
        "where it is large enough, a disk is full.",
    ),
    (
        ("SIGKILL",),
        "If the system killed it for memory, use fewer num_workers or a smaller prefetch_factor; "
        "DataLoader(num_workers=0) starts no process.",
    ),
    (
        ("was killed by SIG", "has ended with"),
        f"See what it has printed. {_SENT}; DataLoader(num_workers=0) starts none, and shows where loading fails.",
    ),
    (
        ("PicklingError", "an't pickle", "annot pickle", "an't get local object", "bootstrapping phase"),
        f'{_SENT}. Or use DataLoader(multiprocessing_context="fork").',
    ),
    (("",), "The error is in the job's data loading; run it alone to see it."),
)
"""Words in an error of a loader, and what helps then: the first whose words are there."""


def _told(error: BaseException) -> str:
    """Kind, message and place of an error, as short as a screen wants it."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}: {_brief(str(error))}{_place(frames)}"


def _last_of(trace: str) -> str:
    """The same of a printed traceback: of the last one in it, where errors have led to others."""
    own = trace[trace.rindex("Traceback (most recent call last):") :]
    frames = [(found["file"], int(found["line"])) for found in _FRAME.finditer(own)]
    message = re.search(r"^(?=\S).*", own.partition("\n")[2], re.MULTILINE | re.DOTALL)
    return f"{_brief(message[0] if message else '')}{_place(frames)}"


def _brief(text: str) -> str:
    """The first lines of a message."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    cut = "\n".join(lines[:3])[:300]
    return cut if cut == "\n".join(lines) else f"{cut} ..."


def _place(frames: Sequence[tuple[str, int]]) -> str:
    """Where the person's code was last: what is installed is rather not theirs, torch and this package never."""
    outside = [(file, line) for file, line in frames if not file.startswith(_NEVER_THEIRS)]
    own = [(file, line) for file, line in outside if not file.startswith(_INSTALLED)]
    return next((f" at {file}:{line}" for file, line in reversed(own or outside)), "")


_NEVER_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<")
_INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


def _ended(error: BaseException, processes: Sequence[BaseProcess]) -> str | None:
    """That a process of the loader has ended, if that is what the error comes from."""
    if not isinstance(error, (OSError, EOFError, RuntimeError)):
        return None
    deadline = time.monotonic() + (_BEHIND_S if processes else 0.0)
    while not (gone := [process for process in processes if process.exitcode]) and time.monotonic() < deadline:
        time.sleep(0.01)
    if not gone:
        return None
    code = gone[0].exitcode or 0
    known = {number.value: number.name for number in signal.Signals}
    how = f"has ended with exit code {code}" if code > 0 else f"was killed by {known.get(-code, f'SIG {-code}')}"
    return f"{type(error).__name__}, as process {gone[0].pid} of the DataLoader {how}"


_BEHIND_S = 0.2
"""Seconds by which the end of a process may be behind that of its connections."""


def out_of_memory(subject: str, error: MemoryError) -> UserCodeError:
    """A process had no memory left."""
    return UserCodeError(
        subject,
        got=f"out of memory {error}",
        expected="memory for weights, tapes and messages",
        remedy='Use smaller micro-batches, `recompute = ["all"]` in the plan, or more workers.',
    )
