"""The gradients of a stage as a few flat tensors, so that its holders exchange them together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from roundelay.errors import InternalError, listed
from roundelay.frontend.describe_graph import dtype_name
from roundelay.frontend.stages.retarget_device import CPU
from roundelay.ir.bucket import ALIGNMENT, Tensor, gradient_buckets

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class GradientBucket:
    """Where each gradient lies in the flat tensors, each of one dtype, and behind them what the losses have counted.

    Args:
        dtypes: of the flat tensors.
        names: of the gradients in each of them, in order.
        shapes: of all gradients.
        device: the device of the stage, where what is counted lies too, as there may be no gradient that tells.
    """

    dtypes: tuple[torch.dtype, ...]
    names: tuple[tuple[str, ...], ...]
    shapes: Mapping[str, torch.Size]
    device: torch.device = CPU

    @staticmethod
    def of(parameters: Iterable[tuple[str, torch.Tensor]], device: torch.device = CPU) -> GradientBucket:
        """The bucket for the gradients of these parameters, those that keep what follows aligned first."""
        own = list(parameters)
        buckets = gradient_buckets(tensor_of(name, parameter) for name, parameter in own)
        dtypes = tuple([getattr(torch, bucket[0].dtype) for bucket in buckets])
        names = tuple([tuple([one.name for one in bucket]) for bucket in buckets])
        return GradientBucket(dtypes, names, {name: parameter.shape for name, parameter in own}, device)

    @property
    def elements(self) -> tuple[int, ...]:
        """Elements of each flat tensor, and of the one that counts."""
        return (*(sum(math.prod(self.shapes[name]) for name in names) for names in self.names), 1)

    def pack(
        self, sums: Tensors, count: float, room: tuple[torch.Tensor, ...] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The flat tensors.

        Args:
            sums: gradients by name.
            count: what the losses have counted.
            room: the flat tensors to write, which may be longer, as parts of the mesh's first worker are; new ones by
                default.

        Raises:
            InternalError: a gradient is missing, or there is one more.
        """
        self._check(sums)
        pieces = [[sums[name].reshape(-1) for name in names] for names in self.names]
        pieces.append([torch.tensor([count], dtype=torch.float64, device=self.device)])
        if room is None:
            return tuple(map(torch.cat, pieces))
        parts = tuple([out[:count] for out, count in zip(room, self.elements, strict=True)])
        for own, out in zip(pieces, parts, strict=True):
            torch.cat(own, out=out)
        return parts

    def add(self, parts: tuple[torch.Tensor, ...], sums: Tensors, count: float) -> None:
        """Add gradients to those in flat tensors; raises as :meth:`pack` does."""
        self._check(sums)
        *flat, counted = parts
        for tensor, names in zip(flat, self.names, strict=True):
            pieces = tensor.split([math.prod(self.shapes[name]) for name in names])
            torch._foreach_add_([*pieces], [sums[name].reshape(-1) for name in names])
        counted += count

    def _check(self, sums: Tensors) -> None:
        if sums.keys() != self.shapes.keys():
            odd = sorted(sums.keys() ^ self.shapes.keys())
            raise InternalError(
                "the gradients that replicas exchange",
                got=f"{'no' if odd[0] in self.shapes else 'a'} gradient of {listed(odd)}",
                expected="a gradient of every trained parameter, but those that the plan leaves out as `unused`",
                remedy="Write a new plan with `roundelay plan`; if that does not help, report this as a bug.",
            )

    def unpack(self, parts: tuple[torch.Tensor, ...]) -> tuple[dict[str, torch.Tensor], float]:
        """Gradients by name, and the count; the inverse of :meth:`pack`. They share the memory of the flat tensors."""
        if not parts:
            return {}, 0.0
        *flat, count = parts
        gradients = {}
        for tensor, names in zip(flat, self.names, strict=True):
            sizes = [math.prod(self.shapes[name]) for name in names]
            for name, piece in zip(names, tensor[: sum(sizes)].split(sizes), strict=True):
                aligned = piece.clone() if piece.data_ptr() % ALIGNMENT else piece
                gradients[name] = aligned.view(self.shapes[name])
        return gradients, float(count)


def tensor_of(name: str, parameter: torch.Tensor) -> Tensor:
    """What a bucket knows of a parameter."""
    return Tensor(name, dtype_name(parameter), tuple(parameter.shape))
