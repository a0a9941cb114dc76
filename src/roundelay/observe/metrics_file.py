"""Metrics: one line of JSON per update, which ``tail -f`` and other programs can read while the file grows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, TypeVar, final

import msgspec

from roundelay.checkpoint.atomic_files import strict_json, unwritten
from roundelay.errors import UsageError

R = TypeVar("R")


@final
class MetricsWriter:
    """Appends to a metrics file; each line is written at once, without buffering.

    An incomplete last line, left by a process that was killed, is removed first.

    Args:
        path: the file; created if absent.

    Raises:
        RunError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
            whole = _complete(path.read_bytes())
            self._file.truncate(len(whole))
        except OSError as error:
            raise unwritten(path, error) from error

    def write(self, **fields: Any) -> None:
        """Add one line of fields, including ``update``; a float that is not finite is written as ``null``.

        Raises:
            RunError: it cannot be written.
        """
        line = strict_json(fields).encode() + b"\n"
        try:
            while line:  # a disk that is almost full may take a part only
                line = line[self._file.write(line) :]
        except OSError as error:
            raise unwritten(self._path, error) from error

    def cut(self, updates: int) -> None:
        """Remove the lines of update number ``updates`` and later ones: these updates will be repeated.

        Raises:
            RunError: the file cannot be read or written.
        """
        try:
            lines = _complete(self._path.read_bytes()).splitlines(keepends=True)
            kept = [line for n, line in enumerate(lines, 1) if _parsed(self._path, n, line)["update"] < updates]
            self._file.truncate(sum(map(len, kept)))  # lines are in the order of their updates
        except OSError as error:
            raise unwritten(self._path, error) from error

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file.

    Raises:
        UsageError: there is no such file, or a complete line is not a JSON object.
    """
    try:
        lines = _complete(path.read_bytes()).splitlines()
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from error
    return [_parsed(path, number, line) for number, line in enumerate(lines, 1)]


def read_records(path: Path, record: type[R]) -> list[R]:
    """All complete lines of a metrics file as records, without the fields that a record does not have.

    A number that is ``null`` becomes the field's default; in a mapping it becomes NaN.

    Raises:
        UsageError: there is no such file, or a field is missing or of another type.
    """
    records = []
    for number, fields in enumerate(read_metrics(path), 1):
        try:
            records.append(msgspec.convert({k: _nan_for_null(v) for k, v in fields.items() if v is not None}, record))
        except msgspec.ValidationError as error:
            raise _unreadable(path, f"in line {number}: {error}") from error
    return records


def _nan_for_null(value: Any) -> Any:
    return {k: math.nan if v is None else v for k, v in value.items()} if isinstance(value, dict) else value


def _complete(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise _unreadable(path, f"no object in line {number}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _unreadable(path, f"no JSON in line {number} ({error})") from error


def _unreadable(path: Path, got: str) -> UsageError:
    return UsageError(
        f"metrics {path}",
        got=got,
        expected="one JSON object per line, as `roundelay train` writes it",
        remedy="Name the metrics file of a run, or move a damaged one away.",
    )
