"""Functions that a stage runs in place of operations that a trace would make constant, or that have no backward.

*BatchNorm with* ``momentum=None``, whose statistics are means over all batches so far: its factor is one over the
number of batches, which the layer reads from a buffer into Python. During export a custom operator replaces the layer;
a stage runs :func:`cumulative_batch_norm`, which reads the buffer at every call.

``torch.cond``: its operator traces both branches again when it is differentiated. A stage runs :func:`branch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.fx
from torch.nn.modules.batchnorm import _BatchNorm

from roundelay.frontend.export import recurrent


def cumulative_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    tracked: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The layer's result in training mode; updates ``mean``, ``var`` and the number of batches ``tracked``."""
    tracked.add_(1)
    factor = 1.0 / float(tracked)
    return torch.batch_norm(x, weight, bias, mean, var, True, factor, eps, torch.backends.cudnn.enabled)


def takes_statistics(target: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation is a BatchNorm that takes statistics of its input ``args[0]``, (rows, channels, ...)."""
    return target is cumulative_batch_norm or (target is torch.ops.aten.batch_norm.default and bool(args[5]))


_SCHEMA = "(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!) mean, Tensor(b!) var, Tensor(c!) tracked, float eps)"
torch.library.define("roundelay::cumulative_batch_norm", f"{_SCHEMA} -> Tensor")
torch.library.impl("roundelay::cumulative_batch_norm", "CompositeExplicitAutograd", cumulative_batch_norm)
torch.library.register_fake("roundelay::cumulative_batch_norm", lambda x, *_: torch.empty_like(x))


@contextmanager
def substituting() -> Iterator[None]:
    """Let BatchNorm layers with ``momentum=None`` call the operator within the block."""
    original = _BatchNorm.forward

    def forward(self: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
        own = (self.running_mean, self.running_var, self.num_batches_tracked)
        if self.momentum is not None or not self.training or any(part is None for part in own):
            return original(self, x)
        self._check_input_dim(x)
        result: torch.Tensor = torch.ops.roundelay.cumulative_batch_norm(x, self.weight, self.bias, *own, self.eps)
        return result

    with mock.patch.object(_BatchNorm, "forward", forward):
        yield


def branch(pred: Any, true: Any, false: Any, operands: Sequence[Any] = ()) -> Any:
    """``torch.cond``: call one of two graphs, as in Python's ``if``."""
    return (true if bool(pred) else false)(*operands)


REPLACEMENTS = {
    **recurrent.REPLACEMENTS,
    torch.ops.roundelay.cumulative_batch_norm.default: (cumulative_batch_norm, None),
    torch.ops.higher_order.cond: (branch, None),
}
"""Operator to what a stage runs instead, and to how many of the arguments that takes (None: all)."""


def substitute(module: torch.fx.GraphModule) -> None:
    """Replace the operators of :data:`REPLACEMENTS` in a graph and its sub-graphs."""
    for inner in module.modules():
        if isinstance(inner, torch.fx.GraphModule):
            for node in inner.graph.nodes:
                if node.op == "call_function" and node.target in REPLACEMENTS:
                    node.target, count = REPLACEMENTS[node.target]
                    node.args = node.args[:count]
            inner.recompile()
