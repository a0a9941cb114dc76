"""Buckets: which parameters' tensors are exchanged together, in flat tensors of one dtype each.

Flat tensors are not larger than :data:`LARGEST`, so that the C library keeps their memory from one batch to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from roundelay.ir.exchange import itemsize
from roundelay.ir.sbp import Split, local_shape

ALIGNMENT = 64
"""Bytes to which torch allocates on the CPU; kernels may compute other last bits where data begin elsewhere."""

LARGEST = 16 << 20
"""Bytes of a flat tensor, unless a single one is larger."""

COUNTED = "float64"
"""The dtype of what the losses have counted, which stands behind gradients."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter, or a worker's part of one: name, torch's name of its dtype, and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of them."""
        return self.elements * itemsize(self.dtype)


Bucket = tuple[Tensor, ...]
"""Those in one flat tensor, in order."""


def gradient_buckets(tensors: Iterable[Tensor]) -> tuple[Bucket, ...]:
    """The buckets of gradients: in each dtype those that keep what follows aligned come first."""
    by_dtype: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    made: list[Bucket] = []
    for own in by_dtype.values():
        made += _filled(sorted(own, key=lambda tensor: tensor.num_bytes % ALIGNMENT > 0))
    return tuple(made)


def state_buckets(tensors: Iterable[Tensor]) -> tuple[Bucket, ...]:
    """The buckets of parameters of which each replica updates a part."""
    return _filled(sorted(tensors, key=lambda tensor: tensor.dtype))


def _filled(tensors: Iterable[Tensor]) -> tuple[Bucket, ...]:
    """One tensor after the other, in a new bucket where the dtype is another or the room is used up."""
    made: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not made or made[-1][0].dtype != tensor.dtype or tensor.num_bytes > room:
            made.append([])
            room = LARGEST
        made[-1].append(tensor)
        room -= tensor.num_bytes
    return tuple(map(tuple, made))


def elements_of(buckets: Sequence[Bucket]) -> tuple[int, ...]:
    """Elements of each flat tensor of gradients, and of the one that counts."""
    return (*(sum(tensor.elements for tensor in bucket) for bucket in buckets), 1)


def rows_of(buckets: Sequence[Bucket], splits: Mapping[str, Split], replicas: int) -> tuple[tuple[int, int], ...]:
    """The shape of each tensor of states: a row for each replica, as long as the longest, which is the first."""
    return tuple(
        [
            (replicas, sum(math.prod(local_shape(one.shape, splits[one.name], replicas, 0)) for one in bucket))
            for bucket in buckets
        ]
    )
