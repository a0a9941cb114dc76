"""A piece whose backward can run in two halves: the inputs' gradients first, the weights' when there is time.

Backward has no arithmetic in common between the two halves of a product: ``dx = dy W`` is what the stage before waits
for, ``dW = dy^T x`` is what the update waits for (Qi et al., "Zero Bubble Pipeline Parallelism", Sect. 1). So every
operation that multiplies by a parameter is run on the parameter *detached*, and leaves a note, :class:`Owed`: what it
read, and the place in autograd's graph where its output's gradient will pass. The first half is one run of autograd
that computes no such weight's gradient and picks up the gradients at those places; the second half, :func:`settle`,
calls the kernels that autograd would have called, on the same operands, so that the bits are those of the whole
backward. Nothing is computed twice, and no graph is kept between the halves.

Split are matrix products, convolutions and embeddings (:data:`FORMULAS`). Every other operation's weight gradient (a
normalisation's, a recurrent layer's, whose kernel makes both at once) is computed in the first half, and so is that of
a parameter which such an operation reads too, or which more than two operations read: autograd adds three terms in an
order that is its own.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

aten = torch.ops.aten
Tensors = dict[str, torch.Tensor]

MOST_READERS = 2
"""A sum of two terms has the same bits in either order; of three it has not."""


@dataclass(slots=True)
class Owed:
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


@dataclass(frozen=True, slots=True)
class Split:
    """A piece that can owe weight gradients.

    Args:
        call: as the piece's own, with a list behind the draw key, to which every split operation adds what it owes.
        late: names of the parameters whose gradients come in the second half.
    """

    call: Callable[..., Sequence[Any]]
    late: frozenset[str]


def split(piece: torch.fx.GraphModule, parameters: Sequence[str], trainable: frozenset[str]) -> Split:
    """The piece with every operation split that can be.

    Args:
        piece: a graph of parameters, buffers, inputs and the draw key.
        parameters: names of its first placeholders.
        trainable: which of them want a gradient.
    """
    graph = copy.deepcopy(piece.graph)
    places = [node for node in graph.nodes if node.op == "placeholder"]
    alone = _made_alone(graph, dict(zip(places, parameters, strict=False)), trainable)
    late, chosen = _chosen(graph, alone)
    with graph.inserting_after(places[-1]):
        owed = graph.placeholder("owed")
    for node in chosen:
        node.args, node.target = (owed, *node.args), FORMULAS[node.target].run
    return Split(torch.fx.GraphModule(piece, graph).forward, late)


def settle(owed: Sequence[Owed], parameters: Mapping[str, torch.Tensor]) -> Tensors:
    """The second half: gradients of parameters by name; a name is missing where none has arrived.

    Args:
        owed: by one forward, with the gradients that its first half has left.
        parameters: leaves by name.
    """
    sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for one in reversed(owed):
        if one.gradient is None:
            continue
        for weight, grad in zip(one.weights, one.due(one.gradient), strict=True):
            before = sums.get(id(weight))
            sums[id(weight)] = weight, grad if before is None else before[1] + grad
    made = {name: sums.pop(id(leaf))[1] for name, leaf in parameters.items() if id(leaf) in sums}
    for name, grad in _through(list(sums.values()), parameters).items():
        made[name] = made[name] + grad if name in made else grad
    return {name: grad.contiguous() for name, grad in made.items()}


def _through(sums: Sequence[tuple[torch.Tensor, torch.Tensor]], parameters: Mapping[str, torch.Tensor]) -> Tensors:
    """Gradients of parameters from those of what has been made of them."""
    if not sums:
        return {}
    weights, grads = zip(*sums, strict=True)
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(
        weights, list(parameters.values()), grads, allow_unused=True
    )
    return {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}


_Readers = dict[torch.fx.Node, frozenset[str]]


def _made_alone(graph: torch.fx.Graph, names: Mapping[torch.fx.Node, str], trainable: frozenset[str]) -> _Readers:
    """Parameters and what is made of parameters alone (a transposed weight), with the trainable ones behind each."""
    alone: _Readers = {node: frozenset({name} & trainable) for node, name in names.items()}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and sources and all(source in alone for source in sources):
            alone[node] = _behind(node, alone)
    return alone


def _behind(node: torch.fx.Node, alone: _Readers) -> frozenset[str]:
    return frozenset[str]().union(*(alone.get(source, ()) for source in node.all_input_nodes))


def _chosen(graph: torch.fx.Graph, alone: _Readers) -> tuple[frozenset[str], list[torch.fx.Node]]:
    """The parameters all of whose readers can be split, and those readers; what holds for one may undo another."""
    readers = {node: read for node in graph.nodes if node not in alone and (read := _behind(node, alone))}
    count = Counter(name for read in readers.values() for name in read)
    early = {name for name, times in count.items() if times > MOST_READERS}
    chosen = [node for node in readers if _fits(node, alone)]
    while True:
        early |= {name for node, read in readers.items() if node not in chosen for name in read}
        kept = [node for node in chosen if not readers[node] & early]
        if len(kept) == len(chosen):
            return frozenset[str]().union(*(readers[node] for node in kept)), kept
        chosen = kept


def _fits(node: torch.fx.Node, alone: _Readers) -> bool:
    """Whether an operation is one of those that can be split, between a tensor and what is made of parameters."""
    formula = FORMULAS.get(node.target)
    if formula is None or node.kwargs or len(node.args) <= max(formula.weight, formula.read):
        return False
    x, weight = node.args[formula.read], node.args[formula.weight]
    if not isinstance(x, torch.fx.Node) or not isinstance(weight, torch.fx.Node) or not alone.get(weight):
        return False
    others = [source for source in node.all_input_nodes if source not in alone]
    return others == [x] and formula.fits(_ndim(x), _ndim(weight), node.args)


def _ndim(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.ndim if isinstance(value, torch.Tensor) else -1


def _wanting(x: torch.Tensor) -> torch.Tensor:
    """The input, wanting a gradient: kernels may choose their way by that, and the output must have its place."""
    return x if x.requires_grad else x.detach().requires_grad_()


def _plain(weight: torch.Tensor | None) -> torch.Tensor | None:
    return None if weight is None else weight.detach()


def _note(
    owed: list[Owed],
    made: torch.Tensor,
    weights: Sequence[torch.Tensor | None],
    read: Sequence[torch.Tensor],
    due: Callable[[torch.Tensor], Sequence[torch.Tensor]],
) -> torch.Tensor:
    """Write down what ``made`` owes."""
    wanted = tuple(weight for weight in weights if weight is not None and weight.requires_grad)
    owed.append(Owed(wanted, tuple(read), due, get_gradient_edge(made)))
    return made


def _linear(owed: list[Owed], x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``aten.linear``: (..., in), (out, in), (out) to (..., out), by the ways that it takes for a trained weight."""
    x, plain, shift = _wanting(x), weight.detach(), _plain(bias)
    if x.ndim == 2 or (shift is not None and x.is_contiguous()):
        made = aten.linear.default(x, plain, shift)
    else:
        made = _folded(x, plain.t())
        made = made if shift is None else made + shift
    flat = x.ndim == 2 or x.is_contiguous()  # then the bias is added to rows, else to the tensor as it is
    due = partial(_linear_due, x.detach(), weight.t().stride(), _shape(bias), flat)
    return _note(owed, made, (weight, bias), (x,), due)


def _linear_due(
    x: torch.Tensor, strides: tuple[int, ...], bias: torch.Size | None, flat: bool, grad: torch.Tensor
) -> list[torch.Tensor]:
    rows = grad.reshape(-1, grad.size(-1))
    made = [_second(rows, x.reshape(-1, x.size(-1)), strides).t()]
    return made if bias is None else [*made, (rows if flat else grad).sum_to_size(bias)]


def _matmul(owed: list[Owed], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``aten.matmul`` and ``aten.mm`` with a matrix: (..., n), (n, m) to (..., m)."""
    x = _wanting(x)
    due = partial(_matmul_due, x.detach(), weight.stride())
    return _note(owed, _folded(x, weight.detach()), (weight,), (x,), due)


def _matmul_due(x: torch.Tensor, strides: tuple[int, ...], grad: torch.Tensor) -> list[torch.Tensor]:
    return [_second(grad.reshape(-1, grad.size(-1)), x.reshape(-1, x.size(-1)), strides)]


def _addmm(owed: list[Owed], bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``aten.addmm``: (m), (k, n), (n, m) to (k, m)."""
    x = _wanting(x)
    made = aten.addmm.default(bias.detach(), x, weight.detach())
    due = partial(_addmm_due, x.detach(), weight.stride(), _shape(bias))
    return _note(owed, made, (bias, weight), (x,), due)


def _addmm_due(
    x: torch.Tensor, strides: tuple[int, ...], bias: torch.Size | None, grad: torch.Tensor
) -> list[torch.Tensor]:
    made = [_second(grad, x, strides)]
    return made if bias is None else [grad.sum_to_size(bias), *made]


def _folded(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(..., n) times (n, m) as one product of two matrices: what ``matmul`` does for a weight that is trained."""
    if x.ndim == 2:
        return x.mm(weight)
    return x.reshape(-1, x.size(-1)).mm(weight).view(*x.shape[:-1], weight.size(-1))


def _second(grad: torch.Tensor, first: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Gradient of a product's second matrix, laid out by columns if that is: as autograd has it."""
    if strides[0] == 1 and strides[1] == first.size(1):
        return grad.t().mm(first).t()
    return first.t().mm(grad)


def _shape(bias: torch.Tensor | None) -> torch.Size | None:
    return bias.shape if bias is not None and bias.requires_grad else None


def _embedding(
    owed: list[Owed], weight: torch.Tensor, rows: torch.Tensor, padding: int = -1, by_frequency: bool = False
) -> torch.Tensor:
    """``aten.embedding``: (n, d), whole numbers (...) to (..., d)."""
    made = aten.embedding.default(weight.detach(), rows, padding, by_frequency).requires_grad_()

    def due(grad: torch.Tensor) -> list[torch.Tensor]:
        return [aten.embedding_backward.default(grad, rows, weight.size(0), padding, by_frequency, False)]

    return _note(owed, made, (weight,), (rows,), due)


def _convolution(  # noqa: PLR0913  the operator's own arguments
    owed: list[Owed],
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
    x, plain = _wanting(x), weight.detach()
    how = (stride, padding, dilation, transposed, output_padding, groups)
    made = aten.convolution.default(x, plain, _plain(bias), *how)
    read, sizes = x.detach(), None if bias is None else list(bias.shape)
    wanted = _shape(bias) is not None

    def due(grad: torch.Tensor) -> list[torch.Tensor]:
        found = aten.convolution_backward.default(grad, read, plain, sizes, *how, [False, True, wanted])
        return list(found[1 : 2 + wanted])

    return _note(owed, made, (weight, bias), (x,), due)


def _ahead(nd: int) -> Callable[..., torch.Tensor]:
    """``aten.conv1d``, ``conv2d``, ``conv3d``."""

    def run(  # noqa: PLR0913
        owed: list[Owed],
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
        owed: list[Owed],
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
        run: a list of :class:`Owed`, then the operator's arguments, to what it makes.
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
