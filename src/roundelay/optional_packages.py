"""Import optional packages."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
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
        raise _missing(wanted_for, f"{type(error).__name__}: {error}", package, remedy) from error


def check_installed(modules: Iterable[str], wanted_for: str, package: str, remedy: str) -> None:
    """Check that top-level modules can be found, without importing them; arguments and errors as of `optional`."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise _missing(wanted_for, f"no module {module}", package, remedy)


def _missing(wanted_for: str, got: str, package: str, remedy: str) -> UsageError:
    return UsageError(
        wanted_for,
        got=got,
        expected=f"the package {package}, which is optional",
        remedy=f"Install it with `pip install {package}`{remedy}",
    )
