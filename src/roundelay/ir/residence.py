"""Where a parameter lies over the replicas of which each updates a part: ZeRO's levels as rows of a table.

======  ==============  ==================================  =====================
level   optimizer       the sum of a batch's gradients      exchanged
======  ==============  ==================================  =====================
1       split           whole until the batch has ended     once a batch: P to S
2       split           split as it is summed               each micro-batch: P to S
======  ==============  ==================================  =====================

What a replica has updated, the others get after the update (Rajbhandari et al., ZeRO, Sect. 5; OneFlow, Sect. 6.4).
"""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.ir.sbp import B, Signature, Split

SHARDED = ("states", "gradients")
"""What of a parameter is split, by level: the first so many."""


@dataclass(frozen=True, slots=True)
class Residence:
    """How one parameter lies over the replicas.

    Args:
        state: its optimizer state, and what is updated.
        gradient: the sum of a batch's gradients as it is added up; ``B``: each replica has its own sum of all.
    """

    state: Split
    gradient: Signature = B

    @property
    def sums_parts(self) -> bool:
        """Whether each micro-batch's gradient is exchanged, and parts of it are added up."""
        return self.gradient != B
