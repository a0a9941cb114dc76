"""Roundelay: pipeline training of ordinary PyTorch models, planned, explained, and proved bit for bit.

>>> captured = roundelay.capture(job)
>>> plan = roundelay.plan(job, workers=2, rule="pipeoptim")
>>> result = roundelay.train(job, plan=plan, steps=100)
>>> roundelay.verify(job, plan=plan, steps=8).equal
True

Names are loaded when first used, so that the parts that need no torch (plans, programs, the simulator) import none.
"""

from __future__ import annotations

import importlib
import sys

TYPE_CHECKING = False  # `typing` takes milliseconds to load, in which a Ctrl-C would still show where it struck
if TYPE_CHECKING:
    from typing import Any

    from roundelay.api import (
        Updated,
        calibrate,
        capture,
        compare,
        empty_weights,
        load,
        plan,
        search_plan,
        simulate,
        train,
        verify,
    )
    from roundelay.errors import PlanWarning, RoundelayError
    from roundelay.global_tensor import (
        GlobalTensor,
        Placement,
        from_local,
        ones,
        placement,
        rand,
        randn,
        sbp,
        tensor,
        zeros,
    )
    from roundelay.ir.plan import Plan
    from roundelay.ir.rule import UpdateRule, register_rule
    from roundelay.job import Job, StopTraining

__version__ = "0.1.0"

if sys.modules.get("torch") is not None:  # else it is loaded with the first name that needs it
    importlib.import_module("roundelay.fork_safety")

_HOMES = {
    "Updated": "roundelay.api",
    "calibrate": "roundelay.api",
    "capture": "roundelay.api",
    "compare": "roundelay.api",
    "empty_weights": "roundelay.api",
    "load": "roundelay.api",
    "plan": "roundelay.api",
    "search_plan": "roundelay.api",
    "simulate": "roundelay.api",
    "train": "roundelay.api",
    "verify": "roundelay.api",
    "PlanWarning": "roundelay.errors",
    "RoundelayError": "roundelay.errors",
    "Plan": "roundelay.ir.plan",
    "UpdateRule": "roundelay.ir.rule",
    "register_rule": "roundelay.ir.rule",
    "Job": "roundelay.job",
    "StopTraining": "roundelay.job",
    "GlobalTensor": "roundelay.global_tensor",
    "Placement": "roundelay.global_tensor",
    "from_local": "roundelay.global_tensor",
    "ones": "roundelay.global_tensor",
    "placement": "roundelay.global_tensor",
    "rand": "roundelay.global_tensor",
    "randn": "roundelay.global_tensor",
    "sbp": "roundelay.global_tensor",
    "tensor": "roundelay.global_tensor",
    "zeros": "roundelay.global_tensor",
}

__all__ = [
    "GlobalTensor",
    "Job",
    "Placement",
    "Plan",
    "PlanWarning",
    "RoundelayError",
    "StopTraining",
    "UpdateRule",
    "Updated",
    "calibrate",
    "capture",
    "compare",
    "empty_weights",
    "from_local",
    "load",
    "ones",
    "placement",
    "plan",
    "rand",
    "randn",
    "register_rule",
    "sbp",
    "search_plan",
    "simulate",
    "tensor",
    "train",
    "verify",
    "zeros",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'roundelay' has no attribute {name!r}; it has {', '.join(sorted(_HOMES))}")
    return getattr(importlib.import_module(_HOMES[name]), name)
