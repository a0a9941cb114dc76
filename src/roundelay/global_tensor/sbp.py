"""Signatures by name: ``split(dim)``, ``broadcast``, ``partial_sum``."""

from __future__ import annotations

from roundelay.ir.sbp import B, P, Split

broadcast, partial_sum = B, P


def split(dim: int) -> Split:
    """Split along a dimension, counted from 0, in balanced parts of which the first ones are longer by one."""
    return Split(dim)
