"""Replace files so that a kill, a power cut or a full disk at any instant leaves the old or the new one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from roundelay.errors import RunError


def strict_json(value: Any, **options: Any) -> str:
    """Encode ``value`` as JSON that every parser accepts: a float that is not finite becomes ``null``."""
    return json.dumps(_finite(value), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value


def unwritten(path: Path, error: Exception) -> RunError:
    """The error for a ``path`` that could not be written."""
    return unwritten_because(path, reason_of(error))


def reason_of(error: Exception) -> str:
    """What the operating system or a library says of an error, in one line."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def unwritten_because(path: Path, reason: str) -> RunError:
    """As :func:`unwritten`, with the reason in words."""
    return RunError(
        f"writing {path}",
        got=reason,
        expected="room and permission to write there",
        remedy="Free some space or correct the permissions; what was complete before is intact.",
    )


def sync(path: Path) -> None:
    """Fsync a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing_file(path: Path, confirm: Callable[[], None] = lambda: None) -> Iterator[TextIO]:
    """Open a text file for writing that replaces ``path`` when the block ends without an error.

    Args:
        path: the file.
        confirm: called at the last moment; if it raises, ``path`` stays.

    Raises:
        RunError: it cannot be written; ``path`` is unchanged.
    """
    with _replacing(path, confirm, mode="w", encoding="utf-8", newline="\n") as file:
        yield file


@contextmanager
def replacing_bytes(path: Path) -> Iterator[BinaryIO]:
    """As :func:`replacing_file`, for bytes."""
    with _replacing(path, lambda: None, mode="wb") as file:
        yield file


@contextmanager
def _replacing(path: Path, confirm: Callable[[], None], **how: Any) -> Iterator[Any]:
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open(**how) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        confirm()
        part.replace(path)
    except OSError as error:
        raise unwritten(path, error) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
