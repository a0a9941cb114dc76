"""Paths of a command line mean what they meant where it was given, wherever the job goes (``os.chdir``)."""

from __future__ import annotations

from pathlib import Path
from typing import final, overload


@final
class PathResolver:
    """Where the command was given: the folder that is the current one now."""

    def __init__(self) -> None:
        self._start = Path.cwd()

    @overload
    def of(self, path: Path) -> Path: ...

    @overload
    def of(self, path: None) -> None: ...

    def of(self, path: Path | None) -> Path | None:
        """The same place from the folder that is the current one now: the path itself, as long as that is the same."""
        return path if path is None or Path.cwd() == self._start else self._start / path
