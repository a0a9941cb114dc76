"""``roundelay --version``. It loads no torch, so that it answers at once and where torch is broken, too."""

from __future__ import annotations

import sys
from importlib import metadata

from roundelay import __version__


def version_line() -> str:
    """Roundelay's version and that of the torch beside it."""
    try:
        beside = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        beside = "torch is not installed"
    return f"roundelay {__version__} ({beside})"


def show_version() -> None:
    """On stdout, as a line."""
    sys.stdout.write(version_line() + "\n")
