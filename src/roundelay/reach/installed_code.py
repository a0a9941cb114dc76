"""Which functions and classes belong to installed packages or to Python's own library, by the files they come from."""

from __future__ import annotations

import sys
import types
from functools import cache
from pathlib import Path
from sysconfig import get_paths
from typing import Any

_FOLDERS = {"site-packages", "dist-packages"}


def is_installed(what: Any) -> bool:
    """Whether a function's code, or a class, comes from an installed package or from Python's own library.

    A function is judged by its code: a decorator of a library that passes as the function it wraps is the library's.
    """
    if isinstance(what, types.FunctionType):
        return _is_installed_file(what.__code__.co_filename)
    return _is_installed_module(module_of(what))


def module_of(what: Any) -> str:
    """The name of the module of a class or a function; empty if it has none.

    Types that Cython makes have a descriptor for their instances in its place: they are functions of compiled modules.
    """
    name = getattr(what, "__module__", None)
    return name if isinstance(name, str) else ""


def _is_installed_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return isinstance(file, str) and _is_installed_file(file)


@cache
def _is_installed_file(file: str) -> bool:
    path = Path(file)
    if _FOLDERS & set(path.parts):
        return True
    return any(path.is_relative_to(place) for place in _own_library())


@cache
def _own_library() -> tuple[Path, ...]:
    """The folders of Python's own library."""
    return tuple({Path(get_paths()[name]) for name in ("stdlib", "platstdlib")})
