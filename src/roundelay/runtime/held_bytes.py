"""How many bytes the tensors of a stage take while it trains, by kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from roundelay.frontend.stages.segment import storages_of

KINDS = WEIGHTS, GRADIENTS, STATES, GATHERED = "weights", "gradients", "states", "gathered"


@final
class HeldBytes:
    """The most bytes of each kind, each storage counted once.

    Counting takes about a microsecond for each tensor, so it is done in the first batch, the second, the fourth and so
    on.
    """

    def __init__(self) -> None:
        #: by kind
        self.most = dict.fromkeys(KINDS, 0)
        self._batches = 0

    @property
    def due(self) -> bool:
        """Whether this batch counts."""
        return not self._batches & (self._batches - 1)

    def end_batch(self) -> None:
        """The next batch begins."""
        self._batches += 1

    def note(self, kind: str, tensors: Iterable[Any]) -> None:
        """Note what is held of a kind now."""
        self.most[kind] = max(self.most[kind], sum(storages_of(tensors).values()))
