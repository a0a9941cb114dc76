"""What a job file may change in this process: the current folder, and the arguments."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import final, overload


@contextmanager
def own_arguments() -> Iterator[None]:
    """Restore this process's arguments after a command: a job file replaces them."""
    before = sys.argv
    try:
        yield
    finally:
        sys.argv = before


@final
class PathResolver:
    """Resolves paths against the current folder at the time of its creation, which a job file may change."""

    def __init__(self) -> None:
        self._start = Path.cwd()

    @overload
    def of(self, path: Path) -> Path: ...

    @overload
    def of(self, path: None) -> None: ...

    def of(self, path: Path | None) -> Path | None:
        """The same path from the folder that is current now; unchanged while that is the same."""
        return path if path is None or Path.cwd() == self._start else self._start / path
