"""The one-process reference that every distributed run must equal bit for bit.

It uses the stages' functions as they are. The choice of versions, the prediction, the accumulation and the update are
implemented a second time, from the formulas of the rules and without any code of the runtime: a mistake in code that
both sides shared would stay hidden.
"""

from roundelay.reference.replay import Replayed, ReplayedStage, replay
from roundelay.reference.run import run_reference
from roundelay.reference.run_inputs import ReferenceResult, ReferenceStage, Setting

__all__ = ["ReferenceResult", "ReferenceStage", "Replayed", "ReplayedStage", "Setting", "replay", "run_reference"]
