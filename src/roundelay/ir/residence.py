"""Where a parameter lies over the replicas of which each updates a part: ZeRO's levels as rows of a table.

=====  ==============  =================  ==============  ====================  ===================
level  optimizer       sum of gradients   stored weights  gradients exchanged   weights exchanged
=====  ==============  =================  ==============  ====================  ===================
1      split           whole              whole           once a batch: P to S  updated: S to B
2      split           split              whole           when made: P to S     updated: S to B
3      split           split              split           when made: P to S     before use: S to B
=====  ==============  =================  ==============  ====================  ===================

Under a rule that predicts, weights are stored split at each level: what replicas predict are parts, and these are
gathered before use.

(Rajbhandari et al., ZeRO, Sect. 5; OneFlow, Sect. 6.4 and Fig. 14.)
"""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.ir.graph import Op, Parameter
from roundelay.ir.sbp import B, Signature, Split

LOW = {"bf16": "bfloat16", "fp16": "float16"}
"""Precision of a plan to the dtype to which torch's autocast casts."""

_CASTING = ("linear", "addmm", "mm", "matmul", "conv1d", "conv2d", "conv3d")
"""Operators that cast a matrix of weights on every device, by their names in torch."""

SHARDED = ("states", "gradients", "weights")
"""What of a parameter is split, by level: the first so many."""


@dataclass(frozen=True, slots=True)
class Residence:
    """How one parameter lies over the replicas.

    Args:
        state: its optimizer state, and what is updated.
        gradient: the sum of a batch's gradients as it is added up; ``B``: each replica has its own sum of all.
        stored: the weight between its uses.
        cast: dtype to which the weight is cast before it is gathered; empty for its own.
    """

    state: Split
    gradient: Signature = B
    stored: Signature = B
    cast: str = ""

    @property
    def sums_parts(self) -> bool:
        """Whether each micro-batch's gradient is exchanged, and parts of it are added up."""
        return self.gradient != B

    @property
    def is_gathered(self) -> bool:
        """Whether the weight is gathered before each use, and dropped after it."""
        return self.stored != B

    @property
    def in_segments(self) -> bool:
        """Whether its gradient or its weight is exchanged each micro-batch, segment by segment."""
        return self.sums_parts or self.is_gathered


def dtype_gathered(precision: str, reader: Op, parameter: Parameter) -> str:
    """The dtype in which a weight may be gathered for the only operation that reads it; empty for its own.

    If that casts it first, it gets the same numbers from what was cast before, and half the bytes travel (OneFlow,
    Fig. 14).
    """
    casts = reader.target in [f"aten.{name}.default" for name in _CASTING]
    matrix = len(parameter.shape) > 1 and parameter.dtype == "float32"
    return LOW.get(precision, "") if casts and matrix else ""
