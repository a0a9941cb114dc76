"""Operators to be measured, by class: as a stage calls them, forward and backward."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from roundelay.calibration.sweep import Effort
from roundelay.planning.op_profiler import operation_clock

Made = tuple[Callable[[], torch.Tensor | None], tuple[torch.Tensor, ...]]
"""What to call, and of what gradients are asked; a call that returns nothing has no backward."""

Make = Callable[[], Made]

CALL = "call"
"""The class of an operator that has next to nothing to compute."""

VOCABULARY = 4096
_HEADS = 4, 32
"""Of attention: how many, and their width."""


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
    make: Make

    def seconds(self, for_s: float) -> tuple[float, float]:
        """Medians of the seconds of its forward and of its backward, repeated for so many seconds."""
        (call, inputs), now = self.make(), operation_clock()
        rows = [_timed(call, inputs, now)]
        until_s = time.perf_counter() + for_s
        while time.perf_counter() < until_s:
            rows.append(_timed(call, inputs, now))
        forward, backward = zip(*rows[len(rows) > 1 :], strict=True)
        return statistics.median(forward), statistics.median(backward)


def _timed(
    call: Callable[[], torch.Tensor | None], inputs: tuple[torch.Tensor, ...], now: Callable[[], float]
) -> tuple[float, float]:
    start_s = now()
    result = call()
    forward_s = now() - start_s
    if result is None:
        return forward_s, 0.0
    gradient = torch.ones_like(result)
    start_s = now()
    torch.autograd.grad(result, inputs, gradient)
    return forward_s, now() - start_s


def operators(effort: Effort) -> tuple[Operator, ...]:
    """All that are measured."""
    widths = [width for width in (32, 128, 512, 1024) if width <= effort.width]
    wide = widths[-1]
    square = [(width, width, width) for width in widths]
    products = [*square, (wide // 4, wide // 8, wide), (wide, wide, wide // 8), (wide // 8, wide, wide // 4)]
    thin = [(rows, width, width) for rows in (1, 4) for width in widths] + [(wide, wide, 4)]
    lengths = [length for length in (32, 128, 512) if length <= effort.width]
    by_bytes: list[tuple[str, Callable[[int], Make]]] = [
        ("elementwise", lambda n: _of(torch.relu, _rows(n // 2))),
        ("elementwise", lambda n: _of(torch.mul, _rows(n // 3), _rows(n // 3))),
        ("transcendental", lambda n: _of(functional.gelu, _rows(n // 2))),
        ("normalization", lambda n: _of(lambda x: functional.layer_norm(x, x.shape[-1:]), _rows(n // 2))),
        ("softmax", lambda n: _of(lambda x: torch.softmax(x, -1), _rows(n // 2))),
        ("embedding", lambda n: _of(partial(functional.embedding, _indices(n // 2)), (VOCABULARY, _rows(n // 2)[1]))),
        ("adamw", lambda n: _updated(torch.optim.AdamW, n)),
        ("sgd", lambda n: _updated(partial(torch.optim.SGD, lr=0.1), n)),
    ]
    return (
        *(Operator("matmul", "FLOPs", 2 * m * k * n, _of(functional.linear, (m, k), (n, k))) for m, k, n in products),
        *(Operator("matmul-thin", "FLOPs", 2 * m * k * n, _of(functional.linear, (m, k), (n, k))) for m, k, n in thin),
        *(Operator("attention", "FLOPs", 4 * math.prod(_HEADS) * n * n, _attended(n)) for n in lengths),
        *(Operator(kind, "bytes", n, make(n)) for kind, make in by_bytes for n in effort.num_bytes),
        Operator(CALL, "bytes", 64, _of(torch.relu, _rows(32))),
    )


def _leaf(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.5, requires_grad=True)


def _rows(num_bytes: int) -> tuple[int, int]:
    """A shape of so many bytes."""
    count = max(1, num_bytes // 4)
    return max(1, count // 256), min(count, 256)


def _indices(num_bytes: int) -> torch.Tensor:
    """Scattered rows of a table, which are so many bytes."""
    return torch.arange(_rows(num_bytes)[0]) * 2_654_435_761 % VOCABULARY


def _of(function: Callable[..., torch.Tensor], *shapes: Sequence[int]) -> Make:
    """A function of tensors of these shapes."""

    def make() -> Made:
        own = tuple([_leaf(*shape) for shape in shapes])
        return partial(function, *own), own

    return make


def _attended(length: int) -> Make:
    attention: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention
    heads, width = _HEADS
    return _of(partial(attention, is_causal=True), *[(1, heads, length, width)] * 3)


def _updated(optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer], num_bytes: int) -> Make:
    def make() -> Made:
        own = _leaf(max(1, num_bytes // 4))
        own.grad = torch.ones_like(own)
        step = optimizer([own]).step
        return lambda: step(), ()

    return make


def _many(count: int, call: Callable[[], object]) -> Callable[[], int]:
    def instruction() -> int:
        for _ in range(count):
            call()
        return count

    return instruction


def _products(effort: Effort) -> Callable[[], int]:
    own = torch.ones(effort.width // 2, effort.width // 2)
    return _many(2, lambda: own @ own)


def _elementwise(effort: Effort) -> Callable[[], int]:
    own = torch.ones(effort.num_bytes[-1] // 4)
    result = torch.empty_like(own)
    return _many(2, lambda: torch.add(own, own, out=result))


def _small(effort: Effort) -> Callable[[], int]:
    own = torch.ones(16)
    return _many(500, lambda: own + own)


BURSTS: Mapping[str, Callable[[Effort], Callable[[], int]]] = {
    "matmul": _products,
    "elementwise": _elementwise,
    "small": _small,
}
"""By class, what makes an instruction of several operators, which returns how many they are."""
