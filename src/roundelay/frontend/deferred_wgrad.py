"""Operators that can owe their weights' gradients: each runs without them, and writes down how to compute them later.

Forward and formula follow torch's own, way by way: which kernel is called, on what layout, in which order a bias is
summed. That is what makes the bits those of autograd, and what ``tests/frontend/test_split_backward.py`` holds. Under
autocast each first casts what it is given, as autocast would for the whole operator, so that the formula gets the
operands that autograd would; :func:`roundelay.frontend.split_backward.settle` casts what comes of it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

aten = torch.ops.aten


@dataclass(slots=True)
class PendingWgrad:
    """The weight gradients of one operation, until the second half computes them.

    Args:
        weights: of which gradients are owed: parameters, or what the piece has made of them alone.
        read: tensors that wait for the second half.
        due: gradient of the output -> those of ``weights``.
        place: where in autograd's graph that gradient passes; None once it has.
        gradient: it, between the halves; None if none has arrived.
    """

    weights: tuple[torch.Tensor, ...]
    read: tuple[torch.Tensor, ...]
    due: Callable[[torch.Tensor], Sequence[torch.Tensor]]
    place: GradientEdge | None
    gradient: torch.Tensor | None = None


def _wanting(x: torch.Tensor) -> torch.Tensor:
    """The input, wanting a gradient: kernels may choose their way by that, and the output must have its place."""
    return x if x.requires_grad else x.detach().requires_grad_()


def _plain(weight: torch.Tensor | None) -> torch.Tensor | None:
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


def _note(
    owed: list[PendingWgrad],
    made: torch.Tensor,
    weights: Sequence[torch.Tensor | None],
    read: Sequence[torch.Tensor],
    due: Callable[[torch.Tensor], Sequence[torch.Tensor]],
) -> torch.Tensor:
    """Write down what ``made`` owes."""
    wanted = tuple(weight for weight in weights if weight is not None and weight.requires_grad)
    owed.append(PendingWgrad(wanted, tuple(read), due, get_gradient_edge(made)))
    return made


def _linear(
    owed: list[PendingWgrad], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """``aten.linear``: (..., in), (out, in), (out) to (..., out), by the ways that it takes for a trained weight."""
    x, plain, shift = _cast(_wanting(x), weight.detach(), _plain(bias))
    if x.ndim == 2 or (shift is not None and x.is_contiguous()):
        made = aten.linear.default(x, plain, shift)
    else:
        made = _folded(x, plain.t())
        made = made if shift is None else made + shift
    flat = x.ndim == 2 or x.is_contiguous()  # then the bias is added to rows, else to the tensor as it is
    due = partial(_linear_due, x.detach(), _by_columns(plain.t()), _shape(bias), flat)
    return _note(owed, made, (weight, bias), (x,), due)


def _linear_due(
    x: torch.Tensor, columns: bool, bias: torch.Size | None, flat: bool, grad: torch.Tensor
) -> list[torch.Tensor]:
    rows, read = _rows(grad), _rows(x)
    made = [rows.t().mm(read) if columns else read.t().mm(rows).t()]
    return made if bias is None else [*made, (rows if flat else grad).sum_to_size(bias)]


def _matmul(owed: list[PendingWgrad], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``aten.matmul`` and ``aten.mm`` with a matrix: (..., n), (n, m) to (..., m)."""
    x, plain = _cast(_wanting(x), weight.detach())
    due = partial(_matmul_due, x.detach(), _by_columns(plain))
    return _note(owed, _folded(x, plain), (weight,), (x,), due)


def _matmul_due(x: torch.Tensor, columns: bool, grad: torch.Tensor) -> list[torch.Tensor]:
    return [_second(_rows(grad), _rows(x), columns)]


def _addmm(owed: list[PendingWgrad], bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``aten.addmm``: (m), (k, n), (n, m) to (k, m)."""
    x, plain, shift = _cast(_wanting(x), weight.detach(), bias.detach())
    made = aten.addmm.default(shift, x, plain)
    due = partial(_addmm_due, x.detach(), _by_columns(plain), _shape(bias))
    return _note(owed, made, (bias, weight), (x,), due)


def _addmm_due(x: torch.Tensor, columns: bool, bias: torch.Size | None, grad: torch.Tensor) -> list[torch.Tensor]:
    made = [_second(grad, x, columns)]
    return made if bias is None else [grad.sum_to_size(bias), *made]


def _folded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(..., n) times (n, m) as one product of two matrices: what ``matmul`` does for a weight that is trained."""
    if x.ndim == 2:
        return x.mm(weight)
    return _rows(x).mm(weight).view(*x.shape[:-1], weight.size(-1))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(..., n) as (k, n)."""
    return x if x.ndim == 2 else x.reshape(-1, x.size(-1))


def _by_columns(weight: torch.Tensor) -> bool:
    """Whether a product's second matrix lies in memory column by column; autograd has its gradient do the same."""
    return weight.stride() == (1, weight.size(0))


def _second(grad: torch.Tensor, first: torch.Tensor, columns: bool) -> torch.Tensor:
    """Gradient of a product's second matrix."""
    return grad.t().mm(first).t() if columns else first.t().mm(grad)


def _shape(bias: torch.Tensor | None) -> torch.Size | None:
    return bias.shape if bias is not None and bias.requires_grad else None


def _embedding(
    owed: list[PendingWgrad], weight: torch.Tensor, rows: torch.Tensor, padding: int = -1, by_frequency: bool = False
) -> torch.Tensor:
    """``aten.embedding``: (n, d), whole numbers (...) to (..., d)."""
    made = aten.embedding.default(weight.detach(), rows, padding, by_frequency).requires_grad_()

    def due(grad: torch.Tensor) -> list[torch.Tensor]:
        return [aten.embedding_backward.default(grad, rows, weight.size(0), padding, by_frequency, False)]

    return _note(owed, made, (weight,), (rows,), due)


def _convolution(  # noqa: PLR0913  the operator's own arguments
    owed: list[PendingWgrad],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    """``aten.convolution``: (rows, channels, ...) and its weight to (rows, channels, ...)."""
    x, plain, shift = _cast(_wanting(x), weight.detach(), _plain(bias))
    how = (stride, padding, dilation, transposed, output_padding, groups)
    made = aten.convolution.default(x, plain, shift, *how)
    read, sizes = x.detach(), None if bias is None else list(bias.shape)
    wanted = _shape(bias) is not None

    def due(grad: torch.Tensor) -> list[torch.Tensor]:
        found = aten.convolution_backward.default(grad, read, plain, sizes, *how, [False, True, wanted])
        return list(found[1 : 2 + wanted])

    return _note(owed, made, (weight, bias), (x,), due)


def _ahead(nd: int) -> Callable[..., torch.Tensor]:
    """``aten.conv1d``, ``conv2d``, ``conv3d``."""

    def run(  # noqa: PLR0913
        owed: list[PendingWgrad],
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        how = _each(stride, nd), _each(padding, nd), _each(dilation, nd), False, [0] * nd, groups
        return _convolution(owed, x, weight, bias, *how)

    return run


def _back(nd: int) -> Callable[..., torch.Tensor]:
    """``aten.conv_transpose1d``, ``conv_transpose2d``, ``conv_transpose3d``."""

    def run(  # noqa: PLR0913
        owed: list[PendingWgrad],
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> torch.Tensor:
        how = _each(stride, nd), _each(padding, nd), _each(dilation, nd), True, _each(output_padding, nd), groups
        return _convolution(owed, x, weight, bias, *how)

    return run


def _each(value: Any, nd: int) -> list[int]:
    """One number for every dimension."""
    values = [value] if isinstance(value, int) else list(value)
    return values * nd if len(values) == 1 else values


@dataclass(frozen=True, slots=True)
class Formula:
    """How one operator is split.

    Args:
        run: a list of :class:`PendingWgrad`, then the operator's arguments, to what it makes.
        read: which argument is the tensor that it reads.
        weight: which is the weight.
        fits: (dimensions of the two, -1 where unknown; arguments) -> whether ``run`` can do it.
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
    aten.conv1d.default: Formula(_ahead(1), 0, 1, _filters),
    aten.conv2d.default: Formula(_ahead(2), 0, 1, _filters),
    aten.conv3d.default: Formula(_ahead(3), 0, 1, _filters),
    aten.conv_transpose1d.default: Formula(_back(1), 0, 1, _filters),
    aten.conv_transpose2d.input: Formula(_back(2), 0, 1, _filters),
    aten.conv_transpose3d.input: Formula(_back(3), 0, 1, _filters),
}
"""The operators that are split."""

ONLY_UNCAST = frozenset({aten.convolution.default})
"""Those that are not split under autocast, which casts them on some devices and not on others."""
