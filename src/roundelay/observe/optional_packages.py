"""Import optional packages."""

from __future__ import annotations

import importlib
from typing import Any

from roundelay.errors import UsageError


def optional(module: str, wanted_for: str, package: str, remedy: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: its full name.
        wanted_for: what needs it; the error's subject.
        package: what to install.
        remedy: what to do without it, beginning with ", or" or a semicolon.

    Raises:
        UsageError: it is not installed, or cannot be loaded.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # packages of incompatible versions raise errors of any kind
        raise UsageError(
            wanted_for,
            got=f"{type(error).__name__}: {error}",
            expected=f"the package {package}, which is optional",
            remedy=f"Install it with `pip install {package}`{remedy}",
        ) from error
