"""Operators to be measured, by class: as a stage calls them, forward and backward."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from roundelay.planning.op_profiler import operation_clock

Made = tuple[Callable[[], torch.Tensor | None], tuple[torch.Tensor, ...]]
"""What to call, and of what gradients are asked; a call that returns nothing has no backward."""

CALL = "call"
"""The class of an operator that has next to nothing to compute."""

_VOCABULARY = 4096
_HEADS = 4, 32
"""Of attention: how many, and their width."""

_REPEATED_S = 0.005


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of one size.

    Args:
        kind: its class.
        unit: ``FLOPs`` or ``bytes``.
        size: in this unit.
        make: makes what to call.
    """

    kind: str
    unit: str
    size: int
    make: Callable[[], Made]

    def seconds(self) -> list[float]:
        """Medians of the seconds of its forward, and of its backward if it has one, repeated for some milliseconds."""
        (call, inputs), now = self.make(), operation_clock()
        rows = [_timed(call, inputs, now)]
        until_s = time.perf_counter() + _REPEATED_S
        while time.perf_counter() < until_s:
            rows.append(_timed(call, inputs, now))
        return [statistics.median(column) for column in zip(*rows[len(rows) > 1 :], strict=True)]


def _timed(
    call: Callable[[], torch.Tensor | None], inputs: tuple[torch.Tensor, ...], now: Callable[[], float]
) -> list[float]:
    start_s = now()
    result = call()
    seconds = [now() - start_s]
    if result is not None:
        gradient = torch.ones_like(result)
        start_s = now()
        torch.autograd.grad(result, inputs, gradient)
        seconds.append(now() - start_s)
    return seconds


def operators(num_bytes: Sequence[int], width: int) -> list[Operator]:
    """All that are measured.

    Args:
        num_bytes: that they read and write, where that is their unit.
        width: the largest of a matrix.
    """
    widths, lengths = [width >> shift for shift in (5, 3, 1, 0)], [width >> shift for shift in (5, 3, 1)]
    square = [(rows, size, size) for size in widths for rows in (size, 4, 1)]
    products = [*square, (width // 4, width // 8, width), (width, width, width // 8), (width, width, 4)]
    by_bytes: list[tuple[str, Callable[[int], Callable[[], Made]]]] = [
        ("elementwise", lambda n: _of(torch.relu, _rows(n // 2))),
        ("elementwise", lambda n: _of(torch.mul, _rows(n // 3), _rows(n // 3))),
        ("transcendental", lambda n: _of(functional.gelu, _rows(n // 2))),
        ("normalization", lambda n: _of(lambda x: functional.layer_norm(x, x.shape[-1:]), _rows(n // 2))),
        ("softmax", lambda n: _of(lambda x: torch.softmax(x, -1), _rows(n // 2))),
        ("embedding", lambda n: _of(partial(functional.embedding, _indices(n // 2)), (_VOCABULARY, _rows(n // 2)[1]))),
        ("adamw", lambda n: partial(_updated, torch.optim.AdamW, n)),
        ("sgd", lambda n: partial(_updated, partial(torch.optim.SGD, lr=0.1), n)),
        ("copy", lambda n: partial(_copied, n)),
    ]
    return [
        *map(_product, products),
        *(Operator("attention", "FLOPs", 4 * math.prod(_HEADS) * n * n, _attended(n)) for n in lengths),
        *(Operator(kind, "bytes", n, make(n)) for kind, make in by_bytes for n in num_bytes),
        Operator(CALL, "bytes", 64, _of(torch.relu, _rows(32))),
    ]


def _product(shape: tuple[int, int, int]) -> Operator:
    rows, width, columns = shape
    kind = "matmul-thin" if min(shape) <= 4 else "matmul"
    make = _of(functional.linear, (rows, width), (columns, width))
    return Operator(kind, "FLOPs", 2 * math.prod(shape), make)


def _leaf(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.5, requires_grad=True)


def _rows(num_bytes: int) -> tuple[int, int]:
    count = max(1, num_bytes // 4)
    return max(1, count // 256), min(count, 256)


def _indices(num_bytes: int) -> torch.Tensor:
    """Scattered rows of a table, which are so many bytes."""
    return torch.arange(_rows(num_bytes)[0]) * 2_654_435_761 % _VOCABULARY


def _of(function: Callable[..., torch.Tensor], *shapes: Sequence[int]) -> Callable[[], Made]:
    """A function of tensors of these shapes."""

    def make() -> Made:
        own = tuple([_leaf(*shape) for shape in shapes])
        return partial(function, *own), own

    return make


def _attended(length: int) -> Callable[[], Made]:
    attention: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention
    return _of(partial(attention, is_causal=True), *[(1, _HEADS[0], length, _HEADS[1])] * 3)


def _updated(optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer], num_bytes: int) -> Made:
    own = _leaf(max(1, num_bytes // 4))
    own.grad = torch.ones_like(own)
    step = optimizer([own]).step
    return lambda: step(), ()


def _copied(num_bytes: int) -> Made:
    target, source = torch.ones(2, num_bytes // 4)

    def copy() -> None:
        target.copy_(source)

    return copy, ()
