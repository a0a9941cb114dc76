"""Turns errors of a worker or a loader's process into messages: the user's own with their place, and lack of memory."""

from __future__ import annotations

import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

from roundelay.errors import JobError, RoundelayError, RunError, UserCodeError
from roundelay.reach.source_lines import INSIDE
from roundelay.runtime.processes.determinism import nondeterministic
from roundelay.runtime.processes.device_failure import device_error


def explain_error(error: BaseException, where: str) -> BaseException:
    """Add the place to an error raised by an instruction, if it comes from the user's data, model or optimizer.

    Args:
        error: as it was raised.
        where: the stage, the instruction and the micro-batch.

    Returns:
        the error with its place; other errors of Roundelay and MemoryErrors unchanged.
    """
    if isinstance(error, JobError):
        what = f"{where}: {error.subject}"
        return JobError(what, got=error.got, expected=error.expected, remedy=error.remedy)
    return error if isinstance(error, (RoundelayError, MemoryError)) else unexpected(where, error)


def unexpected(subject: str, error: BaseException) -> RunError:
    """Describe an unexpected exception, with the last line of the user's code in its traceback."""
    known = out_of_threads(subject, error) or nondeterministic(subject, error) or device_error(subject, error)
    if known is not None:
        return known
    return UserCodeError(
        subject,
        got=_summary(error),
        expected="no exception",
        remedy="Correct the model, loss or optimizer; ROUNDELAY_DEBUG=1 shows the traceback.",
    )


def out_of_threads(subject: str, error: BaseException) -> UserCodeError | None:
    """Describe a failure to start a thread; None if ``error`` is something else."""
    if not isinstance(error, RuntimeError) or "can't start new thread" not in str(error):
        return None
    return UserCodeError(
        subject,
        got="the system cannot start another thread",
        expected="room for a handful of threads in each process",
        remedy="Raise the limit of processes and threads (`ulimit -u`, docker run --pids-limit, Slurm's), or give "
        "fewer --workers and fewer processes of the loader.",
    )


def loading_failed(what: str, error: BaseException, processes: Sequence[BaseProcess] = ()) -> UserCodeError:
    """Describe an error raised by the user's loader, or the end of one of its processes.

    Args:
        what: what was requested of it.
        error: as it was raised in this process; torch puts the traceback of a loader's process into its text.
        processes: of the loader.
    """
    forwarded = _FORWARDED.search(str(error))
    if forwarded is not None:
        got = f"{_summary_of_traceback(forwarded['trace'])}, {forwarded['where']}"
    elif (ended := _ended_process(error, processes)) is not None:
        got = ended
    else:
        got = _summary(error)
    text = f"{type(error).__name__}: {error} {got}"
    return UserCodeError(
        what,
        got=got,
        expected="batches of tensors until the epoch ends",
        remedy=next(remedy for words, remedy in _REMEDIES if any(word in text for word in words)),
    )


_FORWARDED = re.compile(r"Caught \S+ (?P<where>in [^\n]*)\.\nOriginal (?P<trace>Traceback .*)", re.DOTALL)
"""How torch forwards an exception of a loader's process or thread."""

_FRAME = re.compile(r'^ +File "(?P<file>.*)", line (?P<line>\d+)(, in .*)?$', re.MULTILINE)
"""A frame in a printed traceback."""

_SPAWN_RULES = (
    "A process started by spawn or forkserver imports the job file and unpickles the data set: the file's name must "
    "have no dot and not be another module's; define classes and functions at the top level, not inside job(), and use "
    "no lambda"
)

_REMEDIES = (
    (
        ("Too many open files", "ancdata"),
        "Every tensor that a DataLoader's process hands over is an open file: raise the limit (`ulimit -n 4096`), or "
        'call torch.multiprocessing.set_sharing_strategy("file_system") in the job file.',
    ),
    (
        ("shared memory", "torch_shm", "</torch_", "SIGBUS", "Bus error", "No space left on device"),
        "A DataLoader's processes hand batches over in /dev/shm: make it larger (`docker run --shm-size=1g`, or "
        "`mount -o remount,size=1g /dev/shm`), or use DataLoader(num_workers=0). `roundelay doctor` shows its size; "
        "if it is large enough, a disk is full.",
    ),
    (
        ("SIGKILL",),
        "If the system killed it for memory, use fewer num_workers or a smaller prefetch_factor; "
        "DataLoader(num_workers=0) starts no process.",
    ),
    (
        ("was killed by SIG", "has ended with"),
        f"Check its output. {_SPAWN_RULES}; DataLoader(num_workers=0) starts no process and shows where loading fails.",
    ),
    (
        ("PicklingError", "an't pickle", "annot pickle", "an't get local object", "bootstrapping phase"),
        f'{_SPAWN_RULES}. Or use DataLoader(multiprocessing_context="fork").',
    ),
    (("",), "The error is in the job's data loading; run it alone to see it."),
)
"""Fragments of a loader's error and the remedy; the first match counts."""


def _summary(error: BaseException) -> str:
    """Type, shortened message, and place of an error."""
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}: {_shorten(str(error))}{_place(frames)}"


def _summary_of_traceback(trace: str) -> str:
    """Summarize the last exception of a printed traceback."""
    own = trace[trace.rindex("Traceback (most recent call last):") :]
    frames = [(frame["file"], int(frame["line"])) for frame in _FRAME.finditer(own)]
    message = re.search(r"^(?=\S).*", own.partition("\n")[2], re.MULTILINE | re.DOTALL)
    return f"{_shorten(message[0] if message else '')}{_place(frames)}"


def _shorten(text: str) -> str:
    """The first lines of a message."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    cut = "\n".join(lines[:3])[:300]
    return cut if cut == "\n".join(lines) else f"{cut} ..."


def _place(frames: Sequence[tuple[str, int]]) -> str:
    """The innermost frame of the user's code: preferably not of an installed package, never of torch or Roundelay."""
    outside = [(file, line) for file, line in frames if not file.startswith(INSIDE)]
    own = [(file, line) for file, line in outside if not file.startswith(_INSTALLED)]
    return next((f" at {file}:{line}" for file, line in reversed(own or outside)), "")


_INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


def _ended_process(error: BaseException, processes: Sequence[BaseProcess]) -> str | None:
    """Describe the end of a loader's process; None if that is not the cause of the error."""
    if not isinstance(error, (OSError, EOFError, RuntimeError)):
        return None
    deadline = time.monotonic() + (_EXIT_DELAY_S if processes else 0.0)
    while not (dead := [process for process in processes if process.exitcode]) and time.monotonic() < deadline:
        time.sleep(0.01)
    if not dead:
        return None
    code = dead[0].exitcode or 0
    known = {number.value: number.name for number in signal.Signals}
    how = f"has ended with exit code {code}" if code > 0 else f"was killed by {known.get(-code, f'SIG {-code}')}"
    return f"{type(error).__name__}, as process {dead[0].pid} of the DataLoader {how}"


_EXIT_DELAY_S = 0.2
"""Seconds by which a process's exit status may follow the closing of its connections."""


def out_of_memory(subject: str, error: MemoryError) -> UserCodeError:
    """Describe a MemoryError."""
    return UserCodeError(
        subject,
        got=f"out of memory {error}",
        expected="memory for weights, tapes and messages",
        remedy='Use smaller micro-batches, `recompute = ["all"]` in the plan, or more workers.',
    )
