"""Find the line of the user's program that does something, for error messages."""

from __future__ import annotations

import inspect
import linecache
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from roundelay.reach.reachable_state import Change, is_library, same_value

INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<")
"""Beginnings of the names of files of torch, of Roundelay, and of code without a file."""


def is_user_code(file: str) -> bool:
    """Whether a file belongs to the user or to a library other than torch and Roundelay."""
    return not file.startswith(INSIDE) and not file.endswith(("/contextlib.py", "/threading.py"))


def users_line() -> str:
    """The innermost line now running outside torch and Roundelay, as ", file:line `text`"; empty if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_code(file):
            line = linecache.getline(file, frame.f_lineno).strip()[:120]
            return f", {file}:{frame.f_lineno} `{line}`"
        frame = frame.f_back
    return ""


def users_line_of(error: Exception) -> str:
    """The innermost line outside torch and Roundelay in an error's traceback, as :func:`users_line` writes it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(INSIDE)]
    if not frames:
        return ""
    return f", {frames[-1].filename}:{frames[-1].lineno} `{(frames[-1].line or '').strip()}`"


def line_of_change(change: Change, call: Callable[[], Any]) -> str:
    """The line of user code that changes a slot during ``call``; empty if none does.

    Slow: every line of user code is traced.
    """
    last, lines = ("", 0), list[tuple[str, int]]()

    def watch(frame: types.FrameType, event: str, arg: Any) -> Any:
        nonlocal last
        if not is_user_code(frame.f_code.co_filename):
            return None
        if not lines and last[1] and not same_value(change.slot, change.before):
            lines.append(last)
        last = frame.f_code.co_filename, frame.f_lineno if event != "call" else 0
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        call()
    except Exception:  # raised by user code; only the line matters
        pass
    finally:
        sys.settrace(before)
    if not lines:
        return ""
    file, number = lines[0]
    return f"{file}:{number} `{linecache.getline(file, number).strip()[:120]}`"


def set_at(change: Change) -> str:
    """The line that sets a slot, as "file:line `text`"; empty if unknown.

    Searches the source of the class that has the attribute, and of its bases outside of libraries.
    """
    holder, name = change.slot.holder, change.slot.key
    if change.slot.kind not in ("attribute", "class", "buffer", "parameter"):
        return ""
    return place_of(holder if isinstance(holder, type) else type(holder), str(name))


def place_of(kind: type, name: str) -> str:
    """The last line in a class's source that assigns to or changes an attribute, as "file:line `text`"."""
    line_found = ""
    for base in kind.__mro__:
        if is_library(base):
            continue
        try:
            lines, first = inspect.getsourcelines(base)
            file = inspect.getsourcefile(base)
        except (OSError, TypeError):
            continue
        for i, line in enumerate(lines):
            if _sets(line, name):
                line_found = f"{file}:{first + i} `{line.strip()[:120]}`"
    return line_found


def _sets(line: str, name: str) -> bool:
    """Whether a line of source assigns to or changes an attribute of that name."""
    start = 0
    while (at := line.find("." + name, start)) >= 0:
        start, rest = at + 1, line[at + 1 + len(name) :].lstrip()
        if rest[:1].isalnum() or rest[:1] == "_":
            continue
        if (rest.startswith("=") and not rest.startswith("==")) or rest[1:2] == "=" or rest[2:3] == "=":
            return True
        if rest.startswith((".append", ".extend", ".add", ".update", ".pop", ".clear", ".insert", "[", ",", ".copy_")):
            return True
    return False
