"""Discard what a person's code writes into its open files while it is called for trial: the run calls it again."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import IOBase
from pathlib import Path
from typing import Any

_OF_THE_PROCESS = 3
"""Descriptors below are those of the terminal."""


@contextmanager
def discarding_writes(files: Iterable[IOBase]) -> Iterator[None]:
    """Within the block, what is written into these files goes nowhere; into those that are on a disk.

    Args:
        files: open or closed ones.
    """
    with ExitStack() as stack:
        for file in files:
            with suppress(OSError, ValueError):  # closed, or without a descriptor
                descriptor = file.fileno()
                if _is_written(descriptor):
                    _flush(file)
                    kept = os.dup(descriptor)
                    stack.callback(_put_back, file, descriptor, kept)
                    _to_nowhere(descriptor)
        yield


def discard_open_files(except_for: int) -> None:
    """Let all that this process writes into files on a disk, opened before, go nowhere: for a child that ends soon."""
    with suppress(OSError):
        for name in sorted(path.name for path in Path("/proc/self/fd").iterdir()):
            with suppress(OSError):
                if int(name) != except_for and _is_written(int(name)):
                    _to_nowhere(int(name))


def _is_written(descriptor: int) -> bool:
    """Whether it belongs to a file on a disk that was opened for writing alone, as logs are.

    What may be read as well, such as shared memory or a database, is read in trials too.
    """
    if descriptor < _OF_THE_PROCESS or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY)


def _to_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor, inheritable=os.get_inheritable(descriptor))
    os.close(nowhere)


def _put_back(file: IOBase, descriptor: int, kept: int) -> None:
    _flush(file)
    os.dup2(kept, descriptor, inheritable=False)
    os.close(kept)


def _flush(file: Any) -> None:
    with suppress(OSError, ValueError):
        file.flush()
