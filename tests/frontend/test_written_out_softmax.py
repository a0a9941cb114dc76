"""Softmax and cross entropy written out compute what torch's own operators do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from roundelay.frontend.export.export import Exported
from roundelay.frontend.mesh.written_out_softmax import WRITTEN_OUT, written_out
from tests.frontend.test_op_rows_by_running import ints, operations, r

LABELS = torch.tensor([3, -100, 0, 6, -100])
CASES: dict[str, tuple[Any, ...]] = {
    "softmax": (lambda x: x.softmax(-1), r(5, 3, 4)),
    "softmax of the first": (lambda x: x.softmax(0), r(5, 3)),
    "log_softmax": (lambda x: F.log_softmax(x, 1), r(5, 3, 4)),
    "of single precision in double": (lambda x: x.softmax(-1, dtype=torch.float64), r(5, 3).float()),
    "mean": (F.cross_entropy, r(5, 7), ints(7, 5)),
    "some ignored": (F.cross_entropy, r(5, 7), LABELS),
    "another ignored": (lambda x, y: F.cross_entropy(x, y, ignore_index=2), r(5, 7), ints(7, 5)),
    "all ignored": (F.cross_entropy, r(5, 7), torch.full((5,), -100)),
    "sum": (lambda x, y: F.cross_entropy(x, y, reduction="sum"), r(5, 7), LABELS),
    "none": (lambda x, y: F.cross_entropy(x, y, reduction="none"), r(5, 7, 3), ints(7, 5, 3)),
    "weights": (lambda x, y, w: F.cross_entropy(x, y, w), r(5, 7), LABELS, r(7).exp()),
    "smoothing": (lambda x, y: F.cross_entropy(x, y, label_smoothing=0.2), r(5, 7), LABELS),
    "smoothing and weights": (
        lambda x, y, w: F.cross_entropy(x, y, w, label_smoothing=0.2),
        r(5, 7, 2),
        ints(7, 5, 2),
        r(7).exp(),
    ),
    "large scores": (F.cross_entropy, 1e4 * r(5, 7), ints(7, 5)),
    "an ignored label of an impossible class": (
        F.cross_entropy,
        torch.cat([torch.full((5, 1), -torch.inf, dtype=torch.float64), r(5, 6)], 1),
        torch.tensor([3, -100, 1, 6, -100]),
    ),
}


def computed(exported: Exported, x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and the gradient of a sum of it, with other weights for each number."""
    leaf = x.clone().requires_grad_()
    (result,) = torch.fx.Interpreter(exported.module).run(leaf, *others)
    upon = torch.arange(1, result.numel() + 1, dtype=result.dtype).view_as(result)
    return result.detach(), torch.autograd.grad(result, leaf, upon)[0]


@pytest.mark.parametrize("case", CASES)
def test_it_computes_the_same(case: str) -> None:
    function, *tensors = CASES[case]
    for own, theirs in both(function, *tensors):
        torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("case", ["softmax", "log_softmax", "mean", "smoothing"])
def test_of_half_precision_it_is_computed_in_single_as_torch_does(case: str) -> None:
    function, x, *others = CASES[case]
    rounded = x.bfloat16()
    exact = [theirs for _, theirs in both(function, rounded.double(), *others)]
    for (own, theirs), correct in zip(both(function, rounded, *others), exact, strict=True):
        assert own.dtype is theirs.dtype
        far, as_far = (float((found.double() - correct).norm()) for found in (own, theirs))
        assert far <= 1.5 * as_far


def both(function: Callable[..., Tensor], *tensors: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Results and gradients of what is written out, and of the operator."""
    (op,) = [op for op in operations(function, *tensors) if op.node.target in WRITTEN_OUT]
    graph = op.alone.module.graph
    output = graph.output_node()
    output.args = ((op.node,),)  # as exported graphs have it
    ours = written_out(op.alone, {op.node.name})
    found = {node.name: node.target for node in ours.module.graph.nodes}
    assert found[op.node.name] is torch.ops.aten.to.dtype
    assert op.node.target not in found.values()
    return zip(computed(ours, *tensors), computed(op.alone, *tensors), strict=True)
