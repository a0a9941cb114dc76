"""Digests of a whole state of which several workers hold parts, whoever holds which.

Of each part only a sum is told: over its elements the bits of each, times a number made of its place in the whole,
modulo 2^64. Sums of parts add up to that of the whole, so that nobody has to gather the state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from roundelay.checkpoint.shards import Ranges, Shard, whole_ranges

Sums = dict[str, dict[str, int]]
"""By what it is of, with its dtype, and by where the part lies in it: the sum of a part."""

_MODULUS = 1 << 64
_CHUNK = 1 << 17
"""Elements that are summed at one time, so that they stay in the cache."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB


def sums_of(name: str, values: Mapping[str, Any], shard: Shard | None = None) -> Sums:
    """The sums of values that belong together.

    Args:
        name: what they belong to.
        values: by their names.
        shard: the part of a parameter that they belong to: a tensor of its shape is the same part of a whole.
    """
    found: Sums = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            split = shard is not None and value.shape == shard.tensor.shape
            where = shard.ranges if shard is not None and split else whole_ranges(value.shape)
            found[f"{name} {key} {value.dtype}"] = {str(where): element_sum(value, where)}
        else:
            found[f"{name} {key} {value!r}"] = {}
    return found


def joined(parts: Iterable[Sums]) -> Sums:
    """The sums of several holders; of several of the same part the first counts."""
    found: Sums = {}
    for name, own in (entry for sums in parts for entry in sums.items()):
        found[name] = own | found.get(name, {})
    return found


def state_digest(sums: Sums) -> str:
    """Sixteen hexadecimal digits of a whole state: names, dtypes and bits."""
    lines = [f"{name} {sum(own.values()) % _MODULUS}" for name, own in sorted(sums.items())]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def element_sum(part: torch.Tensor, ranges: Ranges) -> int:
    """The sum of the elements of a part, each times a number made of its place; ``ranges`` say where the part lies."""
    own = part.detach().cpu().contiguous()
    if own.is_complex():
        own, ranges = torch.view_as_real(own), (*ranges, (0, 2))
    if not own.dim():
        own, ranges = own.reshape(1), ((0, 1),)
    if not own.numel():
        return 0
    first, *others = [_places(at, size) for at, size in zip(ranges, own.shape, strict=True)]
    inner = [_factors(places, dim) for dim, places in enumerate(others, 1)]
    rows = max(1, _CHUNK * own.shape[0] // own.numel())
    chunks = zip(own.view(_WORDS[own.element_size()]).split(rows), first.split(rows), strict=True)
    return sum(_summed(words, [_factors(places, 0), *inner]) for words, places in chunks) % _MODULUS


def _summed(words: torch.Tensor, factors: Sequence[torch.Tensor]) -> int:
    for factor in reversed(factors):
        words = (words * factor).sum(-1)
    return int(words)


def _places(at: Sequence[int], size: int) -> torch.Tensor:
    """The indices of a part along one dimension of the whole."""
    begin, end, *block = at
    starts = torch.arange(size // (end - begin)) * (block[0] if block else 0)
    return (starts[:, None] + torch.arange(begin, end)).reshape(-1)


def _factors(places: torch.Tensor, dim: int) -> torch.Tensor:
    """An odd number for each index along a dimension; any two look unrelated."""
    mixed = (places + 1) * _MIX[0] + dim * _MIX[1]
    mixed = (mixed ^ (mixed >> 30)) * _MIX[1]
    mixed = (mixed ^ (mixed >> 27)) * _MIX[2]
    return (mixed ^ (mixed >> 31)) | 1
