"""Which line of the person's program does something, for people."""

from __future__ import annotations

import linecache
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from roundelay.frontend.reachable_state import Change, same_value

_INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<")


def of_person(file: str) -> bool:
    """Whether code of that file is the person's, or of a library that they call."""
    return not file.startswith(_INSIDE) and "contextlib" not in file


def users_line() -> str:
    """The innermost line that runs now outside of torch and Roundelay, for people; empty if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if of_person(file):
            line = linecache.getline(file, frame.f_lineno).strip()[:120]
            return f", {file}:{frame.f_lineno} `{line}`"
        frame = frame.f_back
    return ""


def users_line_of(error: Exception) -> str:
    """The innermost line outside of torch and Roundelay in an error's traceback, for people."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_INSIDE)]
    if not frames:
        return ""
    return f", {frames[-1].filename}:{frames[-1].lineno} `{(frames[-1].line or '').strip()}`"


def line_of_change(change: Change, call: Callable[[], Any]) -> str:
    """Where a call changes a slot, for people; empty if no line of the person's does.

    Every line of theirs is watched, so this takes its time.
    """
    last, found = ("", 0), list[tuple[str, int]]()

    def watch(frame: types.FrameType, event: str, arg: Any) -> Any:
        nonlocal last
        if not of_person(frame.f_code.co_filename):
            return None
        if not found and last[1] and not same_value(change.slot, change.before):
            found.append(last)
        last = frame.f_code.co_filename, frame.f_lineno if event != "call" else 0
        return watch

    before = sys.gettrace()
    sys.settrace(watch)
    try:
        call()
    except Exception:  # the person's own code: what is told is the state
        pass
    finally:
        sys.settrace(before)
    if not found:
        return ""
    file, number = found[0]
    return f"{file}:{number} `{linecache.getline(file, number).strip()[:120]}`"
