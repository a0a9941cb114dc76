"""From an ordinary ``nn.Module`` to a logical graph and stage functions, by ``torch.export``.

No module outside this package depends on ``torch.export`` or ``torch.fx``.
"""

from roundelay.frontend.capture import Captured, capture
from roundelay.frontend.stages.keyed_rng import DEFAULT_GENERATOR_LOCK, RngKey
from roundelay.frontend.stages.stage_function import Mode, StageFunction, StageTape

__all__ = ["DEFAULT_GENERATOR_LOCK", "Captured", "Mode", "RngKey", "StageFunction", "StageTape", "capture"]
