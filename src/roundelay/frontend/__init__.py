"""From an ordinary ``nn.Module`` to a logical graph and stage functions: the one place that knows how torch traces.

Nothing outside of this package may know that ``torch.export`` and ``torch.fx`` stand behind it.
"""

from roundelay.frontend.capture import Captured, capture
from roundelay.frontend.keyed_rng import DEFAULT_GENERATOR_LOCK, RngKey
from roundelay.frontend.stage_function import Mode, StageFunction, StageTape

__all__ = ["DEFAULT_GENERATOR_LOCK", "Captured", "Mode", "RngKey", "StageFunction", "StageTape", "capture"]
