"""The library's public API, which the commands use too.

Each function but :func:`calibrate` takes a :class:`~roundelay.job.Job`. Only :func:`train` changes the job's model, to
which it writes the trained weights.

Names are loaded when first used: plans can be read and simulated where there is no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roundelay.api.train_job import train
    from roundelay.calibration.calibrate import calibrate
    from roundelay.comparison.comparison import compare
    from roundelay.finals.search_plan import search_plan
    from roundelay.planning.examined import default_workers
    from roundelay.planning.planning import capture, plan, simulate
    from roundelay.planning.weights_file import empty_weights, load
    from roundelay.proof.run_vs_reference import verify
    from roundelay.session.events import Updated

_HOMES = {
    "Updated": "session.events",
    "calibrate": "calibration.calibrate",
    "capture": "planning.planning",
    "compare": "comparison.comparison",
    "default_workers": "planning.examined",
    "empty_weights": "planning.weights_file",
    "load": "planning.weights_file",
    "plan": "planning.planning",
    "search_plan": "finals.search_plan",
    "simulate": "planning.planning",
    "train": "api.train_job",
    "verify": "proof.run_vs_reference",
}

__all__ = [
    "Updated",
    "calibrate",
    "capture",
    "compare",
    "default_workers",
    "empty_weights",
    "load",
    "plan",
    "search_plan",
    "simulate",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'roundelay.api' has no attribute {name!r}")
    return getattr(importlib.import_module(f"roundelay.{_HOMES[name]}"), name)
