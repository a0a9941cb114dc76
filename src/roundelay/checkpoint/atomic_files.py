"""Replacing files and folders so that a kill, a power cut or a full disk at any instant leaves the old or the new one.

A file is replaced by one ``rename``. A folder that holds something cannot be, so it takes two, with the old folder set
aside under a name of its own in between::

    .NAME.new   being written; worthless until complete
    .NAME.old   what stood at NAME before; removed once the new one stands there

If a process dies between the two, NAME is absent and ``.NAME.old`` complete: :func:`present` finds it, and the next
:func:`settle` puts it back. One process at a time may replace a folder, one thread of it at a time does; any number may
read it.
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
"""A run that has failed leaves a write behind that the disk holds up, and may be restarted meanwhile."""


def strict_json(value: Any, **options: Any) -> str:
    """``value`` as JSON that every parser accepts: a float that is not finite becomes ``null``."""
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
    """The error to raise when ``path`` could not be written while a run was under way."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return RunError(
        f"writing {path}",
        got=reason,
        expected="room and permission to write there",
        remedy="Free some space or correct the permissions; what was complete before is unharmed.",
    )


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing_file(path: Path) -> Iterator[TextIO]:
    """A text file to write into; it takes its place at ``path`` when the block ends without an error.

    Raises:
        RunError: it cannot be written; what stood at ``path`` still does.
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
    """An empty folder to fill; it takes its place at ``folder`` when the block ends without an error.

    Args:
        folder: where it goes; parents are made.
        own: names of the files that are replaced. Whatever else lies in the old folder moves into the new one.

    Raises:
        OSError: it cannot be written; what stood at ``folder`` is still :func:`present`.
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
            with suppress(OSError):  # what is left over is harmless, and the next call removes it
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
    """Where the content of ``folder`` is at this instant."""
    old = _siblings(folder)[1]
    return old if not folder.exists() and old.exists() else folder


def _siblings(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
