"""Shards: the part of a tensor that one holder has, as ranges of its dimensions; joined, and checked to be complete."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Ranges = tuple[tuple[int, ...], ...]
"""For each dimension the first index, and the one after the last; and a block's size, where it is so in each block."""


class Shard(NamedTuple):
    """A part of a tensor: where it lies in the whole, and its elements."""

    ranges: Ranges
    tensor: Tensor


def whole_ranges(shape: Sequence[int]) -> Ranges:
    """The ranges of the whole tensor."""
    return tuple([(0, size) for size in shape])


def lies_in(shape: Sequence[int], shard: Shard) -> bool:
    """Whether a shard is a part of a tensor of this shape, and has as many elements as its ranges say."""
    inside = len(shape) == len(shard.ranges) and all(
        0 <= begin <= end <= (block[0] if block else size) and not (block and (block[0] < 1 or size % block[0]))
        for (begin, end, *block), size in zip(shard.ranges, shape, strict=True)
    )
    return inside and tuple(shard.tensor.shape) == tuple(
        [
            (end - begin) * (size // block[0] if block else 1)
            for (begin, end, *block), size in zip(shard.ranges, shape, strict=True)
        ]
    )


def pieces(shape: Sequence[int], ranges: Ranges) -> list[Ranges]:
    """The ranges of contiguous pieces that ranges in blocks consist of."""
    each = [
        [(begin + at, end + at) for at in range(0, size, block[0])] if block else [(begin, end)]
        for (begin, end, *block), size in zip(ranges, shape, strict=True)
    ]
    return list(itertools.product(*each))


def _cut(shape: Sequence[int], shard: Shard) -> list[Shard]:
    """A shard as contiguous pieces."""
    found = []
    for ranges in pieces(shape, shard.ranges):
        index = [
            slice(at[0] // own[2] * (own[1] - own[0]), (at[0] // own[2] + 1) * (own[1] - own[0]))
            if len(own) > 2
            else slice(None)
            for at, own in zip(ranges, shard.ranges, strict=True)
        ]
        found.append(Shard(ranges, shard.tensor[tuple(index)]))
    return found


def missing_ranges(shape: Sequence[int], held: Sequence[Ranges]) -> Ranges | None:
    """A part of the tensor that none of the shards covers; None if they cover every element.

    The shards' borders cut each dimension into intervals; a cell of the grid of intervals lies inside a shard or
    outside of it.

    Args:
        shape: of the whole tensor.
        held: the ranges of each shard.
    """
    held = [piece for ranges in held for piece in pieces(shape, ranges)]
    if whole_ranges(shape) in held or not math.prod(shape):
        return None if held else whole_ranges(shape)
    borders = [sorted({0, size, *(border for ranges in held for border in ranges[d])}) for d, size in enumerate(shape)]
    for cell in itertools.product(*(itertools.pairwise(points) for points in borders)):
        if not any(overlap(cell, ranges) == cell for ranges in held):
            return cell
    return None


def overlap(one: Ranges, other: Ranges) -> Ranges | None:
    """The ranges of what two shards have in common; None if that is nothing."""
    common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return tuple(common) if all(begin < end for begin, end in common) else None


def join_shards(shape: Sequence[int], shards: Sequence[Shard]) -> Tensor:
    """The whole tensor; where several shards have an element, the first counts. A whole shard is not copied.

    The shards must cover it (:func:`missing_ranges`).
    """
    if shards[0].ranges == whole_ranges(shape):
        return shards[0].tensor
    joined = torch.empty(tuple(shape), dtype=shards[0].tensor.dtype)
    for ranges, tensor in reversed([piece for shard in shards for piece in _cut(shape, shard)]):
        joined[_slices(ranges)] = tensor
    return joined


def common_parts(one: Shard, other: Shard) -> tuple[Tensor, Tensor] | None:
    """What two shards of one tensor hold of the elements that both have; None if there is no such element.

    Shards in blocks are not looked into.
    """
    if any(len(bounds) > 2 for shard in (one, other) for bounds in shard.ranges):
        return None
    common = overlap(one.ranges, other.ranges)
    return None if common is None else (_part(one, common), _part(other, common))


def _part(shard: Shard, ranges: Ranges) -> Tensor:
    begins = [begin for begin, _ in shard.ranges]
    return shard.tensor[_slices(tuple([(a - n, b - n) for (a, b), n in zip(ranges, begins, strict=True)]))]


def _slices(ranges: Ranges) -> tuple[slice, ...]:
    return tuple([slice(begin, end) for begin, end in ranges])
