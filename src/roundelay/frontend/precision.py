"""Computing in a lower precision: torch's autocast around every piece of the graph and around the loss.

Weights, their gradients, the optimizer and its state stay in single precision; torch casts what its lists of operations
name, at each operation, so values between stages have the dtype that they would have in the uncut model. Casts are not
cached: every call is a function of its arguments alone.

Autocast saves a *copy* of a weight for backward, in the lower precision. Backward mode ``mixed`` reads other weights
than the forward: it would not know that copy for a weight. :class:`Casts` watches them being made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundelay.errors import CaptureError

FULL = "fp32"
"""Nothing is cast."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision of a plan to what autocast casts to."""


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """While this lasts, operations on ``device`` compute in a precision: ``fp32`` or a key of :data:`DTYPES`."""
    if precision == FULL:
        return nullcontext()
    return torch.autocast(device.type, DTYPES[precision], cache_enabled=False)


def not_in(precision: str, error: Exception) -> CaptureError:
    """What to say of a model that cannot be computed in a precision."""
    return CaptureError(
        f"the model in {precision}",
        got=f"{type(error).__name__}: {str(error).strip()[:500]}",
        expected="a model that torch's autocast can compute in it",
        remedy='Leave --precision out (precision = "fp32" in the plan), or cast by hand in the model.',
    )


@dataclass(frozen=True, slots=True)
class Lowered:
    """A piece, called under autocast."""

    call: Callable[..., Sequence[Any]]
    precision: str
    device: torch.device

    def __call__(self, *args: Any) -> Sequence[Any]:
        """Call it."""
        with autocast(self.precision, self.device):
            return self.call(*args)


class View(NamedTuple):
    """A window into a weight: its number, size, strides and offset."""

    weight: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Cast(NamedTuple):
    """What was cast, a weight or a part of it, and to what."""

    source: View
    dtype: torch.dtype

    def again(self, weight: torch.Tensor) -> torch.Tensor:
        """The same cast of another version of the weight, laid out alike."""
        return weight.as_strided(self.source.size, self.source.stride, self.source.offset).to(self.dtype)


@final
class Casts(TorchDispatchMode):
    """Notes every cast of a weight while a forward runs.

    Args:
        owned: address of a weight's storage to its number.
    """

    def __init__(self, owned: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owned = owned
        self._made: list[torch.Tensor] = []  # held, so that no other tensor gets the address meanwhile
        #: address of a cast's storage to what it is
        self.found: dict[int, Cast] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            index = self._owned.get(args[0].untyped_storage().data_ptr())
            if index is not None:
                source = View(index, args[0].size(), args[0].stride(), int(args[0].storage_offset()))
                self.found[made.untyped_storage().data_ptr()] = Cast(source, made.dtype)
                self._made.append(made)
        return made
