"""Packages that Roundelay can do without."""

from __future__ import annotations

import importlib
from typing import Any

from roundelay.errors import UsageError


def optional(module: str, wanted_for: str, package: str, remedy: str) -> Any:
    """A module of a package that need not be installed.

    Args:
        module: its full name.
        wanted_for: what asks for it.
        package: what to install.
        remedy: what to do without it, behind "or" or a semicolon.

    Raises:
        UsageError: it is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package that does not fit its neighbours fails in any way it likes
        raise UsageError(
            wanted_for,
            got=f"{type(error).__name__}: {error}",
            expected=f"the package {package}, which is optional",
            remedy=f"Install it with `pip install {package}`{remedy}",
        ) from error
