"""What the names of a graph as data stand for here, and what arguments they take.

The table is made from the names of :mod:`roundelay.ir.plain_operations`; a name from outside is only looked up in it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from roundelay.frontend.export.autocast_regions import REGION
from roundelay.frontend.export.export_substitutes import branch, cumulative_batch_norm
from roundelay.frontend.label_counts import count_labels
from roundelay.frontend.stage_builder import pass_on
from roundelay.frontend.stages.keyed_rng import keyed_attention, keyed_call, keyed_dropout
from roundelay.ir.plain_graph import (
    Argument,
    Body,
    Call,
    Constant,
    Input,
    Limits,
    List,
    PlainGraph,
    Ref,
    Tuple,
    refused,
)
from roundelay.ir.plain_operations import KEYED_CALL, OPERATORS, PASS_ON, RANDOM

_KEY = ("draw", "position")
_SIZES = {
    *("size", "sizes", "shape", "repeats", "output_size", "pad", "padding", "output_padding", "dims", "m", "n"),
    *("steps", "num_classes", "row", "col", "scale_factors", "upscale_factor", "split_size"),
}
"""Names of arguments from which a result's sizes come."""
_NUMBERED = "python.", "math.", "torch.sym_"


@dataclass(frozen=True, slots=True)
class Operation:
    """What a name stands for.

    Args:
        target: the function.
        required: names of the arguments that it must get.
        positional: names of those that may be given in order.
        named: names of those that may be given by name only.
        extra: whether any number of arguments may follow in order.
        bodies: places of the arguments that are graphs.
    """

    target: Callable[..., Any]
    required: frozenset[str]
    positional: tuple[str, ...]
    named: frozenset[str] = frozenset()
    extra: bool = False
    bodies: tuple[int, ...] = ()


@cache
def operations() -> dict[str, Operation]:
    """Every allowed name that this version of torch knows."""
    return {**_operators(), **_of_python(), **_of_house()}


@cache
def names() -> dict[Any, str]:
    """The name of every function of the table."""
    return {operation.target: name for name, operation in operations().items()}


def _operators() -> dict[str, Operation]:
    found = {}
    for name in OPERATORS:
        _, packet, overload = name.split(".")
        target = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if target is not None:
            found[name] = _by_schema(target)
    return found


def _by_schema(target: Any) -> Operation:
    arguments = target._schema.arguments
    return Operation(
        target,
        frozenset(argument.name for argument in arguments if not argument.has_default_value()),
        tuple(argument.name for argument in arguments if not argument.kwarg_only),
        frozenset(argument.name for argument in arguments if argument.kwarg_only),
    )


def _fixed(target: Callable[..., Any], *given: str, **more: Any) -> Operation:
    return Operation(target, frozenset(given), given, **more)


def _of_python() -> dict[str, Operation]:
    of_two = ["getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "eq", "ne", "lt", "le", "gt", "ge"]
    found = {f"python.{name}": _fixed(getattr(operator, name), "one", "two") for name in of_two}
    found |= {f"python.{name}": _fixed(getattr(operator, f"{name}_"), "one", "two") for name in ("and", "or")}
    found |= {"python.neg": _fixed(operator.neg, "one"), "python.not": _fixed(operator.not_, "one")}
    found |= {f"math.{name}": _fixed(getattr(math, name), "one") for name in ("sqrt", "ceil", "floor", "trunc")}
    found |= {f"torch.{f.__name__}": _fixed(f, "one") for f in (torch.sym_int, torch.sym_float, torch.sym_not)}
    found |= {f"torch.{f.__name__}": _fixed(f, "one", "two") for f in (torch.sym_max, torch.sym_min)}
    return found | {"torch.sym_ite": _fixed(torch.sym_ite, "one", "two", "three")}


def _of_house() -> dict[str, Operation]:
    higher: Any = torch.ops.higher_order
    region = ("device_type", "dtype", "enabled", "cache_enabled", "body")
    return {
        PASS_ON: _fixed(pass_on, "value"),
        KEYED_CALL: Operation(keyed_call, frozenset({"operator", *_KEY}), ("operator",), frozenset(_KEY), extra=True),
        "roundelay.keyed_dropout": _keyed(keyed_dropout, torch.ops.aten.dropout.default),
        "roundelay.keyed_attention": _keyed(keyed_attention, torch.ops.aten.scaled_dot_product_attention.default),
        "roundelay.count_labels": _fixed(count_labels, "target", "weight", "ignore_index"),
        "roundelay.cumulative_batch_norm": _by_parameters(cumulative_batch_norm),
        "roundelay.branch": Operation(
            branch, frozenset({"pred", "true", "false"}), ("pred", "true", "false", "operands"), bodies=(1, 2)
        ),
        "torch.set_grad_enabled": _fixed(higher.wrap_with_set_grad_enabled, "enabled", "body", extra=True, bodies=(1,)),
        "torch.autocast": _fixed(REGION, *region, extra=True, bodies=(4,)),
    }


def _by_parameters(target: Callable[..., Any]) -> Operation:
    return _fixed(target, *target.__code__.co_varnames[: target.__code__.co_argcount])


def _keyed(target: Callable[..., Any], operator_: Any) -> Operation:
    """A function that takes what an operator takes, and the key."""
    plain = _by_schema(operator_)
    return Operation(target, plain.required | {*_KEY}, plain.positional, plain.named | {*_KEY})


def check_call(node: Call, graph: PlainGraph, limits: Limits) -> Operation:
    """The operation of a node, whose arguments fit it.

    Raises:
        PlanError: they do not, or would make a tensor beyond the limits.
    """
    operation = operations().get(node.operation)
    what = f"operation {node.name!r} ({node.operation})"
    if operation is None:
        raise refused(what, f"a version of torch without it, {torch.__version__}", "the version of the host")
    args, kwargs = node.args, dict(node.kwargs)
    own = {k: v for k, v in kwargs.items() if k in _KEY} if node.operation == KEYED_CALL else kwargs
    _check_given(what, operation, args, own)  # those of a keyed operator are checked as its own, below
    _check_bodies(what, operation, args, kwargs, graph)
    if _KEY[0] in operation.required:
        _check_key(what, kwargs, graph)
    if node.operation == KEYED_CALL:
        drawn = args[0]
        if not isinstance(drawn, Constant) or drawn.kind != "operator" or drawn.name not in RANDOM:
            raise refused(what, f"a call of {drawn!s:.80}", "one of the operators that draw random numbers")
        inner = Call(node.name, drawn.name, args[1:], {k: v for k, v in kwargs.items() if k not in _KEY}, node.ndim)
        check_call(inner, graph, limits)
        return operation
    if node.operation.startswith(_NUMBERED):
        _check_numbers(what, args)
    if node.operation == "torch.autocast" and args[0] != "cpu":
        raise refused(what, f"a device type {args[0]!s:.20}", "'cpu', which is that of the stage")
    given = [*zip(operation.positional, args, strict=False), *kwargs.items()]
    _check_sizes(what, node.operation, given, limits)
    return operation


def _check_given(what: str, operation: Operation, args: Sequence[Argument], kwargs: Mapping[str, Argument]) -> None:
    """Check the number of arguments, and their names."""
    in_order = operation.positional[: len(args)]
    if len(args) > len(operation.positional) and not operation.extra:
        raise refused(what, f"{len(args)} arguments in order", f"at most {len(operation.positional)}")
    known = {*operation.positional[len(args) :], *operation.named}
    if other := sorted(kwargs.keys() - known):
        raise refused(what, f"an argument {other[0]!r}", f"one of {', '.join(sorted(known)) or 'none'} by name")
    if missing := sorted(operation.required - {*in_order, *kwargs}):
        raise refused(what, f"{len(args)} arguments, without {missing[0]!r}", f"{len(operation.required)} or more")


def _check_bodies(
    what: str, operation: Operation, args: Sequence[Argument], kwargs: Mapping[str, Argument], graph: PlainGraph
) -> None:
    """Check that graphs are exactly where an operation runs them."""

    def is_body(value: Argument) -> bool:
        return isinstance(value, Ref) and isinstance(graph.nodes[value.node], Body)

    for place, value in [*enumerate(args), *((-1, value) for value in kwargs.values())]:
        inner = any(is_body(item) for item in _leaves(value))
        if place in operation.bodies and not is_body(value):
            raise refused(what, f"no graph as its argument {place}", "a graph")
        if inner and place not in operation.bodies:
            raise refused(what, "a graph as an argument", "values")


def _check_numbers(what: str, args: Sequence[Argument]) -> None:
    """Check that arithmetic is of nodes and numbers, and not of numbers alone."""
    if not any(isinstance(value, Ref) for value in args):
        raise refused(what, "no node among its arguments", "one at least")
    if other := [value for value in args if not isinstance(value, (Ref, int, float))]:
        raise refused(what, f"{other[0]!s:.80} as an argument", "nodes and numbers")


def _check_key(what: str, kwargs: Mapping[str, Argument], graph: PlainGraph) -> None:
    draw, position = kwargs[_KEY[0]], kwargs[_KEY[1]]
    last = [i for i, node in enumerate(graph.nodes) if isinstance(node, Input)][-1:]
    if not isinstance(draw, Ref) or [draw.node] != last:
        raise refused(what, "another key of random numbers", "the last input of the graph")
    if type(position) is not int or not 0 <= position < 1 << 31:
        raise refused(what, f"a position of {position!s:.40}", "a number of 31 bits")


def _leaves(value: Argument) -> Iterator[Argument]:
    if isinstance(value, (List, Tuple)):
        for item in value.items:
            yield from _leaves(item)
    else:
        yield value


def _check_sizes(what: str, name: str, given: Sequence[tuple[str, Argument]], limits: Limits) -> None:
    """Refuse literal sizes, and numbers for arithmetic with sizes, that are beyond any tensor's."""
    if name.startswith(_NUMBERED):
        of_sizes = [value for _, value in given]
    elif name.startswith(("aten.arange", "aten.linspace", "aten.logspace")):
        of_sizes = [math.ceil(_length(dict(given)))]
    else:
        of_sizes = [value for key, value in given if key in _SIZES]
    literals = [leaf for value in of_sizes for leaf in _leaves(value)]
    needed = math.prod(max(1, abs(leaf)) for leaf in literals if type(leaf) is int)
    if needed > limits.elements:
        raise refused(what, f"a tensor of {min(needed, 1 << 62):,} elements", f"at most {limits.elements:,}")


def _length(given: Mapping[str, Argument]) -> float:
    """The length of a range as far as it is written in numbers."""
    if "steps" in given:
        return _number(given["steps"], 0.0)
    start, end, step = (_number(given.get(k), d) for k, d in (("start", 0.0), ("end", 0.0), ("step", 1.0)))
    return min(abs(end - start) / abs(step), 2.0**62) if step and math.isfinite(step) else 2.0**62


def _number(value: Argument, default: float) -> float:
    """A literal; infinite ones are beyond any length."""
    if not isinstance(value, (int, float)):
        return default
    return float(max(-(2**62), min(2**62, value))) if value == value else 2.0**62
