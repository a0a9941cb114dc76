"""Loads what needs torch, which takes seconds, only when a command comes to need it."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from typing import Any

from roundelay.cli.signals import SIGNALS
from roundelay.errors import UsageError


def load(module: str) -> Any:
    """Import a module of ours that may import torch.

    Raises:
        UsageError: it cannot be imported.
    """
    try:
        with nullcontext() if "torch" in sys.modules else SIGNALS.ending_at_once():
            return importlib.import_module(f"roundelay.{module}")
    except Exception as error:
        raise cannot_load(error) from error


def cannot_load(error: Exception) -> UsageError:
    """The error of an installation in which the commands cannot be imported."""
    return UsageError(
        "loading Roundelay and torch",
        got=f"{type(error).__name__}: {error}",
        expected="an installation in which they can be imported",
        remedy="Run `roundelay doctor`: it says what is missing.",
    )
