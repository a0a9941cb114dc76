"""One way to say that a folder or a file of data cannot be used, and where a job's data lies."""

from __future__ import annotations

import os
from pathlib import Path

from roundelay.errors import JobError


def refused(path: Path, got: str, expected: str, remedy: str) -> JobError:
    """The error about a folder or file of data."""
    return JobError(f"data {path}", got=got, expected=expected, remedy=remedy)


def existing(path: Path, expected: str, remedy: str) -> Path:
    """The path.

    Raises:
        JobError: nothing is there.
    """
    if not path.exists():
        raise refused(path, "nothing there", expected, remedy)
    return path


def folder_named(variable: str, example: str) -> Path:
    """The folder that an environment variable names.

    Args:
        variable: its name.
        example: a folder that would do, for the message.

    Raises:
        JobError: it is not set.
    """
    name = os.environ.get(variable, "")
    if not name:
        raise JobError(
            f"environment variable {variable}",
            got="none",
            expected="the folder of the data",
            remedy=f"Begin the command with {variable}={example}.",
        )
    return Path(name).expanduser()


def whole_number(variable: str, default: int) -> int:
    """What an environment variable says, or the default.

    Raises:
        JobError: it is no number above zero.
    """
    text = os.environ.get(variable, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise JobError(
            f"environment variable {variable}",
            got=repr(text),
            expected="a whole number above zero",
            remedy=f"Correct it, or leave it out: then it is {default}.",
        )
    return int(text)
