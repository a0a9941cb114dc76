"""Tensors that one forked child leaves for another, in memory that was shared before either was forked."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any, final

import torch

from roundelay.errors import RunError

_ALIGNED = 64

Index = dict[str, list[Any]]
"""Name of a tensor to its place: offset in bytes, sizes, and its dtype by name. JSON can hold it."""


@final
class SharedTensors:
    """Memory for so many bytes of tensors; nothing is taken from the system before it is written.

    Args:
        num_bytes: at most so many are written.
        tensors: at most so many are written, each of which begins where memory is aligned.
    """

    def __init__(self, num_bytes: int, tensors: int) -> None:
        self._size = num_bytes + _ALIGNED * tensors + mmap.PAGESIZE
        self._memory = mmap.mmap(-1, self._size)
        self._end = 0

    def leave(self, tensors: Mapping[str, torch.Tensor]) -> Index:
        """Copies of the tensors, for whoever is forked later and given their places.

        Raises:
            RunError: there is no room for them.
        """
        return {name: self._left(tensor.detach()) for name, tensor in tensors.items()}

    def take(self, index: Index) -> dict[str, torch.Tensor]:
        """The tensors in these places, themselves: to be read only."""
        return {name: self._at(*place) for name, place in index.items()}

    @property
    def end(self) -> int:
        """Where what this process has left ends, in bytes."""
        return self._end

    def go_on(self, end: int) -> None:
        """Leave what another process has left up to there."""
        self._end = end

    def close(self) -> None:
        """Give the memory back; nothing of it may be in use in this process."""
        self._memory.close()

    def _left(self, tensor: torch.Tensor) -> list[Any]:
        tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        begin = -(-self._end // _ALIGNED) * _ALIGNED
        place: list[Any] = [begin, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
        self._end = begin + tensor.numel() * tensor.element_size()
        if self._end > self._size:
            raise RunError(
                "what plain PyTorch has trained",
                got=f"tensors of more than {self._size} bytes",
                expected="weights, gradients and buffers of the sizes that the model had before",
                remedy="A buffer that grows is not compared.",
            )
        self._at(*place).copy_(tensor)
        return place

    def _at(self, begin: int, sizes: list[int], dtype: str) -> torch.Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        count = torch.Size(sizes).numel()
        if not count:
            return torch.empty(sizes, dtype=kind)
        return torch.frombuffer(self._memory, dtype=kind, count=count, offset=begin).view(sizes)
