"""Memory in which one forked child stores tensors for another."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any, final

import torch

from roundelay.errors import RunError

_ALIGNED = 64

Index = dict[str, list[Any]]
"""Name of a tensor to its offset in bytes, sizes, and dtype by name; can be written as JSON."""


@final
class SharedTensors:
    """Shared memory for tensors, allocated before the children are forked; pages are used when they are written.

    Args:
        num_bytes: the most bytes that will be stored.
        tensors: the most tensors that will be stored, each aligned.
    """

    def __init__(self, num_bytes: int, tensors: int) -> None:
        self._size = num_bytes + _ALIGNED * tensors + mmap.PAGESIZE
        self._memory = mmap.mmap(-1, self._size)
        self._end = 0

    def put_all(self, tensors: Mapping[str, torch.Tensor]) -> Index:
        """Store copies of the tensors; returns where they are, for children that are forked later.

        Raises:
            RunError: there is not enough memory.
        """
        return {name: self._put(tensor.detach()) for name, tensor in tensors.items()}

    def get_all(self, index: Index) -> dict[str, torch.Tensor]:
        """The stored tensors themselves, not copies: they must not be written."""
        return {name: self._at(*place) for name, place in index.items()}

    @property
    def end(self) -> int:
        """End of what this process has stored, in bytes."""
        return self._end

    def continue_at(self, end: int) -> None:
        """Store further tensors after ``end``, to keep what another process has stored."""
        self._end = end

    def close(self) -> None:
        """Release the memory; none of it may be in use in this process."""
        self._memory.close()

    def _put(self, tensor: torch.Tensor) -> list[Any]:
        tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        begin = -(-self._end // _ALIGNED) * _ALIGNED
        place: list[Any] = [begin, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        self._end = begin + tensor.numel() * tensor.element_size()
        if self._end > self._size:
            raise RunError(
                "the state of the training in plain PyTorch",
                got=f"tensors of more than {self._size} bytes",
                expected="weights, gradients and buffers of the sizes that the model had before",
                remedy="Buffers that grow are not compared.",
            )
        self._at(*place).copy_(tensor)
        return place

    def _at(self, begin: int, sizes: list[int], dtype: str) -> torch.Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        count = torch.Size(sizes).numel()
        if not count:
            return torch.empty(sizes, dtype=kind)
        return torch.frombuffer(self._memory, dtype=kind, count=count, offset=begin).view(sizes)
