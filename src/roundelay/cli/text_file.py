"""Writes text files that commands produce."""

from __future__ import annotations

from pathlib import Path

from roundelay.checkpoint.atomic_files import replacing_file


def write_text(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        RunError: it cannot be written.
    """
    with replacing_file(path) as file:
        file.write(text)
