"""Operators with deferred weight gradients: each runs its forward and records how to compute the gradients later.

Forward and weight gradient follow torch's own implementation, branch by branch: which kernel is called, on which
layout, in which order a bias is summed. So the bits equal autograd's, as ``tests/frontend/test_split_backward.py``
tests. Under autocast each operator first casts its arguments as autocast would, so that the weight gradient has the
operands it has in autograd; :func:`roundelay.frontend.stages.split_backward.settle` casts the result back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

aten = torch.ops.aten


@dataclass(slots=True)
class PendingWgrad:
    """The weight gradients of one operation that the second half of a backward still has to compute.

    Args:
        weights: whose gradients are pending: parameters, or values derived from parameters only.
        saved: tensors kept for the second half.
        compute: gradient of the output -> gradients of ``weights``.
        edge: where in the autograd graph the output's gradient passes; None after the first half.
        grad_output: the output's gradient, between the halves; None if there is none.
    """

    weights: tuple[torch.Tensor, ...]
    saved: tuple[torch.Tensor, ...]
    compute: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    edge: GradientEdge | None
    grad_output: torch.Tensor | None = None


def _requiring_grad(x: torch.Tensor) -> torch.Tensor:
    """Return the input requiring a gradient: kernels may depend on that, and the output needs an edge in the graph."""
    return x if x.requires_grad else x.detach().requires_grad_()


def _detached(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else weight.detach()


def _cast(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    """What an operator that autocast casts gets for these: themselves where it is off, and where they are no floats."""
    device = next(tensor.device.type for tensor in tensors if tensor is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(tensor.to(dtype) if tensor is not None and _is_cast(tensor) else tensor for tensor in tensors)


def _is_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype is not torch.float64


def _defer(
    pending: list[PendingWgrad],
    output: torch.Tensor,
    weights: Sequence[torch.Tensor | None],
    saved: Sequence[torch.Tensor],
    compute: Callable[[torch.Tensor], Sequence[torch.Tensor]],
) -> torch.Tensor:
    """Append the pending weight gradients of ``output``, and return it."""
    trained = tuple(weight for weight in weights if weight is not None and weight.requires_grad)
    pending.append(PendingWgrad(trained, tuple(saved), compute, get_gradient_edge(output)))
    return output


def _linear(
    pending: list[PendingWgrad], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``aten.linear``: (..., in), (out, in), (out) to (..., out), by the branch that it takes for a trained weight."""
    x, detached, bias_cast = _cast(_requiring_grad(x), weight.detach(), _detached(bias))
    if x.ndim == 2 or (bias_cast is not None and x.is_contiguous()):
        output = aten.linear.default(x, detached, bias_cast)
    else:
        output = _folded(x, detached.t())
        output = output if bias_cast is None else output + bias_cast
    flat = x.ndim == 2 or x.is_contiguous()  # then the bias is added to the rows, else to the unflattened tensor
    saved, columns, bias_shape = x.detach(), _column_major(detached.t()), _trained_shape(bias)

    def compute(grad: torch.Tensor) -> list[torch.Tensor]:
        rows = _rows(grad)
        wgrads = [_wgrad(rows, _rows(saved), columns).t()]
        return wgrads if bias_shape is None else [*wgrads, (rows if flat else grad).sum_to_size(bias_shape)]

    return _defer(pending, output, (weight, bias), (x,), compute)


def _matmul(pending: list[PendingWgrad], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``aten.matmul`` and ``aten.mm`` with a matrix: (..., n), (n, m) to (..., m)."""
    x, detached = _cast(_requiring_grad(x), weight.detach())
    saved, columns = x.detach(), _column_major(detached)

    def compute(grad: torch.Tensor) -> list[torch.Tensor]:
        return [_wgrad(_rows(grad), _rows(saved), columns)]

    return _defer(pending, _folded(x, detached), (weight,), (x,), compute)


def _addmm(pending: list[PendingWgrad], bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``aten.addmm``: (m), (k, n), (n, m) to (k, m)."""
    x, detached, bias_cast = _cast(_requiring_grad(x), weight.detach(), bias.detach())
    output = aten.addmm.default(bias_cast, x, detached)
    saved, columns, bias_shape = x.detach(), _column_major(detached), _trained_shape(bias)

    def compute(grad: torch.Tensor) -> list[torch.Tensor]:
        wgrads = [_wgrad(grad, saved, columns)]
        return wgrads if bias_shape is None else [grad.sum_to_size(bias_shape), *wgrads]

    return _defer(pending, output, (bias, weight), (x,), compute)


def _folded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(..., n) times (n, m) as one product of two matrices, as ``matmul`` computes it for a trained weight."""
    if x.ndim == 2:
        return x.mm(weight)
    return _rows(x).mm(weight).view(*x.shape[:-1], weight.size(-1))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(..., n) as (k, n)."""
    return x if x.ndim == 2 else x.reshape(-1, x.size(-1))


def _column_major(weight: torch.Tensor) -> bool:
    """Whether a product's second matrix is stored column by column; autograd lays out its gradient alike."""
    return weight.stride() == (1, weight.size(0))


def _wgrad(grad: torch.Tensor, first: torch.Tensor, columns: bool) -> torch.Tensor:
    """The gradient of a product's second matrix."""
    return grad.t().mm(first).t() if columns else first.t().mm(grad)


def _trained_shape(bias: torch.Tensor | None) -> torch.Size | None:
    return bias.shape if bias is not None and bias.requires_grad else None


def _embedding(
    pending: list[PendingWgrad], weight: torch.Tensor, rows: torch.Tensor, padding: int = -1, by_frequency: bool = False
) -> torch.Tensor:
    """``aten.embedding``: (n, d), whole numbers (...) to (..., d)."""
    output = aten.embedding.default(weight.detach(), rows, padding, by_frequency).requires_grad_()

    def compute(grad: torch.Tensor) -> list[torch.Tensor]:
        return [aten.embedding_backward.default(grad, rows, weight.size(0), padding, by_frequency, False)]

    return _defer(pending, output, (weight,), (rows,), compute)


def _convolution(
    pending: list[PendingWgrad], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any
) -> torch.Tensor:
    """``aten.convolution``: (rows, channels, ...) and its weight to (rows, channels, ...); ``options`` are its own."""
    x, detached, bias_cast = _cast(_requiring_grad(x), weight.detach(), _detached(bias))
    output = aten.convolution.default(x, detached, bias_cast, *options)
    saved, sizes = x.detach(), None if bias is None else list(bias.shape)
    trains_bias = _trained_shape(bias) is not None

    def compute(grad: torch.Tensor) -> list[torch.Tensor]:
        grads = aten.convolution_backward.default(grad, saved, detached, sizes, *options, [False, True, trains_bias])
        return list(grads[1 : 2 + trains_bias])

    return _defer(pending, output, (weight, bias), (x,), compute)


def _conv(  # noqa: PLR0913
    pending: list[PendingWgrad],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> torch.Tensor:
    """``aten.conv1d``, ``conv2d``, ``conv3d``."""
    nd = weight.ndim - 2
    shapes = _repeat(stride, nd), _repeat(padding, nd), _repeat(dilation, nd), False, [0] * nd
    return _convolution(pending, x, weight, bias, *shapes, groups)


def _conv_transpose(  # noqa: PLR0913
    pending: list[PendingWgrad],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> torch.Tensor:
    """``aten.conv_transpose1d``, ``conv_transpose2d``, ``conv_transpose3d``."""
    nd = weight.ndim - 2
    shapes = _repeat(stride, nd), _repeat(padding, nd), _repeat(dilation, nd), True, _repeat(output_padding, nd)
    return _convolution(pending, x, weight, bias, *shapes, groups)


def _repeat(value: Any, nd: int) -> list[int]:
    """Return one number for every dimension."""
    values = [value] if isinstance(value, int) else list(value)
    return values * nd if len(values) == 1 else values


@dataclass(frozen=True, slots=True)
class Formula:
    """How one operator is split.

    Args:
        run: a list of :class:`PendingWgrad` to append to, then the operator's arguments -> its output.
        read: index of the argument that is the input tensor.
        weight: index of the argument that is the weight.
        fits: (dimensions of the two, -1 where unknown; arguments) -> whether ``run`` supports them.
    """

    run: Callable[..., torch.Tensor]
    read: int
    weight: int
    fits: Callable[[int, int, Sequence[Any]], bool]


def _matrices(x: int, weight: int, args: Sequence[Any]) -> bool:
    return x >= 2 and weight == 2


def _filters(x: int, weight: int, args: Sequence[Any]) -> bool:
    return x == weight > 2


FORMULAS: dict[Any, Formula] = {
    aten.linear.default: Formula(_linear, 0, 1, _matrices),
    aten.matmul.default: Formula(_matmul, 0, 1, _matrices),
    aten.mm.default: Formula(_matmul, 0, 1, _matrices),
    aten.addmm.default: Formula(_addmm, 1, 2, _matrices),
    aten.embedding.default: Formula(_embedding, 1, 0, lambda x, weight, args: len(args) < 5 or args[4] is False),
    aten.convolution.default: Formula(_convolution, 0, 1, _filters),
    aten.conv1d.default: Formula(_conv, 0, 1, _filters),
    aten.conv2d.default: Formula(_conv, 0, 1, _filters),
    aten.conv3d.default: Formula(_conv, 0, 1, _filters),
    aten.conv_transpose1d.default: Formula(_conv_transpose, 0, 1, _filters),
    aten.conv_transpose2d.input: Formula(_conv_transpose, 0, 1, _filters),
    aten.conv_transpose3d.input: Formula(_conv_transpose, 0, 1, _filters),
}
"""The operators that can be split."""

ONLY_UNCAST = frozenset({aten.convolution.default})
"""Operators that are not split under autocast, which casts them on some devices and not on others."""
