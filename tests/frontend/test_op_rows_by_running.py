"""Every row that follows from an operator's form is run: what all workers compute makes up the whole operation.

Forward and backward, over two and three workers, for each way to split an argument or a result and each group of
partial arguments; once with the parts of each tensor, and once with what a worker takes of the whole by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
import torch.fx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional as F

from roundelay.errors import PlanError
from roundelay.frontend.export.export import Exported, Role
from roundelay.frontend.graph_passes import key_draws
from roundelay.frontend.graph_run import run_nodes
from roundelay.frontend.mesh.find_sharding_rule import op_form
from roundelay.frontend.mesh.local_graph import MeshRank, local_graph
from roundelay.ir.deduction import Deduction, Row, Use
from roundelay.ir.op_form import OpForm
from roundelay.ir.sbp import P_MAX, B, P, Signature, Split
from roundelay.lower.op_rows import partial_rows, split_row
from roundelay.reference.mesh import joined, part_of, summed

aten = torch.ops.aten
sdpa = F.scaled_dot_product_attention
Function = Callable[..., Any]
Instance = tuple[Any, ...]
"""A function and its tensors."""

# --- operations that are run -----------------------------------------------------------------------------------------


class _Model(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: Tensor) -> Any:
        return self.function(*tensors)


@dataclass(frozen=True)
class Operation:
    """An operation of an exported graph in a graph of its own, its form, and what it has read and computed."""

    alone: Exported
    node: Node
    form: OpForm
    values: Mapping[str, Any]
    results: Sequence[Any]

    @property
    def name(self) -> str:
        return str(getattr(self.node.target, "__name__", ""))

    def rows(self, parts: int) -> list[Row]:
        """Each row once, but that in which all is broadcast."""
        found = [split_row(self.form, place, split) for place, split in self._splits(parts)]
        rows = [*(row for row in found if isinstance(row, Row)), *partial_rows(self.form)]
        return list({(*row.args.items(), row.results): row for row in rows}.values())

    def _splits(self, parts: int) -> Iterator[tuple[str | int, Split]]:
        places: list[tuple[str | int, Any]] = [(name, self.values[name]) for name in self.form.args]
        for place, tensor in [*places, *enumerate(self.results)]:
            for dim, size in enumerate(tensor.shape):
                for outer in _divisors(size):
                    for unit in _divisors(size // outer):
                        if size // (outer * unit) >= parts:
                            yield place, Split(dim, outer, unit)

    def run(self, args: Mapping[str, Any], exported: Exported) -> list[Tensor]:
        """The results for these tensors in place of those that it has read."""
        module = exported.module
        places = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        (result,) = torch.fx.Interpreter(module).run(*[args.get(name, self.values[name]) for name in places])
        return list(result) if isinstance(result, (tuple, list)) else [result]

    def on_worker(self, row: Row, has: Mapping[str, Signature], at: MeshRank) -> Exported:
        """What a worker runs if the tensors have these signatures."""
        uses = {(self.node.name, name): Use(name, has[name], row.args[name], False) for name in row.args}
        results = {self.node.name: Use(self.node.name, B, B, False)}
        deduction = Deduction({self.node.name: row}, {}, {}, (), uses, results)
        return local_graph(self.alone, {self.node.name: self.form}, deduction, at)


def _divisors(size: int) -> list[int]:
    return [d for d in range(1, size + 1) if size % d == 0]


def operations(function: Function, *tensors: Tensor, dynamic: bool = False) -> list[Operation]:
    """The operations of a function, exported in training mode; ``dynamic``: the sizes of the first tensor may vary."""
    vary = dict.fromkeys(range(tensors[0].ndim), torch.export.Dim.AUTO)
    dims = {"tensors": (vary, *[None] * (len(tensors) - 1))} if dynamic else None
    program = torch.export.export(_Model(function).train(), tensors, strict=False, dynamic_shapes=dims)
    places = [node.name for node in program.graph.nodes if node.op == "placeholder"]
    roles = {name: Role("input", str(i), None) for i, name in enumerate(places)}
    exported = Exported(program.graph_module, roles, None, (), lambda tensors: None)  # type: ignore[arg-type]
    key_draws(exported)
    with torch.no_grad():
        values, _ = run_nodes(exported, tensors)
    nodes = [node for node in exported.module.graph.nodes if node.op == "call_function"]
    return [_operation(exported, node, values) for node in nodes if "_assert" not in str(node.target)]


def _operation(exported: Exported, node: Node, values: Mapping[str, Any]) -> Operation:
    graph = torch.fx.Graph()
    read = {arg: graph.placeholder(arg.name) for arg in node.all_input_nodes}
    for arg, own in read.items():
        own.meta = dict(arg.meta)
    copy = graph.node_copy(node, lambda arg: read[arg])
    graph.output((copy,))
    alone = Exported(torch.fx.GraphModule(exported.module, graph), {}, exported.seen, (), exported.guard)
    results = values[node.name] if isinstance(values[node.name], (tuple, list)) else [values[node.name]]
    tensors = [result for result in results if isinstance(result, Tensor)]
    return Operation(alone, copy, op_form(node), {arg.name: values[arg.name] for arg in read}, tensors)


# --- one row ---------------------------------------------------------------------------------------------------------


def check(op: Operation, row: Row, parts: int, *, own: bool) -> None:
    """Compare what all workers compute with the whole; ``own``: each makes what it reads from the whole by itself."""
    has: dict[str, Signature] = dict.fromkeys(row.args, B) if own else dict(row.args)
    whole = {name: _leaf(op, name, op.values[name]) for name in row.args}
    lie = {name: _distributed(value.detach(), has[name], parts) for name, value in whole.items()}
    local = [{name: _leaf(op, name, each[w]) for name, each in lie.items()} for w in range(parts)]
    results = op.run(whole, op.alone)
    found = [op.run(local[w], op.on_worker(row, has, MeshRank(parts, w))) for w in range(parts)]
    for i, signature in enumerate(row.results):
        _same([each[i] for each in found], signature, results[i], f"result {i}")
    if P_MAX in row.results:  # nothing flows back
        return
    upon = [torch.randn_like(result) if result.requires_grad else result for result in results]
    of_results = [own if isinstance(own, Split) else B for own in row.results]
    parts_upon = [_distributed(whole, own, parts) for whole, own in zip(upon, of_results, strict=True)]
    local_grads = [_gradients(local[w], found[w], [each[w] for each in parts_upon]) for w in range(parts)]
    for name, gradient in _gradients(whole, results, upon).items():
        signature = row.gradient_of(name, B)
        if own and isinstance(signature, Split):  # each worker has that of its part, and zeros
            signature = P
        _same([each[name] for each in local_grads], signature, gradient, f"gradient of {name}")


_NO_GRADIENT = {
    aten.batch_norm.default: (3, 4),
    aten.cross_entropy_loss.default: (2,),
    aten.binary_cross_entropy_with_logits.default: (2,),
}
"""Arguments that an operator has no gradient for."""


def _leaf(op: Operation, name: str, value: Tensor) -> Tensor:
    without = [op.node.args[i] for i in _NO_GRADIENT.get(op.node.target, ())]  # type: ignore[arg-type]
    trained = value.is_floating_point() and name not in [str(arg) for arg in without]
    return value.detach().requires_grad_(trained)


def _gradients(args: Mapping[str, Tensor], results: Sequence[Tensor], upon: Sequence[Tensor]) -> dict[str, Tensor]:
    leaves = {name: value for name, value in args.items() if value.requires_grad}
    pairs = [(result, grad) for result, grad in zip(results, upon, strict=True) if result.requires_grad]
    if not leaves or not pairs:
        return {}
    outputs, grads = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, list(leaves.values()), grads, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def _distributed(whole: Tensor, signature: Signature, parts: int) -> list[Tensor]:
    """What each worker has of a tensor."""
    if isinstance(signature, Split):
        return [part_of(whole, signature, parts, w) for w in range(parts)]
    if signature == B:
        return [whole] * parts
    random = torch.randn_like if whole.is_floating_point() else lambda x: torch.randint_like(x, -9, 9)
    addends = [random(whole) for _ in range(parts - 1)]
    return [*addends, whole - summed(addends)]


def _same(parts: Sequence[Tensor], signature: Signature, whole: Tensor, what: str) -> None:
    """Whether the whole tensor is what the workers have; truth values are no sums."""
    assert signature != P or whole.dtype is not torch.bool, what
    if isinstance(signature, Split):
        found = [joined(parts, signature)]
    elif signature == P_MAX:
        found = [torch.stack(list(parts)).amax(0)]
    else:
        found = [summed(parts)] if signature == P else list(parts)
    close = 1e-5 if whole.dtype is torch.float32 else 1e-10
    for each in found:
        torch.testing.assert_close(
            each, whole, rtol=close, atol=close, msg=lambda text: f"{what}, which is {signature}: {text}"
        )


WAYS = ((2, False), (2, True), (3, False))


def check_all(op: Operation, ways: Sequence[tuple[int, bool]] = WAYS) -> int:
    """Check all rows of an operation; returns how many."""
    count = 0
    for parts, own in ways:
        for row in op.rows(parts):
            try:
                check(op, row, parts, own=own)
            except PlanError as error:
                if "depends on the batch" not in str(error):
                    raise
                continue  # what varies from batch to batch is not split
            except Exception as error:
                signatures = ", ".join(f"{name} {of}" for name, of in row.args.items())
                to = ", ".join(map(str, row.results))
                raise AssertionError(f"{op.node.format_node()} over {parts}: {signatures} -> {to}: {error}") from error
            count += not own
    return count


# --- the table -------------------------------------------------------------------------------------------------------

_NUMBERS = torch.Generator().manual_seed(0)


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_NUMBERS)


def ints(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, generator=_NUMBERS)


UNARY = [
    "abs", "ceil", "cos", "elu", "erf", "exp", "floor", "gelu", "isnan", "leaky_relu", "log", "logical_not",
    "nan_to_num", "neg", "reciprocal", "relu", "round", "rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt",
    "square", "tan", "tanh", "alias", "clone", "contiguous", "detach", "zeros_like", "ones_like", "hardswish",
    "log_sigmoid",
]  # fmt: skip
BINARY = [
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "pow.Tensor_Tensor", "maximum.default",
    "minimum.default", "atan2.default", "eq.Tensor", "ne.Tensor", "lt.Tensor", "le.Tensor", "gt.Tensor",
    "ge.Tensor", "logaddexp.default", "fmod.Tensor", "remainder.Tensor", "xlogy.Tensor", "logical_and.default",
    "logical_or.default", "clamp_min.Tensor", "rsub.Tensor", "broadcast_tensors",
]  # fmt: skip
MASK = torch.tensor([[True, False, True, True, False]])
HEADS = (2, 6, 4, 5)


def distinct(*shape: int) -> Tensor:
    """Places of 7 along dimension 1, none of them twice."""
    return torch.argsort(torch.rand(shape[0], 7, shape[2], generator=_NUMBERS), 1)[:, : shape[1]]


def _overload(name: str) -> Function:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")  # type: ignore[no-any-return]


def _on_both(function: Function) -> Function:
    return (lambda x, y: function([x, y])) if function is aten.broadcast_tensors.default else function


TABLE: dict[str, list[Instance]] = {
    **{f"{name}.default": [(_overload(name), r(5, 7).sigmoid())] for name in UNARY},
    **{
        name if "." in name else f"{name}.default": [
            (_on_both(_overload(name)), r(5, 1, 7).exp(), r(3, 7).exp())
        ]
        for name in BINARY
    },
    "pow.Tensor_Scalar": [(lambda x: x**3, r(5, 3))],
    "floor_divide.default": [(lambda x: x // 2, ints(9, 5, 3))],
    "prelu.default": [(F.prelu, r(5, 4, 2), r(4)), (F.prelu, r(5, 4), r(1))],
    "rsub.Scalar": [(lambda x: 1 - x, r(5, 3))],
    "clamp.default": [(lambda x: x.clamp(-1, 1), r(5, 3))],
    "addcmul.default": [(torch.addcmul, r(5, 3), r(5, 3), r(3))],
    "lerp.Tensor": [(torch.lerp, r(5, 3), r(5, 3), r(5, 1))],
    "where.self": [(torch.where, MASK, r(3, 5), r(5)), (torch.where, MASK, r(4, 1), r(4, 5))],
    "where.ScalarOther": [(lambda c, x: torch.where(c, x, 0.0), MASK, r(3, 5))],
    "where.ScalarSelf": [(lambda c, x: torch.where(c, 0.0, x), MASK, r(3, 5))],
    "__and__.Tensor": [(lambda x, y: (x > 0) & y, r(3, 5), MASK)],
    "__or__.Tensor": [(lambda x, y: (x > 0) | y, r(3, 5), MASK)],
    "masked_fill.Scalar": [
        (lambda x, m: x.masked_fill(m, -9.0), r(3, 5), MASK),
        (lambda x, m: x.masked_fill(m, 0), r(3, 5), MASK),
    ],
    "to.dtype": [
        (lambda x: x.to(torch.float32), r(5, 3)),
        (lambda x: x.to(torch.int64), 9 * r(5, 3)),
        (lambda x: x.to(torch.float64), ints(9, 5, 3)),
        (lambda x: x.to(torch.bool), ints(2, 5, 3)),
    ],
    "type_as.default": [(lambda x, y: x.type_as(y), r(5, 3), ints(9, 2))],
    "full_like.default": [(lambda x: torch.full_like(x, 2.5), r(5, 3))],
    "outer.default": [(torch.outer, r(5), r(4))],
    "tensordot.default": [
        (lambda x, y: torch.tensordot(x, y, ([1, -1], [2, 0])), r(5, 4, 6), r(6, 3, 4)),
        (lambda x, y: torch.tensordot(x, y, 0), r(3), r(4)),
    ],
    "addmv.default": [(torch.addmv, r(5), r(5, 4), r(4))],
    "conv_transpose3d.input": [(F.conv_transpose3d, r(3, 2, 3, 3, 2), r(2, 4, 2, 2, 1), r(4))],
    "linear.default": [
        (F.linear, r(2, 5, 6), r(7, 6), r(7)),
        (F.linear, r(5, 6), r(4, 6)),
        (F.linear, r(5), r(6, 5), r(6)),
    ],
    "addmm.default": [
        (torch.addmm, r(5), r(3, 6), r(6, 5)),
        (lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2), r(3, 5), r(3, 6), r(6, 5)),
    ],
    "baddbmm.default": [
        (torch.baddbmm, r(5, 4, 3), r(5, 4, 2), r(5, 2, 3)),
        (torch.baddbmm, r(3), r(3, 2, 5), r(3, 5, 3)),
    ],
    "mm.default": [(torch.mm, r(5, 4), r(4, 3))],
    "bmm.default": [(torch.bmm, r(5, 4, 2), r(5, 2, 3))],
    "mv.default": [(torch.mv, r(5, 4), r(4))],
    "dot.default": [(torch.dot, r(5), r(5))],
    "matmul.default": [
        (torch.matmul, r(2, 5, 4, 3), r(5, 3, 2)),
        (torch.matmul, r(3, 1, 4, 3), r(1, 5, 3, 4)),
        (torch.matmul, r(5), r(3, 5, 4)),
        (torch.matmul, r(3, 4, 5), r(5)),
        (torch.matmul, r(4, 3), r(5, 3, 4)),
    ],
    "einsum.default": [
        (lambda q, k: torch.einsum("bihd, bjhd -> bhij", q, k), r(2, 3, 5, 4), r(2, 4, 5, 4)),
        (lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), r(3, 4), r(4, 5), r(5, 2)),
        (lambda x: torch.einsum("ijk->ki", x), r(3, 4, 5)),
    ],
    "conv1d.default": [(F.conv1d, r(3, 4, 7), r(5, 4, 3), r(5))],
    "conv2d.default": [
        (lambda x, w, b: F.conv2d(x, w, b, 2, 1), r(3, 4, 5, 5), r(5, 4, 3, 3), r(5)),
        (lambda x, w: F.conv2d(x, w, groups=2), r(3, 4, 5, 5), r(6, 2, 3, 3)),
        (F.conv2d, r(4, 5, 5), r(5, 4, 3, 3), r(5)),
    ],
    "conv2d.padding": [(lambda x, w: F.conv2d(x, w, padding="same"), r(3, 4, 5, 5), r(5, 4, 3, 3))],
    "conv_transpose2d.input": [(F.conv_transpose2d, r(3, 4, 4, 4), r(4, 5, 3, 3), r(5))],
    "embedding.default": [(lambda w, i: F.embedding(i, w, padding_idx=1), r(7, 5), ints(7, 3, 4))],
    "layer_norm.default": [
        (lambda x, w, b: F.layer_norm(x, (6,), w, b), r(5, 3, 6), r(6), r(6)),
        (lambda x: F.layer_norm(x, (3, 6)), r(5, 3, 6)),
    ],
    "rms_norm.default": [(lambda x, w: F.rms_norm(x, (6,), w), r(5, 3, 6), r(6))],
    "group_norm.default": [(lambda x, w, b: F.group_norm(x, 3, w, b), r(5, 6, 3, 2), r(6), r(6))],
    "batch_norm.default": [
        (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), r(4, 5, 3), r(5), r(5)),
        (lambda x, w, b, m, v: F.batch_norm(x, m, v, w, b), r(4, 5, 3), r(5), r(5), r(5), r(5).exp()),
    ],
    "softmax.int": [(lambda x: x.softmax(-1), r(5, 3, 4)), (lambda x: x.softmax(0), r(5, 3))],
    "log_softmax.int": [(lambda x: x.log_softmax(1), r(5, 3, 4))],
    "cross_entropy_loss.default": [
        (lambda x, y: F.cross_entropy(x, y, reduction="sum"), r(5, 7), ints(7, 5)),
        (lambda x, y, w: F.cross_entropy(x, y, w, reduction="sum", label_smoothing=0.1), r(5, 7), ints(7, 5), r(7)),
        (lambda x, y: F.cross_entropy(x, y, reduction="none"), r(5, 7, 3), ints(7, 5, 3)),
        (lambda x, y: F.cross_entropy(x, y.softmax(1), reduction="sum"), r(5, 7, 3), r(5, 7, 3)),
    ],
    "nll_loss_nd.default": [(lambda x, y: F.nll_loss(x, y, reduction="sum"), r(5, 7), ints(7, 5))],
    "mse_loss.default": [
        (lambda x, y: F.mse_loss(x, y, reduction="sum"), r(5, 3), r(5, 3)),
        (lambda x, y: F.mse_loss(x, y, reduction="none"), r(5, 3), r(5, 3)),
    ],
    "l1_loss.default": [(lambda x, y: F.l1_loss(x, y, reduction="sum"), r(5, 3), r(5, 3))],
    "smooth_l1_loss.default": [(lambda x, y: F.smooth_l1_loss(x, y, reduction="sum"), r(5, 3), r(5, 3))],
    "binary_cross_entropy_with_logits.default": [
        (lambda x, y, w: F.binary_cross_entropy_with_logits(x, y, w, reduction="sum"), r(5, 3), r(5, 3), r(3)),
    ],
    "scaled_dot_product_attention.default": [
        (sdpa, r(*HEADS), r(*HEADS), r(*HEADS)),
        (lambda q, k, v: sdpa(q, k, v, is_causal=True), r(5, 4, 3), r(5, 4, 3), r(5, 4, 3)),
        (sdpa, r(*HEADS), r(*HEADS), r(*HEADS), r(6, 4, 4)),
        (sdpa, r(*HEADS), r(*HEADS), r(*HEADS), r(2, 1, 1, 4) > -1),
        (sdpa, r(*HEADS), r(2, 1, 3, 5), r(2, 1, 3, 5)),
        (lambda q, k, v: sdpa(q, k, v, enable_gqa=True), r(*HEADS), r(2, 3, 4, 5), r(2, 3, 4, 5)),
    ],
    "keyed_attention": [
        (lambda q, k, v: sdpa(q, k, v, dropout_p=0.5), r(*HEADS), r(*HEADS), r(*HEADS)),
        (lambda q, k, v: sdpa(q, k, v, None, 0.5, True, enable_gqa=True), r(*HEADS), r(2, 3, 4, 5), r(2, 3, 4, 5)),
    ],
    "keyed_dropout": [(lambda x: F.dropout(x, 0.5), r(5, 7)), (lambda x: F.dropout(x, 1.0), r(5, 3))],
    "dropout.default": [(lambda x: F.dropout(x, 0.0), r(5, 7)), (lambda x: F.dropout(x, 0.5, False), r(5, 7))],
    "view.default": [(lambda x: x.view(3, 2, 20), r(6, 4, 5)), (lambda x: x.view(2, -1), r(2, 5, 3))],
    "reshape.default": [(lambda x: x.transpose(1, 2).reshape(2, 4, 15), r(2, 5, 4, 3))],
    "view_as.default": [(lambda x, y: x.view_as(y), r(3, 4, 5), r(3, 20))],
    "reshape_as.default": [(lambda x, y: x.reshape_as(y), r(12, 5), r(3, 4, 5))],
    "flatten.using_ints": [(lambda x: x.flatten(1), r(5, 3, 4)), (lambda x: x.flatten(), r(5, 3))],
    "unflatten.int": [(lambda x: x.unflatten(-1, (5, 3)), r(2, 15)), (lambda x: x.unflatten(0, (-1, 2)), r(10, 3))],
    "squeeze.default": [(lambda x: x.squeeze(), r(3, 1, 2))],
    "squeeze.dim": [(lambda x: x.squeeze(0), r(3, 1, 2)), (lambda x: x.squeeze(-2), r(3, 1, 2))],
    "squeeze.dims": [(lambda x: x.squeeze((0, 1)), r(3, 1, 2))],
    "unsqueeze.default": [(lambda x: x.unsqueeze(1), r(5, 3))],
    "transpose.int": [(lambda x: x.transpose(-1, 1), r(2, 5, 3, 4))],
    "swapaxes.default": [(lambda x: x.swapaxes(0, 1), r(5, 3))],
    "t.default": [(lambda x: x.t(), r(5, 3)), (lambda x: x.t(), r(5))],
    "numpy_T.default": [(lambda x: x.T, r(5, 3))],
    "mT.default": [(lambda x: x.mT, r(2, 5, 3))],
    "permute.default": [(lambda x: x.permute(2, 0, -2), r(5, 3, 4))],
    "movedim.int": [(lambda x: x.movedim(0, -1), r(5, 3, 4))],
    "movedim.intlist": [(lambda x: x.movedim((0, -1), (1, 0)), r(5, 3, 4))],
    "pixel_shuffle.default": [(lambda x: F.pixel_shuffle(x, 2), r(3, 8, 2, 3))],
    "pixel_unshuffle.default": [(lambda x: F.pixel_unshuffle(x, 2), r(3, 2, 4, 6))],
    "broadcast_to.default": [(lambda x: x.broadcast_to(3, 2, 5, 4), r(2, 1, 4))],
    "tile.default": [(lambda x: x.tile(3, 2, 1), r(5, 4)), (lambda x: x.tile(2), r(5, 4))],
    "expand.default": [(lambda x: x.expand(3, -1, 5, 4), r(2, 1, 4))],
    "expand_as.default": [(lambda x, y: x.expand_as(y), r(1, 3), r(2, 5, 3))],
    "repeat.default": [(lambda x: x.repeat(3, 2, 1), r(5, 4))],
    "repeat_interleave.self_int": [(lambda x: x.repeat_interleave(3, 1), r(2, 5, 3))],
    "cat.default": [(lambda x, y: torch.cat((x, y, x), -1), r(5, 3), r(5, 4))],
    "stack.default": [(lambda x, y: torch.stack((x, y, x), 1), r(5, 3), r(5, 3))],
    "split.Tensor": [
        (lambda x: x.split(5, 2), r(3, 7, 15)),
        (lambda x: x.split(4, 1), r(5, 7)),
        (lambda x: x.split(1), r(3, 5)),
    ],
    "split_with_sizes.default": [
        (lambda x: x.split([5, 5], -1), r(3, 10)),
        (lambda x: x.split([2, 5], 0), r(7, 3)),
    ],
    "chunk.default": [
        (lambda x: x.chunk(3, -1), r(5, 15)),
        (lambda x: x.chunk(3), r(7, 3)),
        (lambda x: x.chunk(2, 1), r(3, 15)),
        (lambda x: x.chunk(2, 1), r(3, 9, 2)),
        (lambda x: x.chunk(3, 1), r(3, 10)),
    ],
    "unbind.int": [(lambda x: x.unbind(1), r(5, 3, 4))],
    "slice.Tensor": [
        (lambda x: x[:, 1:], r(5, 7)),
        (lambda x: x[..., ::2], r(5, 7)),
        (lambda x: x[:, -7:], r(5, 7)),
        (lambda x: x[:, 8:12], r(5, 16)),
        (lambda x: x[:, -8:-2], r(5, 20)),
        (lambda x: x[:, 6:], r(5, 15, 2)),
    ],
    "select.int": [(lambda x: x[:, -1], r(5, 3, 4))],
    "narrow.default": [
        (lambda x: x.narrow(1, 0, 7), r(5, 7)),
        (lambda x: x.narrow(1, 6, 6), r(5, 12)),
        (lambda x: x.narrow(1, 3, 9), r(5, 15)),
    ],
    "take_along_dim.default": [(lambda x, i: torch.take_along_dim(x, i, 1), r(5, 7, 3), ints(7, 5, 4, 1))],
    "scatter.src": [(lambda x, i, y: x.scatter(1, i, y), r(5, 7, 3), distinct(5, 4, 3), r(5, 4, 3))],
    "scatter.value": [(lambda x, i: x.scatter(1, i, 2.0), r(5, 7, 3), ints(7, 5, 4, 2))],
    "scatter_add.default": [(lambda x, i, y: x.scatter_add(-1, i, y), r(5, 4, 7), ints(7, 5, 3, 7), r(5, 3, 7))],
    "index_add.default": [(lambda x, i, y: x.index_add(1, i, y, alpha=2), r(5, 7, 3), ints(7, 4), r(5, 4, 3))],
    "index_copy.default": [(lambda x, i, y: x.index_copy(1, i, y), r(5, 7, 3), torch.tensor([6, 0]), r(5, 2, 3))],
    "index_put.default": [
        (lambda x, i, y: x.index_put((i,), y, accumulate=True), r(5, 7, 3), ints(5, 4, 2), r(4, 2, 7, 3)),
        (lambda x, i, y: x.index_put((i, i), y, accumulate=True), r(5, 7, 6), ints(5, 4), r(6)),
        (lambda x, i, y: x.index_put((i,), y, accumulate=True), r(5, 7, 6), ints(5, 4), r(4, 1, 6)),
    ],
    "index.Tensor": [
        (lambda x, i: x[i], r(5, 7), ints(5, 3, 4)),
        (lambda x, i: x[:, i], r(5, 7, 3), ints(7, 4)),
        (lambda x, i: x[:, i - 7], r(5, 7, 3), ints(7, 4)),
        (lambda x, i: (x > 0)[i], r(5, 7), ints(5, 3)),
    ],
    "index_select.default": [(lambda x, i: x.index_select(-1, i), r(5, 7), ints(7, 4))],
    "gather.default": [(lambda x, i: x.gather(1, i), r(5, 7, 4), ints(7, 5, 3, 2))],
    "one_hot.default": [(lambda i: F.one_hot(i, 7), ints(7, 5, 3))],
    "roll.default": [(lambda x: x.roll(2, 1), r(5, 7)), (lambda x: x.roll(2), r(5, 7))],
    "flip.default": [(lambda x: x.flip(1), r(5, 7, 2))],
    "pad.default": [(lambda x: F.pad(x, (1, 2)), r(5, 7)), (lambda x: F.pad(x, (0, 0, 1, 0), value=1.0), r(5, 7, 3))],
    "tril.default": [(lambda x: x.tril(), r(5, 3, 3))],
    "triu.default": [(lambda x: x.triu(1), r(5, 3, 3))],
    "cumsum.default": [(lambda x: x.cumsum(1), r(5, 7))],
    "cumprod.default": [(lambda x: x.cumprod(1), r(5, 7))],
    "glu.default": [(lambda x: F.glu(x), r(5, 6))],
    "sort.default": [(lambda x: x.sort(1), r(5, 7))],
    "topk.default": [(lambda x: x.topk(2, 1), r(5, 7)), (lambda x: x.topk(2), r(5, 7))],
    "max_pool2d.default": [(lambda x: F.max_pool2d(x, 2), r(3, 5, 4, 4))],
    "avg_pool2d.default": [(lambda x: F.avg_pool2d(x, 2), r(3, 5, 4, 4))],
    "adaptive_avg_pool2d.default": [(lambda x: F.adaptive_avg_pool2d(x, 1), r(3, 5, 4, 4))],
    "upsample_nearest2d.vec": [(lambda x: F.interpolate(x, scale_factor=2), r(3, 5, 2, 2))],
    "sum.default": [(lambda x: x.sum(), r(5, 7))],
    "sum.dim_IntList": [(lambda x: x.sum(1), r(5, 7)), (lambda x: x.sum((0, -1), keepdim=True), r(5, 3, 4)),
                        (lambda x: x.sum([]), r(5, 3))],
    "mean.default": [(lambda x: x.mean(), r(5, 7))],
    "mean.dim": [(lambda x: x.mean(-1, keepdim=True), r(5, 3, 4))],
    "amax.default": [(lambda x: x.amax(0), r(5, 7)), (lambda x: x.amax(), r(5, 7))],
    "max.dim": [(lambda x: x.max(1), r(5, 7))],
    "max_pool3d.default": [(lambda x: F.max_pool3d(x, 2), r(3, 5, 2, 4, 4))],
    "avg_pool3d.default": [(lambda x: F.avg_pool3d(x, 2), r(3, 5, 2, 4, 4))],
    "adaptive_avg_pool3d.default": [(lambda x: F.adaptive_avg_pool3d(x, 2), r(3, 5, 2, 4, 4))],
    "adaptive_max_pool2d.default": [(lambda x: F.adaptive_max_pool2d(x, 2), r(3, 5, 4, 4))],
    "instance_norm.default": [
        (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), r(3, 5, 4), r(5), r(5)),
        (lambda x: F.instance_norm(x), r(3, 5, 4, 2)),
    ],
    "var_mean.correction": [(lambda x: torch.var_mean(x, 1, correction=0), r(5, 3, 4))],
    "std_mean.dim": [(lambda x: torch.std_mean(x, (1, 2), unbiased=True, keepdim=True), r(5, 3, 4))],
    "median.dim": [(lambda x: x.median(1), r(5, 7))],
    "argmin.default": [(lambda x: x.argmin(1), r(5, 7))],
    "argsort.default": [(lambda x: x.argsort(1), r(5, 7))],
    "cummax.default": [(lambda x: x.cummax(1), r(5, 7))],
    "kl_div.default": [(lambda x, y: F.kl_div(x, y, reduction="sum"), r(5, 3), r(5, 3).exp())],
    "huber_loss.default": [(lambda x, y: F.huber_loss(x, y, reduction="none"), r(5, 3), r(5, 3))],
    "binary_cross_entropy.default": [
        (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction="sum"), r(5, 3), r(5, 3)),
    ],
    "argmax.default": [(lambda x: x.argmax(1), r(5, 7))],
    "any.dim": [(lambda x: (x > 0).any(1), r(5, 7))],
    "var.correction": [(lambda x: x.var((1, 2), correction=0), r(5, 3, 4))],
    "var.dim": [(lambda x: x.var(1, unbiased=False, keepdim=True), r(5, 3, 4))],
    "std.dim": [(lambda x: x.std(1), r(5, 3, 4))],
    "prod.dim_int": [(lambda x: x.prod(1), r(5, 3))],
    "logsumexp.default": [(lambda x: x.logsumexp(1), r(5, 3, 4))],
    "linalg_vector_norm.default": [(lambda x: torch.linalg.vector_norm(x, dim=1), r(5, 3, 4))],
}  # fmt: skip
"""Operators by name, with functions that call them and the tensors of the call."""


@pytest.mark.parametrize("name", TABLE)
def test_every_row_of_the_operator_computes_the_same(name: str) -> None:
    count = 0
    for function, *tensors in TABLE[name]:
        found = [op for op in operations(function, *tensors) if op.name == name]
        assert found, f"{name} is not in the exported graph"
        count += sum(map(check_all, found))
    assert count, f"{name} has no row"


def test_the_table_is_large() -> None:
    assert len(TABLE) >= 150


@pytest.mark.parametrize("name", ["mm.default", "linear.default", "transpose.int", "softmax.int", "cat.default"])
def test_a_wrong_form_is_found(name: str) -> None:
    """The labels of the first argument's last two dimensions change places."""
    function, *tensors = TABLE[name][0]
    op = next(op for op in operations(function, *tensors) if op.name == name)
    first, dims = next(iter(op.form.args.items()))
    labels = [dims[-1][0][0], dims[-2][0][0]]
    swapped = (*dims[:-2], *(((label, dim[0][1]),) for label, dim in zip(labels, dims[-2:], strict=True)))
    with pytest.raises(AssertionError, match="over 2"):
        check_all(replace(op, form=replace(op.form, args={**op.form.args, first: swapped})))


REPLICATED: dict[str, Instance] = {
    "linear.default": (lambda x: F.linear(x, x), r(5, 5)),
    "reshape.default": (lambda x: x.reshape(2, 3, 8), r(2, 4, 6)),
    "index_select.default": (lambda i: i.index_select(0, i), ints(5, 5)),
    "batch_norm.default": (lambda x, m, v: F.batch_norm(x, m, v, training=True), r(4, 5), r(5), r(5).exp()),
    "cross_entropy_loss.default": (F.cross_entropy, r(5, 7), ints(7, 5)),
    "mse_loss.default": (F.mse_loss, r(5, 7), r(5, 7)),
    "unfold.default": (lambda x: x.unfold(1, 2, 2), r(5, 4)),
    "add_.Tensor": (lambda x, y: x.clone().add_(y), r(5), r(5)),
    "embedding.default": (lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), r(7, 3), ints(7, 5)),
    "transpose.int": (lambda x: x.transpose(0, -1), r()),
    "arange.default": (lambda x: x + torch.arange(5), r(5)),
    "zeros.default": (lambda x: x + torch.zeros(5), r(5)),
}
"""Operators, or uses of them, that every worker computes whole."""


@pytest.mark.parametrize("name", REPLICATED)
def test_what_has_no_labels_is_computed_by_every_worker(name: str) -> None:
    function, *tensors = REPLICATED[name]
    found = [op for op in operations(function, *tensors) if op.name == name]
    assert [op.rows(2) for op in found] == [[]]


@pytest.mark.parametrize(
    "look_up",
    [
        lambda x, i: F.embedding(i, x),
        lambda x, i: x[i],
        lambda x, i: x.index_select(0, i[0]),
        lambda x, i: x.gather(0, i),
    ],
)
def test_a_place_outside_of_a_split_dimension_is_refused(look_up: Function) -> None:
    """No worker has it, and their zeros would be added up."""
    x, inside = r(6, 1), torch.tensor([[5]])
    (op,) = operations(look_up, x, inside)[-1:]
    row = split_row(op.form, op.node.all_input_nodes[0].name, Split(0))
    assert isinstance(row, Row)
    local = op.on_worker(row, dict(row.args), MeshRank(2, 0))
    index = op.values[op.node.all_input_nodes[1].name]
    for places, refused in ((index, False), (index + 1, True)):
        with pytest.raises(RuntimeError, match="out of range") if refused else nullcontext():
            op.run({op.node.all_input_nodes[0].name: x[:3], op.node.all_input_nodes[1].name: places}, local)


def test_what_is_rounded_cannot_be_added_up() -> None:
    function = lambda x: x.sum(1, dtype=torch.int64)  # noqa: E731
    (found,) = [op for op in operations(function, *[r(4, 5)]) if op.name == "sum.dim_IntList"]
    assert found.form.known
    assert not found.form.linear


# --- sizes that vary, and many others --------------------------------------------------------------------------------


def _attending(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    q, k, v = F.linear(x, w).chunk(3, -1)
    heads = [y.view(x.shape[0], x.shape[1], 3, 2).transpose(1, 2) for y in (q, k, v)]
    attended = sdpa(*heads, is_causal=True).transpose(1, 2).contiguous().view(*x.shape[:2], -1)
    return x + F.linear(F.dropout(attended, 0.5), out)


def _normed(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin


def _convolved(x: Tensor, w: Tensor, head: Tensor) -> Tensor:
    return F.linear(F.max_pool2d(F.relu(F.conv2d(x, w)), 2).flatten(1), head)


MODELS: list[Instance] = [
    (_attending, r(3, 5, 6), r(18, 6), r(6, 6)),
    (_normed, r(5, 3, 4), r(4)),
    (_rotated, r(3, 5, 4), r(5, 4), r(5, 4)),
    (_convolved, r(5, 2, 5, 5), r(3, 2, 2, 2), r(4, 12)),
    (lambda x, w: F.linear(x.view(-1, 6), w).log_softmax(-1).view(*x.shape[:2], 7), r(3, 5, 6), r(7, 6)),
]


@pytest.mark.parametrize("instance", MODELS, ids=range(len(MODELS)))
def test_rows_of_a_graph_whose_sizes_vary(instance: Instance) -> None:
    found = [op for op in operations(*instance, dynamic=True) if op.form.known and "getitem" not in op.name]
    assert len(found) >= 3
    assert all(check_all(op, WAYS[:1]) for op in found)


few = settings(max_examples=10)
size = st.sampled_from([1, 2, 3, 4, 5])


def held(function: Function, *tensors: Tensor) -> None:
    (op,) = operations(function, *tensors)
    assert op.form.known
    check_all(op)


@few
@given(
    mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=5),
    st.sampled_from([torch.add, torch.mul, torch.div]),
)
def test_pointwise(shapes: Any, function: Function) -> None:
    held(function, *[r(*shape) for shape in shapes.input_shapes])


@few
@given(mutually_broadcastable_shapes(signature="(m?,k),(k,n?)->(m?,n?)", max_dims=2, max_side=5))
def test_products(shapes: Any) -> None:
    held(torch.matmul, *[r(*shape) for shape in shapes.input_shapes])


@few
@given(st.lists(size, min_size=1, max_size=4).filter(lambda sizes: prod(sizes) <= 80), st.data())
def test_views(sizes: list[int], data: st.DataObject) -> None:
    """The same factors, grouped to dimensions in two ways."""
    inner = st.sets(st.integers(0, len(sizes)))
    before, after = ([0, *sorted(data.draw(inner) - {0, len(sizes)}), len(sizes)] for _ in range(2))
    shapes = [[prod(sizes[a:b]) for a, b in pairwise(cuts)] for cuts in (before, after)]
    held(lambda x: x.reshape(shapes[1]), r(*shapes[0]))


@few
@given(st.lists(size, min_size=1, max_size=3), st.booleans(), st.sampled_from(["sum", "mean", "amax"]), st.data())
def test_reductions(shape: list[int], keepdim: bool, name: str, data: st.DataObject) -> None:
    dims = data.draw(st.sets(st.integers(0, len(shape) - 1)))
    held(lambda x: getattr(x, name)(tuple(dims), keepdim=keepdim), r(*shape))
