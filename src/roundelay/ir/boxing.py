"""How a signature becomes another by an exchange: its phases, and the shape in which a tensor is exchanged."""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.ir.exchange import Phase, all_gather, all_reduce, all_to_all, reduce_scatter
from roundelay.ir.sbp import Partial, Signature, Split


def phases_of(source: Signature, target: Signature) -> tuple[Phase, ...]:
    """How a signature becomes another that no worker makes alone (OneFlow, Table 2); empty if there is no way yet."""
    put, join = place_of(target, source), place_of(source, target)
    if isinstance(source, Partial):
        return all_reduce(op=source.op) if put is None else reduce_scatter(put, source.op)
    if put is None or join is None:
        return () if join is None else all_gather(join)
    return all_to_all(join, put) if put != join else ()


def place_of(own: Signature, other: Signature) -> int | None:
    """The dimension of an exchanged tensor in which a signature splits it; None if it does not."""
    if not isinstance(own, Split):
        return None
    return 3 if isinstance(other, Split) and other.dim < own.dim else 1


def exchanged_shape(shape: Sequence[int], source: Signature, target: Signature) -> tuple[int, ...]:
    """The shape in which a tensor is exchanged: flat, or what its splits divide between what stays together."""
    by_dim = {own.dim: own for own in (source, target) if isinstance(own, Split)}
    exchanged = [1]
    for dim, size in enumerate(shape):
        split = by_dim.get(dim)
        if split is None:
            exchanged[-1] *= size
        else:
            exchanged[-1] *= split.outer
            exchanged += [split.count(size), split.unit]
    return tuple(exchanged)
