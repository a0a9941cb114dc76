"""What every operation of a graph takes on one micro-batch, measured or predicted: what cuts are chosen by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """Seconds of every operation, in the graph's order; the loss stands behind the last one.

    Args:
        forward_s: seconds of a forward on one micro-batch.
        backward_s: seconds of a backward on one micro-batch, without a repeated forward.
        update_s: seconds of one update of the parameters that the operation is the first to use.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
