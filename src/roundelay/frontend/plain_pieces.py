"""Graphs of torch to graphs as data, and back.

What torch generates code from is made here: nodes get names of this module's own, functions come from a table, and
numbers and texts are literals. Nothing from outside becomes a name in that code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.fx

from roundelay.errors import CaptureError
from roundelay.frontend.graph_passes import is_assertion
from roundelay.frontend.plain_operators import check_call, names, operations
from roundelay.ir.plain_graph import (
    CONSTANTS,
    DTYPES,
    LIMITS,
    MAX_DIMS,
    MAX_NAME,
    Argument,
    Body,
    Call,
    Constant,
    Held,
    Input,
    Limits,
    List,
    Node,
    PlainGraph,
    Ref,
    Tuple,
    refused,
)

Where = Callable[[torch.fx.Node], str]
"""A node to words that say where it is in the person's program."""

_KINDS: tuple[tuple[type, str], ...] = (
    (torch.dtype, "dtype"),
    (torch.layout, "layout"),
    (torch.memory_format, "memory_format"),
)


_FILLED: dict[Any, Any] = {
    torch.ops.aten.empty.memory_format: torch.ops.aten.zeros.default,
    torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default,
    torch.ops.aten.empty_like.default: torch.ops.aten.zeros_like.default,
}
"""What travels in the place of operators that return memory as it is, which the person's program then fills."""


def plain_graph(piece: torch.fx.GraphModule, where: Where) -> PlainGraph:
    """A graph as data.

    Args:
        piece: the graph, and what it holds.
        where: for messages.

    Raises:
        CaptureError: it holds or calls what cannot travel; naming the operation.
    """
    nodes: list[Node] = []
    number: dict[torch.fx.Node, int] = {}
    outputs: tuple[Argument, ...] = ()
    for node in [node for node in piece.graph.nodes if not is_assertion(node)]:
        argument = partial(_argument, number=number, where=partial(where, node))
        if node.op == "output":
            results = node.args[0] if isinstance(node.args[0], (tuple, list)) else (node.args[0],)
            outputs = tuple(argument(value) for value in results)
            continue
        number[node] = len(nodes)
        name = node.name[:MAX_NAME]
        if node.op == "placeholder":
            nodes.append(Input(name, _ndim(node)))
        elif node.op == "get_attr":
            nodes.append(_held(name, _attribute(piece, str(node.target)), node, where))
        else:
            operation = names().get(_FILLED.get(node.target, node.target))
            if operation is None:
                raise cannot_travel(where(node), f"{node.target}", "one of those that may travel")
            args = tuple(argument(value) for value in node.args)
            given = {key: value for key, value in node.kwargs.items() if value is not None}
            kwargs = {key: argument(value) for key, value in given.items()}
            nodes.append(Call(name, operation, args, kwargs, _ndim(node)))
    return PlainGraph(tuple(nodes), outputs)


def cannot_travel(what: str, got: str, expected: str) -> CaptureError:
    """The error for a part of a job that cannot be sent to machines that have none of its Python."""
    return CaptureError(
        what,
        got=got,
        expected=f"{expected}: machines that join get data, and no Python",
        remedy="Write it with other operations of torch; or train it without strangers, by `roundelay train`.",
    )


def _attribute(piece: torch.nn.Module, path: str) -> Any:
    value: Any = piece
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _held(name: str, value: Any, node: torch.fx.Node, where: Where) -> Node:
    if isinstance(value, torch.fx.GraphModule):
        return Body(name, plain_graph(value, lambda inner: f"{where(node)}, in it {inner.name!r} ({inner.target})"))
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
        raise cannot_travel(where(node), f"a {type(value).__name__} that it holds", "dense tensors with values")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPES or not value.is_contiguous():
        got = f"a tensor that it holds, of {value.dtype} and strides {value.stride()}"
        raise cannot_travel(where(node), got, f"contiguous tensors of {', '.join(DTYPES)}")
    plain = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    return Held(name, dtype, tuple(value.shape), plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b"")


def _ndim(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.ndim if isinstance(value, torch.Tensor) and value.ndim <= MAX_DIMS else -1


def _argument(value: Any, number: dict[torch.fx.Node, int], where: Callable[[], str]) -> Argument:
    if value is None or type(value) in (bool, float):
        return value  # type: ignore[no-any-return]
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value
    if type(value) is str and len(value) <= MAX_NAME:
        return value
    if isinstance(value, torch.fx.Node):
        return Ref(number[value])
    if isinstance(value, (tuple, list)):
        items = tuple(_argument(item, number, where) for item in value)
        return Tuple(items) if isinstance(value, tuple) else List(items)
    if isinstance(value, torch.device) and value.type == "cpu":
        return Constant("device", "cpu")
    if isinstance(value, torch._ops.OpOverload) and names().get(value) in CONSTANTS["operator"]:
        return Constant("operator", names()[value])
    for kind, name in _KINDS:
        if isinstance(value, kind) and (own := str(value).removeprefix("torch.")) in CONSTANTS[name]:
            return Constant(name, own)
    raise cannot_travel(where(), f"{value!s:.80} ({type(value).__name__}) as an argument", "numbers, texts and tensors")


def torch_graph(graph: PlainGraph, limits: Limits = LIMITS) -> torch.fx.GraphModule:
    """A graph of torch from a checked graph as data.

    Raises:
        PlanError: arguments that do not fit their operation, or a tensor beyond the limits.
    """
    made, owner = torch.fx.Graph(), torch.nn.Module()
    env: list[torch.fx.Node] = []
    for i, node in enumerate(graph.nodes):
        if isinstance(node, Input):
            env.append(made.placeholder(f"input_{i}"))
        elif isinstance(node, Call):
            operation = check_call(node, graph, limits)
            args = tuple(_value(value, env) for value in node.args)
            kwargs = {key: _value(value, env) for key, value in node.kwargs.items()}
            env.append(made.create_node("call_function", operation.target, args, kwargs, name=f"value_{i}"))
        else:
            held = torch_graph(node.graph, limits) if isinstance(node, Body) else _tensor(node)
            setattr(owner, f"held_{i}", held)
            env.append(made.get_attr(f"held_{i}"))
        if isinstance(node, (Input, Call)) and node.ndim >= 0:  # which split_backward reads
            env[-1].meta["val"] = torch.empty((0,) * node.ndim, device="meta")
    made.output(tuple(_value(value, env) for value in graph.outputs))
    return torch.fx.GraphModule(owner, made)


def _tensor(held: Held) -> torch.Tensor:
    dtype: torch.dtype = _TORCH["dtype", held.dtype]()
    try:
        if not held.data:
            return torch.empty(held.shape, dtype=dtype)
        return torch.frombuffer(bytearray(held.data), dtype=dtype).reshape(held.shape).clone()  # in torch's own memory
    except (RuntimeError, ValueError, OverflowError) as error:
        raise refused(f"tensor {held.name!r}", f"{error!s:.200}", "sizes of a tensor") from error


def _value(value: Argument, env: list[torch.fx.Node]) -> Any:
    if isinstance(value, Ref):
        return env[value.node]
    if isinstance(value, Tuple):
        return tuple(_value(item, env) for item in value.items)
    if isinstance(value, List):
        return [_value(item, env) for item in value.items]
    return _TORCH[value.kind, value.name]() if isinstance(value, Constant) else value


def _constants() -> dict[tuple[str, str], Callable[[], Any]]:
    """Every constant of torch that may be an argument, by kind and name."""
    found: dict[tuple[str, str], Callable[[], Any]] = {("device", "cpu"): lambda: torch.device("cpu")}
    for kind in ("dtype", "layout", "memory_format"):
        for name in CONSTANTS[kind]:
            found[kind, name] = partial(getattr, torch, name)
    for name in CONSTANTS["operator"]:
        found["operator", name] = partial(_operator, name)
    return found


def _operator(name: str) -> Any:
    if name not in operations():
        raise refused(name, f"torch {torch.__version__}, which has no such operator", "the version of the host")
    return operations()[name].target


_TORCH = _constants()
