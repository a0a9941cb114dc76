"""Functions that a stage runs in the place of what a trace would hold for ever, or cannot differentiate.

*BatchNorm with* ``momentum=None``, whose statistics are means over all batches so far: its factor is one over the
number of batches, which the layer reads from a buffer into Python. While a model is exported an operator of our own
stands for the layer; a stage runs :func:`cumulative_batch_norm`, which reads the buffer at every call.

``torch.cond``: its own operator traces both branches again when it is differentiated. A stage runs :func:`branch`,
which is what it means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch.nn.modules.batchnorm import _BatchNorm


def cumulative_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    tracked: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """What the layer computes in training mode; ``mean``, ``var`` and the number ``tracked`` are written."""
    tracked.add_(1)
    factor = 1.0 / float(tracked)
    return torch.batch_norm(x, weight, bias, mean, var, True, factor, eps, torch.backends.cudnn.enabled)


_SCHEMA = "(Tensor x, Tensor? weight, Tensor? bias, Tensor(a!) mean, Tensor(b!) var, Tensor(c!) tracked, float eps)"
torch.library.define("roundelay::cumulative_batch_norm", f"{_SCHEMA} -> Tensor")
torch.library.impl("roundelay::cumulative_batch_norm", "CompositeExplicitAutograd", cumulative_batch_norm)
torch.library.register_fake("roundelay::cumulative_batch_norm", lambda x, *_: torch.empty_like(x))


@contextmanager
def standing_in() -> Iterator[None]:
    """While it lasts, such layers call the operator."""
    layer: Any = _BatchNorm
    original = layer.forward

    def forward(self: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
        own = (self.running_mean, self.running_var, self.num_batches_tracked)
        if self.momentum is not None or not self.training or any(part is None for part in own):
            return original(self, x)  # type: ignore[no-any-return]
        self._check_input_dim(x)
        made: torch.Tensor = torch.ops.roundelay.cumulative_batch_norm(x, self.weight, self.bias, *own, self.eps)
        return made

    layer.forward = forward
    try:
        yield
    finally:
        layer.forward = original


def branch(pred: Any, true: Any, false: Any, operands: Sequence[Any] = ()) -> Any:
    """``torch.cond``: one of two graphs, called as autograd would see it without any condition."""
    return (true if bool(pred) else false)(*operands)


def put_back(module: torch.fx.GraphModule) -> None:
    """Replace the operators in a graph, and in the graphs that its operations run, by the functions."""
    functions = {
        torch.ops.roundelay.cumulative_batch_norm.default: cumulative_batch_norm,
        torch.ops.higher_order.cond: branch,
    }
    for inner in module.modules():
        if isinstance(inner, torch.fx.GraphModule):
            for node in inner.graph.nodes:
                if node.op == "call_function":
                    node.target = functions.get(node.target, node.target)
            inner.recompile()
