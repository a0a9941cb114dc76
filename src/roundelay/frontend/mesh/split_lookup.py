"""Look numbers up by an index in a tensor of which each worker has a part: a worker adds what its part holds, or zero.

So an embedding table is split by rows, and the scores of labels are picked from classes that are split (Megatron-LM,
Sect. 3; OneFlow, Sect. 6.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundelay.ir.sbp import Split

aten = torch.ops.aten

Of = tuple[tuple[int, int, int], tuple[int, int], int]
"""The fields of the tensor's :class:`~roundelay.ir.sbp.Split`, number of parts and which one, size of the dimension."""


def own_places(index: torch.Tensor, of: Of) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in a worker's part the places lie that an index names, and whether they lie there at all.

    Args:
        index: places in the whole dimension, from 0.
        of: the part.

    Raises:
        RuntimeError: a place is not in the dimension.
    """
    (dim, outer, unit), at, size = of
    torch._assert_async(((index >= 0) & (index < size)).all(), f"index out of range: the dimension has size {size}")
    start, end = Split(dim, outer, unit).ranges(size, *at)[0]  # of the first block
    block = size // outer
    within, length = index % block, end - start
    mine = (within >= start) & (within < end)
    return torch.where(mine, index // block * length + within - start, 0), mine


def split_embedding(
    weight: torch.Tensor, index: torch.Tensor, padding_idx: int = -1, *rest: Any, of: Of
) -> torch.Tensor:
    """``aten.embedding`` with some rows of the table."""
    places, mine = own_places(index, of)
    padding = -1
    if padding_idx >= 0:
        place, owned = own_places(torch.tensor(padding_idx), of)
        padding = int(place) if owned else -1
    return _only(mine.unsqueeze(-1), aten.embedding.default(_not_empty(weight, 0), places, padding, *rest))


def split_gather(x: torch.Tensor, dim: int, index: torch.Tensor, *, of: Of) -> torch.Tensor:
    """``aten.gather`` along a split dimension."""
    places, mine = own_places(index, of)
    return _only(mine, aten.gather.default(_not_empty(x, dim), dim, places))


def split_index_select(x: torch.Tensor, dim: int, index: torch.Tensor, *, of: Of) -> torch.Tensor:
    """``aten.index_select`` along a split dimension."""
    places, mine = own_places(index, of)
    return _only(
        mine.view(-1, *[1] * (x.ndim - 1 - dim % x.ndim)), aten.index_select.default(_not_empty(x, dim), dim, places)
    )


def split_index(x: torch.Tensor, indices: list[torch.Tensor | None], *, of: Of) -> torch.Tensor:
    """``aten.index`` of one, split dimension; places may be counted from its end."""
    (dim, _, _), _, size = of
    index = indices[dim]
    assert index is not None, "this dimension is indexed"
    places, mine = own_places(torch.where(index < 0, index + size, index), of)
    found = aten.index.Tensor(_not_empty(x, dim), [None] * dim + [places])
    return _only(mine.view(*mine.shape, *[1] * (x.ndim - 1 - dim)), found)


def split_amax(x: torch.Tensor, dims: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
    """``aten.amax`` of a part, which may be empty: the least number that there is."""
    if x.numel() == 0:
        reduced = [dim % x.ndim for dim in dims or range(x.ndim)]
        shape = [max(size, 1) if d in reduced else size for d, size in enumerate(x.shape)]
        least = -torch.inf if x.dtype.is_floating_point else 0 if x.dtype is torch.bool else torch.iinfo(x.dtype).min
        x = x.new_full(shape, least)
    largest: torch.Tensor = aten.amax.default(x, dims, keepdim)
    return largest


def _not_empty(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A part, or in place of one without places a place that nobody asks for."""
    if x.shape[dim] > 0:
        return x
    shape = list(x.shape)
    shape[dim] = 1
    return x.new_zeros(shape)


def _only(mine: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    return torch.where(mine, found, 0)


LOOKUPS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.embedding.default: split_embedding,
    aten.gather.default: split_gather,
    aten.index_select.default: split_index_select,
    aten.index.Tensor: split_index,
}
"""What a worker with a part of the first tensor runs in place of these operators."""
