"""The library's public API, which the commands use too.

Each function takes a :class:`~roundelay.job.Job`. Only :func:`train` changes the job's model, to which it writes the
trained weights.

Names are loaded when first used: the modules here that only judge choices need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundelay.api.comparison import compare
    from roundelay.api.cuts import default_workers
    from roundelay.api.events import Updated
    from roundelay.api.planning import capture, plan, simulate
    from roundelay.api.recorded_training import train
    from roundelay.api.verifying import verify
    from roundelay.api.weights_file import empty_weights, load

_HOMES = {
    "Updated": "events",
    "capture": "planning",
    "compare": "comparison",
    "default_workers": "cuts",
    "empty_weights": "weights_file",
    "load": "weights_file",
    "plan": "planning",
    "simulate": "planning",
    "train": "recorded_training",
    "verify": "verifying",
}

__all__ = [
    "Updated",
    "capture",
    "compare",
    "default_workers",
    "empty_weights",
    "load",
    "plan",
    "simulate",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'roundelay.api' has no attribute {name!r}")
    return getattr(importlib.import_module(f"roundelay.api.{_HOMES[name]}"), name)
