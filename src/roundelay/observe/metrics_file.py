"""Metrics: one line of JSON per update, which a person can ``tail -f`` and any program can read while it grows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, final

from roundelay.checkpoint.atomic_files import strict_json, unwritten
from roundelay.errors import UsageError


@final
class MetricsWriter:
    """Appends to a metrics file; each line is handed to the operating system at once, in one piece.

    A torn last line, left by a process that was killed, is cut off first.

    Args:
        path: the file; made if absent.

    Raises:
        RunError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = path.open("ab", buffering=0)
            whole = _whole(path.read_bytes())
            self._file.truncate(len(whole))
        except OSError as error:
            raise unwritten(path, error) from error

    def write(
        self, *, update: int, epoch: int, loss: float, samples_per_second: float, busy: Sequence[float], **more: Any
    ) -> None:
        """Add one line. A float that is not finite is written as ``null``.

        Args:
            update: number of the update.
            epoch: number of the epoch it belongs to, from 0.
            loss: mean loss of its batch.
            samples_per_second: rows trained per second over the last few seconds.
            busy: share of the time since the start in which each worker computed, 0 to 1.
            more: further fields, of values that JSON knows.

        Raises:
            RunError: it cannot be written.
        """
        fields = {
            "update": update,
            "epoch": epoch,
            "loss": loss,
            "samples_per_second": samples_per_second,
            "busy": list(busy),
            **more,
        }
        self.add(fields)

    def add(self, fields: Mapping[str, Any]) -> None:
        """Add one line of any fields; ``update`` must be among them.

        Raises:
            RunError: it cannot be written.
        """
        line = strict_json(fields).encode() + b"\n"
        try:
            while line:  # a disk that is almost full takes a part
                line = line[self._file.write(line) :]
        except OSError as error:
            raise unwritten(self._path, error) from error

    def cut(self, updates: int) -> None:
        """Drop the lines of update number ``updates`` and later ones: they will be made again.

        Raises:
            RunError: the file cannot be read or written.
        """
        try:
            lines = _whole(self._path.read_bytes()).splitlines(keepends=True)
            kept = [line for n, line in enumerate(lines, 1) if _parsed(self._path, n, line)["update"] < updates]
            self._file.truncate(sum(map(len, kept)))  # lines come in the order of their updates
        except OSError as error:
            raise unwritten(self._path, error) from error

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a metrics file; a last line without its end is not there yet.

    Raises:
        UsageError: there is no such file, or a whole line is no JSON object.
    """
    try:
        lines = _whole(path.read_bytes()).splitlines()
    except OSError as error:
        raise _unreadable(path, str(error.strerror)) from error
    return [_parsed(path, number, line) for number, line in enumerate(lines, 1)]


def _whole(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise _unreadable(path, f"no JSON in line {number} ({error})") from error
    if not isinstance(record, dict):
        raise _unreadable(path, f"no object in line {number}")
    return record


def _unreadable(path: Path, got: str) -> UsageError:
    return UsageError(
        f"metrics {path}",
        got=got,
        expected="a file with one JSON object per line",
        remedy="Name the metrics file of a run.",
    )
