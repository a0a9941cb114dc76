"""What the rules of every family make a node's form from: its arguments, their shapes, labels of dimensions.

What a label means is said in :mod:`roundelay.frontend.mesh.find_sharding_rule`. Most rules use the numbers of
dimensions as labels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from roundelay.ir.op_form import Dims
from roundelay.ir.sbp import Reduction


class NodeForm(NamedTuple):
    """The fields of an :class:`~roundelay.ir.op_form.OpForm`, with nodes as arguments."""

    args: Mapping[Node, Dims]
    results: tuple[Dims, ...]
    linear: tuple[frozenset[Node], ...] = ()
    sizes: tuple[int, ...] = ()
    reduction: Reduction = "sum"
    over: tuple[Node, int] | None = None


Rule = Callable[[Node], NodeForm | None]
"""Makes the form of a node whose operator has this rule; None if this use of the operator has no form."""


def shape_of(node: Node) -> tuple[Any, ...] | None:
    """The shape of a node's value, with symbolic sizes as expressions; None if it is no tensor."""
    value = node.meta.get("val")
    return _shape(value) if isinstance(value, torch.Tensor) else None


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple([_size(size) for size in tensor.shape])


def _size(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def arg_shape(arg: Node) -> tuple[Any, ...]:
    """The shape of an argument; that of a number if it is no tensor."""
    return shape_of(arg) or ()


def result_shape(node: Node) -> tuple[Any, ...]:
    """The shape of the only result."""
    shape = shape_of(node)
    assert shape is not None
    return shape


def result_shapes(node: Node) -> list[tuple[Any, ...]]:
    """The shapes of all results."""
    values = node.meta.get("val")
    parts = values if isinstance(values, (tuple, list)) else [values]
    return [_shape(part) for part in parts if isinstance(part, torch.Tensor)]


def tensors_of(node: Node) -> list[Node]:
    """The tensors that a node reads, each once."""
    return [arg for arg in node.all_input_nodes if shape_of(arg) is not None]


def first_tensor(node: Node) -> tuple[Node, tuple[Any, ...]]:
    """The first argument and its shape."""
    x = node.args[0]
    assert isinstance(x, Node)
    return x, arg_shape(x)


def rounds(node: Node, x: Node) -> bool:
    """Whether an operation makes integers of numbers, or reads or makes truth values: then nothing can be added up."""
    results = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else (node.meta["val"],)
    before = x.meta["val"].dtype
    kinds = {result.dtype for result in results if isinstance(result, torch.Tensor)}
    whole = before.is_floating_point and not all(kind.is_floating_point or kind.is_complex for kind in kinds)
    return whole or torch.bool in (before, *kinds)


def argument(node: Node, position: int, default: Any = None) -> Any:
    """An argument, or what it is by default."""
    return node.args[position] if len(node.args) > position else default


def dim_argument(node: Node, position: int, ndim: int) -> int:
    """An argument that is a dimension, by default the first, counted from the front."""
    return int(argument(node, position, 0)) % ndim


def others(ndim: int, *dims: int) -> list[int]:
    """The numbers of all dimensions but these."""
    without = {dim % ndim for dim in dims}
    return [d for d in range(ndim) if d not in without]


def varying(shape: Sequence[Any]) -> list[int]:
    """The numbers of the dimensions whose sizes vary with the batch."""
    return [d for d, size in enumerate(shape) if not isinstance(size, int)]


def labelled(shape: Sequence[Any], labels: Sequence[int | None]) -> Dims:
    """One label for each dimension."""
    return tuple(((label, size),) for label, size in zip(labels, shape, strict=True))


def numbered(shape: Sequence[Any], *whole: int) -> Dims:
    """Each dimension has its number as label, but for those that stay whole."""
    labels = others(len(shape), *whole)
    return tuple(((d if d in labels else None, size),) for d, size in enumerate(shape))


def unlabelled(shape: Sequence[Any]) -> Dims:
    """All dimensions stay whole."""
    return tuple(((None, size),) for size in shape)


class Undecided(int):
    """The label of a dimension of which it is not known whether it is repeated, as one size or both are symbolic.

    The rule's dimensions with this label stay whole in all tensors: :func:`decided`.
    """


def decided(form: NodeForm) -> NodeForm:
    """The form in which dimensions of which one is undecided stay whole."""
    every = [dims for of in ((*form.args.values(), *form.results)) for dims in of]
    open_labels = {int(label) for factors in every for label, _ in factors if isinstance(label, Undecided)}
    return whole_along(form, open_labels) if open_labels else form


def whole_along(form: NodeForm, labels: Collection[int]) -> NodeForm:
    """The form in which the dimensions with these labels stay whole."""

    def stripped(dims: Dims) -> Dims:
        return tuple([tuple([(None if label in labels else label, size) for label, size in own]) for own in dims])

    args = {arg: stripped(dims) for arg, dims in form.args.items()}
    return form._replace(args=args, results=tuple(map(stripped, form.results)))


def aligned(own: Sequence[Any], shape: Sequence[Any], labels: Sequence[int | None] = ()) -> Dims:
    """The labels of a shape, by default its dimensions' numbers, for one that is aligned with its end.

    A dimension of size 1 is repeated and has none.
    """
    first, names = len(shape) - len(own), labels or range(len(shape))

    def label(d: int, size: Any) -> int | None:
        name = names[first + d]
        if size == shape[first + d] or name is None:
            return name
        return None if size == 1 else Undecided(name)

    return tuple([((label(d, size), size),) for d, size in enumerate(own)])


def whole_args(node: Node) -> dict[Node, Dims]:
    """All tensors that a node reads, without labels."""
    return {arg: unlabelled(arg_shape(arg)) for arg in tensors_of(node)}


def along(node: Node, *dims: int, linear: bool = True) -> NodeForm:
    """An operation on its first argument along some dimensions that leaves the others alone; other tensors stay whole.

    Args:
        node: a node of such an operation.
        dims: the dimensions; with none it is elementwise.
        linear: whether it is linear in its first argument.
    """
    x, own = first_tensor(node)
    args = whole_args(node) | {x: numbered(own, *dims)}
    groups = (frozenset([x]),) if linear else ()
    return NodeForm(args, tuple(numbered(shape, *dims) for shape in result_shapes(node)), groups)
