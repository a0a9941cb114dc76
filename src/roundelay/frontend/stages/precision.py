"""Computing in a lower precision: torch's autocast around every segment and around the loss.

Weights, their gradients, the optimizer and its state stay in single precision; torch casts at each operation according
to its own lists, so values between stages have the dtypes that they have in the uncut model. Casts are not cached:
every call is a function of its arguments alone.

Autocast saves a *copy* of a weight in the lower precision for the backward. The backward mode ``mixed`` reads other
weights than the forward, so it must recognise such a copy: :class:`Casts` records them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roundelay.errors import CaptureError

FULL = "fp32"
"""No autocast."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Precision of a plan to the dtype of autocast."""


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which operations on ``device`` compute in ``fp32`` or in a key of :data:`DTYPES`."""
    if precision == FULL:
        return nullcontext()
    return torch.autocast(device.type, DTYPES[precision], cache_enabled=False)


def not_in(precision: str, error: Exception) -> CaptureError:
    """The error for a model that cannot be computed in a precision."""
    return CaptureError(
        f"the model in {precision}",
        got=f"{type(error).__name__}: {str(error).strip()[:500]}",
        expected="a model that torch's autocast can compute in it",
        remedy='Leave --precision out (precision = "fp32" in the plan), or cast by hand in the model.',
    )


class Cast(NamedTuple):
    """A cast of a view of a weight: the weight's index, the view's size, strides and offset, and the dtype."""

    weight: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def again(self, weight: torch.Tensor) -> torch.Tensor:
        """Repeat the cast on another version of the weight, of the same layout."""
        return weight.as_strided(self.size, self.stride, self.offset).to(self.dtype)


@final
class Casts(TorchDispatchMode):
    """Records every cast of a weight while a forward runs.

    Args:
        weight_at: storage address to index of a weight.
    """

    def __init__(self, weight_at: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._weight_at = weight_at
        self._results: list[torch.Tensor] = []  # kept alive, so that no other tensor gets the address
        #: storage address of a cast's result to the cast
        self.found: dict[int, Cast] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            index = self._weight_at.get(args[0].untyped_storage().data_ptr())
            if index is not None:
                view = args[0].size(), args[0].stride(), int(args[0].storage_offset())
                self.found[result.untyped_storage().data_ptr()] = Cast(index, *view, result.dtype)
                self._results.append(result)
        return result
