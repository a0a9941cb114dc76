"""How large the tensors are that a stage from outside makes, before it makes any: on torch's meta device.

The sizes that are written in a graph are bounded when it is rebuilt; those that it computes from others are seen here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundelay.errors import RoundelayError
from roundelay.frontend.plain_stage import rebuilt
from roundelay.frontend.stages.keyed_rng import RngKey
from roundelay.ir.plain_graph import LIMITS, Limits, PlainStage, refused

META = torch.device("meta")
Like = Mapping[str, Any]
"""Values by name: tensors on any device, of which only sizes and dtype count, and numbers."""


def largest(plain: PlainStage, parameters: Like, buffers: Like, inputs: Like, limits: Limits = LIMITS) -> int:
    """Bytes of the largest tensor that a forward makes; -1 if that depends on values, and so cannot be known before.

    Args:
        plain: the stage, checked.
        parameters: like its parameters.
        buffers: like its buffers.
        inputs: like its inputs for the largest micro-batch of the plan.
        limits: how many elements a tensor may have.

    Raises:
        PlanError: a tensor would have more; or the stage does not fit these values.
    """
    function = rebuilt(plain, META, halved=False, limits=limits)
    own, kept, given = (_on_meta(values) for values in (parameters, buffers, inputs))
    sizes = _Sizes(limits)
    try:
        with sizes:
            function.forward(own, kept, given, RngKey(0, 0), mode="stash")
    except RoundelayError:
        raise
    except NotImplementedError:  # of an operation that asks for values
        return -1
    except Exception as error:
        if "meta" in str(error).lower():
            return -1
        got = f"{type(error).__name__}: {error!s:.300}"
        raise refused(f"stage {plain.stage}", got, "a stage for values of these sizes") from error
    return sizes.largest


@final
class _Sizes(TorchDispatchMode):
    """Notes the bytes of the largest tensor made, and refuses one beyond the limits."""

    def __init__(self, limits: Limits) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limits = limits
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, torch.Tensor) and not func.is_view:
                if made.numel() > self._limits.elements:
                    got = f"a tensor of {made.numel():,} elements"
                    raise refused(f"operation {func}", got, f"at most {self._limits.elements:,}")
                self.largest = max(self.largest, made.numel() * made.itemsize)
        return result


def _on_meta(values: Like) -> dict[str, Any]:
    return {name: value.to(META) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
