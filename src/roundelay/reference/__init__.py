"""The one-process literal reference that every distributed run must equal bit for bit.

It takes the stages' functions as they are; the choice of version, the prediction, the accumulation and the update are
written here a second time, from the rules and from nothing of the house that carries them out: a formula that both
sides shared would hide its own mistakes.
"""

from roundelay.reference.run import run_reference
from roundelay.reference.setting import (
    Audit,
    Named,
    OptimizerFactory,
    ReferenceResult,
    ReferenceStage,
    SchedulerFactory,
    Setting,
    StageFunctions,
    Tensors,
)

__all__ = [
    "Audit",
    "Named",
    "OptimizerFactory",
    "ReferenceResult",
    "ReferenceStage",
    "SchedulerFactory",
    "Setting",
    "StageFunctions",
    "Tensors",
    "run_reference",
]
