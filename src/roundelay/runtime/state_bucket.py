"""Parts of a stage's parameters, one for each replica, as a few tensors that replicas exchange (ZeRO; OneFlow, 6.4).

Each tensor has a row for each replica: its parts of some parameters one after the other, and zeros up to the length of
the longest row. Gradients are reduced and scattered by rows; weights are gathered from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from roundelay.ir.bucket import state_buckets
from roundelay.ir.sbp import Split, local_shape
from roundelay.runtime.gradient_bucket import tensor_of

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StateBucket:
    """Where each replica's parts lie.

    Args:
        replicas: R.
        dtypes: of the tensors.
        names: of the parameters in each of them, in order.
        splits: of all parameters.
        shapes: of all parameters, whole.
    """

    replicas: int
    dtypes: tuple[torch.dtype, ...]
    names: tuple[tuple[str, ...], ...]
    splits: Mapping[str, Split]
    shapes: Mapping[str, torch.Size]

    @staticmethod
    def of(parameters: Iterable[tuple[str, torch.Tensor]], splits: Mapping[str, Split], replicas: int) -> StateBucket:
        """The bucket for these parameters."""
        own = dict(parameters)
        buckets = state_buckets(tensor_of(name, parameter) for name, parameter in own.items())
        dtypes = tuple([getattr(torch, bucket[0].dtype) for bucket in buckets])
        names = tuple([tuple([one.name for one in bucket]) for bucket in buckets])
        shapes = {name: own[name].shape for of in names for name in of}
        return StateBucket(replicas, dtypes, names, {n: splits[n] for n in shapes}, shapes)

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """The shape of each tensor."""
        return tuple([(self.replicas, max(self._length(of, r) for r in range(self.replicas))) for of in self.names])

    def scattered(self, gradients: Tensors) -> tuple[torch.Tensor, ...]:
        """Gradients of whole parameters, a row for each replica; none if there is no gradient."""
        if not gradients:
            return ()
        every = [{n: self._parts(n, gradients[n]) for n in names} for names in self.names]
        return tuple(
            torch.stack([self._row([parts[n][r] for n in parts], shape[1]) for r in range(self.replicas)])
            for parts, shape in zip(every, self.rows, strict=True)
        )

    def own(self, rows: tuple[torch.Tensor, ...], replica: int) -> dict[str, torch.Tensor]:
        """A replica's parts, of its row of each tensor; they share its memory."""
        found: dict[str, torch.Tensor] = {}
        for row, names in zip(rows, self.names, strict=True):
            found |= self._of_row(row[0], names, replica)
        return found

    def packed(self, parts: Tensors) -> tuple[torch.Tensor, ...]:
        """A replica's parts as its row of each tensor, of its dtype, in memory of their own."""
        return tuple(
            self._row([parts[n].detach().to(dtype) for n in names], shape[1])[None]
            for names, dtype, shape in zip(self.names, self.dtypes, self.rows, strict=True)
        )

    def gathered(self, tensors: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        """Whole parameters, of all rows, in memory of their own."""
        found = {}
        for tensor, names in zip(tensors, self.names, strict=True):
            each = [self._of_row(row, names, r) for r, row in enumerate(tensor)]
            for name in names:
                split = self.splits[name]
                opened = [_opened(parts[name], split) for parts in each]
                found[name] = torch.cat(opened, split.dim + 1).flatten(split.dim, split.dim + 2)
        return found

    def _shape(self, name: str, replica: int) -> tuple[int, ...]:
        return local_shape(self.shapes[name], self.splits[name], self.replicas, replica)

    def _length(self, names: Iterable[str], replica: int) -> int:
        return sum(torch.Size(self._shape(name, replica)).numel() for name in names)

    def _parts(self, name: str, whole: torch.Tensor) -> list[torch.Tensor]:
        split = self.splits[name]
        pieces = torch.tensor_split(_opened(whole, split), self.replicas, split.dim + 1)
        return [piece.flatten(split.dim, split.dim + 2) for piece in pieces]

    @staticmethod
    def _row(parts: Iterable[torch.Tensor], length: int) -> torch.Tensor:
        flat = [part.reshape(-1) for part in parts]
        return torch.cat([*flat, flat[0].new_zeros(length - sum(part.numel() for part in flat))])

    def _of_row(self, row: torch.Tensor, names: Iterable[str], replica: int) -> dict[str, torch.Tensor]:
        found, at = {}, 0
        for name in names:
            shape = self._shape(name, replica)
            size = torch.Size(shape).numel()
            found[name] = row[at : at + size].view(shape)
            at += size
        return found


def _opened(tensor: torch.Tensor, split: Split) -> torch.Tensor:
    opened: torch.Tensor = tensor.unflatten(split.dim, (split.outer, -1, split.unit))
    return opened
