"""Replace files and folders so that a kill, a power cut or a full disk at any instant leaves the old or the new one.

A file is replaced by one ``rename``. A folder that is not empty cannot be, so it takes two, with the old folder renamed
in between::

    .NAME.new   being written; incomplete
    .NAME.old   the previous content of NAME; removed once the new folder is in place

If a process dies between the two, NAME is absent and ``.NAME.old`` complete: :func:`present` finds it, and the next
:func:`settle` renames it back. Only one process may replace a folder at a time; any number may read it.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from roundelay.errors import RunError

_REPLACING = threading.Lock()
"""A failed run may be restarted while a background write of it still waits for the disk."""


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
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
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
def replacing_file(path: Path) -> Iterator[TextIO]:
    """Open a text file for writing that replaces ``path`` when the block ends without an error.

    Raises:
        RunError: it cannot be written; ``path`` is unchanged.
    """
    with _replacing(path, mode="w", encoding="utf-8", newline="\n") as file:
        yield file


@contextmanager
def replacing_bytes(path: Path) -> Iterator[BinaryIO]:
    """As :func:`replacing_file`, for bytes."""
    with _replacing(path, mode="wb") as file:
        yield file


@contextmanager
def _replacing(path: Path, **how: Any) -> Iterator[Any]:
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open(**how) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise unwritten(path, error) from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


@contextmanager
def replacing_folder(folder: Path, own: Collection[str]) -> Iterator[Path]:
    """Create an empty folder to fill that replaces ``folder`` when the block ends without an error.

    Args:
        folder: the folder to replace; parents are created.
        own: names of the files that are replaced. Other files in the old folder move into the new one.

    Raises:
        OSError: it cannot be written; the old content is still :func:`present`.
    """
    with _REPLACING:
        settle(folder, own)
        folder.parent.mkdir(parents=True, exist_ok=True)
        new, old = _siblings(folder)
        try:
            new.mkdir()
            yield new
            for path in (*new.iterdir(), new):
                sync(path)
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
            sync(folder.parent)
        finally:
            with suppress(OSError):  # leftovers are harmless, and the next call removes them
                settle(folder, own)


def settle(folder: Path, own: Collection[str]) -> None:
    """Finish or undo what an interrupted :func:`replacing_folder` left."""
    new, old = _siblings(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    elif old.exists():
        for path in old.iterdir():
            if path.name in own:
                path.unlink()
            else:
                path.rename(folder / path.name)
        old.rmdir()
    if new.exists():
        shutil.rmtree(new)


def present(folder: Path) -> Path:
    """The path at which the content of ``folder`` currently is."""
    old = _siblings(folder)[1]
    return old if not folder.exists() and old.exists() else folder


def _siblings(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
