"""Operators on tensors that lie on several processes: the compiler's rules, one operator at a time."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from roundelay.errors import PlanError
from roundelay.frontend.export.export import Exported
from roundelay.frontend.mesh.find_sharding_rule import op_form
from roundelay.frontend.mesh.local_graph import MeshRank, local_graph
from roundelay.global_tensor.placement import Placement
from roundelay.global_tensor.transfer import boxed
from roundelay.ir.deduction import Deduction, Row, ShardedOp, Use
from roundelay.ir.op_form import OpForm
from roundelay.ir.sbp import B, Signature
from roundelay.lower.boxing import is_local
from roundelay.lower.signatures import cheapest_row


@dataclass(frozen=True, eq=False)
class LocalTensor:
    """What this process has of a tensor that lies on several.

    Args:
        local: its part, all of it, or its addend; empty outside of the placement.
        shape: of the whole.
        placement: where it lies.
        signature: how.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    placement: Placement
    signature: Signature


@dataclass(frozen=True)
class Compiled:
    """An operator on tensors of some shapes and signatures.

    Args:
        exported: a graph of it alone.
        name: of its node.
        form: its form.
        row: how it is computed.
        results: shape and dtype of each result, on no device.
    """

    exported: Exported
    name: str
    form: OpForm
    row: Row
    results: Any

    def local(self, has: Mapping[str, Signature], part: MeshRank) -> torch.fx.GraphModule:
        """What one process runs, of tensors with these signatures."""
        uses = {(self.name, arg): Use(arg, has[arg], self.row.args[arg], False) for arg in self.row.args}
        results = {self.name: Use(self.name, B, B, False)}
        deduction = Deduction({self.name: self.row}, {}, {}, (), uses, results)
        return local_graph(self.exported, {self.name: self.form}, deduction, part).module


_MOST = 4096
"""How many operators are kept."""

Made = TypeVar("Made")

_COMPILED: dict[Any, Compiled] = {}
_LOCAL: dict[Any, torch.fx.GraphModule] = {}


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of an operator, of which arguments are :class:`LocalTensor`.

    Raises:
        PlanError: it is not to be had, naming the operator and the signatures.
    """
    leaves, spec = tree_flatten((args, kwargs))
    on = _check(func, args, kwargs, leaves)
    leaves = [
        LocalTensor(leaf, tuple(leaf.shape), on, B) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
    ]
    tensors = {f"x{i}": leaf for i, leaf in enumerate(_distinct(leaves))}
    key = (func, on.size, str(spec), *[_key(leaf, tensors) for leaf in leaves])
    made = _kept(_COMPILED, key, lambda: _compiled(func, leaves, spec, tensors, on.size))
    position = on.position
    if position is None:
        nothing = next(iter(tensors.values())).local
        return _wrapped(made, [_empty(one, nothing) for one in tree_flatten(made.results)[0]], on)
    has = {name: _nearest(laid.signature, made.row.args.get(name, laid.signature)) for name, laid in tensors.items()}
    own = [boxed(laid.local, laid.shape, laid.signature, has[name], on) for name, laid in tensors.items()]
    program = _kept(_LOCAL, (key, position), lambda: made.local(has, MeshRank(on.size, position)))
    return _wrapped(made, tree_flatten(program(*own))[0], on)


def _kept(cache: dict[Any, Made], key: Any, make: Callable[[], Made]) -> Made:
    """What was made for a key before, or now. Numbers among the arguments are part of the key: there may be many."""
    if key not in cache:
        if len(cache) >= _MOST:
            cache.clear()
        cache[key] = make()
    return cache[key]


def _empty(result: Any, like: torch.Tensor) -> Any:
    """What a process outside of the placement has of a result."""
    return like.new_empty(0, dtype=result.dtype) if isinstance(result, torch.Tensor) else result


def _nearest(own: Signature, wanted: Signature) -> Signature:
    """What a tensor is boxed to: itself, if the process makes the wanted from it alone."""
    return own if is_local(own, wanted) else wanted


def _wrapped(made: Compiled, results: Sequence[Any], on: Placement) -> Any:
    """Results, contiguous as global tensors say that they are; None where an operator gives none, and numbers, stay."""
    shapes, spec = tree_flatten(made.results)
    signatures = iter(made.row.results)
    laid = [
        LocalTensor(_plain(local), tuple(shape.shape), on, next(signatures))
        if isinstance(local, torch.Tensor)
        else local
        for local, shape in zip(results, shapes, strict=True)
    ]
    return tree_unflatten(laid, spec)


def _plain(local: torch.Tensor) -> torch.Tensor:
    """As a global tensor and its messages take it: contiguous, conjugated and negated in its memory."""
    return local.resolve_conj().resolve_neg().contiguous()


def _distinct(leaves: Sequence[Any]) -> list[LocalTensor]:
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, LocalTensor)}.values())


def _key(leaf: Any, tensors: Mapping[str, LocalTensor]) -> Any:
    if isinstance(leaf, LocalTensor):
        (name,) = [name for name, one in tensors.items() if one is leaf]
        return name, leaf.shape, leaf.local.dtype, leaf.signature
    return type(leaf), repr(leaf) if isinstance(leaf, (float, complex)) else leaf  # -0.0 is no 0.0


def _compiled(
    func: Any, leaves: Sequence[Any], spec: Any, tensors: Mapping[str, LocalTensor], workers: int
) -> Compiled:
    graph, fake = torch.fx.Graph(), FakeTensorMode()
    nodes = {name: graph.placeholder(name) for name in tensors}
    with fake:
        for name, laid in tensors.items():
            nodes[name].meta["val"] = torch.empty(laid.shape, dtype=laid.local.dtype, device=laid.local.device)
    named = {id(laid): nodes[name] for name, laid in tensors.items()}
    args, kwargs = tree_unflatten([named.get(id(leaf), leaf) for leaf in leaves], spec)
    node = graph.call_function(func, args, kwargs)
    metas = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    try:
        with fake:
            node.meta["val"] = func(*metas[0], **metas[1])
    except Exception as error:  # also of shapes that do not fit, in torch's words
        raise _refused(
            func, tensors, str(error).splitlines()[0], "shapes that fit, and results whose shapes follow"
        ) from error
    graph.output((node,))
    exported = Exported(torch.fx.GraphModule(torch.nn.Module(), graph), {}, None, (), lambda tensors: None)  # type: ignore[arg-type]
    form = op_form(node)
    price = {name: float(_numbers(laid.shape) * laid.local.element_size()) for name, laid in tensors.items()}
    op = ShardedOp(node.name, form, 0.0)
    row = cheapest_row(op, {name: [tensors[name].signature] for name in form.args}, price, workers)
    return Compiled(exported, node.name, form, row, node.meta["val"])


def _numbers(shape: Sequence[int]) -> int:
    return reduce(operator.mul, shape, 1)


def _check(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Sequence[Any]) -> Placement:
    """The placement of an operator's tensors."""
    tensors = dict(enumerate(_distinct(leaves)))
    names = [argument.name for argument in func._schema.arguments]
    named: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    placements = list(dict.fromkeys(laid.placement for laid in tensors.values()))
    if len(placements) > 1:
        both = " and ".join(map(str, placements))
        raise _refused(
            func, tensors, f"tensors on {both}", "tensors on one placement", "Call to_global on one of them."
        )
    if any(isinstance(leaf, torch.Tensor) and not _is_alike(leaf) for leaf in leaves):
        raise _refused(func, tensors, "a tensor that is not global", "global tensors", "Make it by roundelay.tensor.")
    draws = named.get("dropout_p", 0.0) != 0.0 or "dropout_p" not in names  # attention draws only for its dropout
    if torch.Tag.nondeterministic_seeded in func.tags and draws:
        raise _refused(func, tensors, "an operator that draws random numbers", "numbers drawn by roundelay.rand")
    writes_statistics = isinstance(named.get("running_mean"), LocalTensor) and named.get("training") is True
    if func._schema.is_mutable or writes_statistics:  # of which the schema of a batch norm says nothing
        raise _refused(func, tensors, "an operator that writes into a tensor", "one that makes a new tensor")
    return placements[0]


def _is_alike(leaf: torch.Tensor) -> bool:
    """Whether every process has a plain tensor alike: a number, or zeros of a formula of autograd's."""
    return not leaf.ndim or (in_backward() and not leaf.any())


def in_backward() -> bool:
    """Whether autograd computes gradients."""
    return int(torch._C._current_graph_task_id()) != -1


def _refused(
    func: Any,
    tensors: Mapping[Any, LocalTensor],
    got: str,
    expected: str,
    remedy: str = "Use another operator, or to_local.",
) -> PlanError:
    lies = ", ".join(f"{tuple(laid.shape)} {laid.signature}" for laid in tensors.values())
    return PlanError(f"{func} on global tensors {lies}", got=got, expected=expected, remedy=remedy)
