"""Loads what needs torch, which takes seconds, only when a command comes to need it."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from typing import Any

from roundelay.cli.signals import SIGNALS
from roundelay.errors import UsageError


def load(module: str) -> Any:
    """Import a module of ours that imports torch; after the first one torch computes in one thread.

    Raises:
        UsageError: it cannot be imported.
    """
    first = "torch" not in sys.modules
    try:
        with SIGNALS.ending_at_once() if first else nullcontext():
            loaded = importlib.import_module(f"roundelay.{module}")
    except Exception as error:
        raise cannot_load(error) from error
    if first and (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
    return loaded


def cannot_load(error: Exception) -> UsageError:
    """The error of an installation in which the commands cannot be imported."""
    return UsageError(
        "loading Roundelay and torch",
        got=f"{type(error).__name__}: {error}",
        expected="an installation in which they can be imported",
        remedy="Run `roundelay doctor`: it says what is missing.",
    )
