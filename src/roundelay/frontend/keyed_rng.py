"""Random numbers that depend on the micro-batch and the place in the model alone.

PyTorch's default CPU generator is one per process, and dropout takes no generator of its own: between threads, or in
a forward that runs a second time, its numbers would depend on timing. Here every random operation of the graph draws
from a generator seeded by (seed, position of the operation in the whole graph, micro-batch), so that the same numbers
come out whatever the number of stages, the order of execution, and however often a forward is repeated.

Dropout and attention's dropout are written out over an own generator; dropout's numbers equal ``aten.dropout``'s for
the same generator state. Any other random operator runs under the process-wide generator, seeded and put back under a
lock; :data:`DEFAULT_GENERATOR_LOCK` is also held while the person's data loader runs, so neither disturbs the other.

A :class:`RngKey` with ``states`` draws as plain PyTorch does instead: every operation is the one that was captured, on
torch's own generator, one after the other. Beside a plain forward under the same seed it must give the same bits.
"""

from __future__ import annotations

import functools
import math
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch

from roundelay.errors import DeadlineError

LONGEST_HELD_S = 3600.0
"""Seconds that torch's default generator is waited for: longer than any loader or evaluation that is alive keeps it."""


@final
class GeneratorLock:
    """A lock that one thread may take more than once, and that nobody waits for without end.

    Args:
        what: it guards, for people.
    """

    def __init__(self, what: str = "torch's default generator") -> None:
        self._what = what
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """Be free in a child if another thread than that which forked held it: it is not in the child."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=LONGEST_HELD_S):
            raise DeadlineError(
                self._what,
                got=f"another thread has kept it for {LONGEST_HELD_S:g} s: the data loader, or `evaluate`",
                expected="that each of them comes to an end",
                remedy="See why it hangs.",
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


DEFAULT_GENERATOR_LOCK = GeneratorLock()


def generator_states() -> tuple[bytes, ...]:
    """What torch's, numpy's and Python's own generators would draw next; others if something has drawn since."""
    _, key, position, *_ = np.random.get_state()
    return (
        torch.random.get_rng_state().numpy().tobytes(),
        np.asarray(key).tobytes() + str(position).encode(),
        repr(random.getstate()).encode(),
    )


_MASK = (1 << 64) - 1
_GENERATORS = ("cuda",)
"""Kinds of devices with generators of their own; the meta device draws nothing, and takes the CPU's."""


def _mix(x: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit integers that scatters neighbouring inputs."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@dataclass(frozen=True, slots=True)
class RngKey:
    """The key of one micro-batch's random numbers.

    Args:
        seed: the run's seed.
        g: global number of the micro-batch.
        states: None where numbers are keyed. Else operations draw from torch's own generator, as plain PyTorch does,
            and here is its state before each, by position: a forward that is run again draws the same numbers.
    """

    seed: int
    g: int
    states: dict[int, torch.Tensor] | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def plain(seed: int, g: int) -> RngKey:
        """A key whose numbers come from torch's own generator, in the order of the calls."""
        return RngKey(seed, g, {})

    def unkeyed(self, position: int, call: Callable[[], Any]) -> Any:
        """Call an operation that draws, on torch's own generator; the second time on the state of the first."""
        assert self.states is not None
        before = torch.random.get_rng_state()
        if position not in self.states:
            self.states[position] = before
            return call()
        torch.random.set_rng_state(self.states[position])
        try:
            return call()
        finally:
            torch.random.set_rng_state(before)

    def key(self, position: int) -> int:
        """Seed of the random operation at ``position``: 63 bits."""
        return _mix(_mix(_mix(self.seed & _MASK) ^ position) ^ self.g) >> 1

    def generator(self, position: int, device: torch.device) -> torch.Generator:
        """A fresh generator of ``device`` for the random operation at ``position``; each kind has its own numbers."""
        made = torch.Generator(device) if device.type in _GENERATORS else torch.Generator()
        return made.manual_seed(self.key(position))

    def tensor(self) -> torch.Tensor:
        """Seed and g as two int64, which compiled code takes as an input; :meth:`of` reads them."""
        seed = self.seed & _MASK
        return torch.tensor([seed - (1 << 64) if seed >> 63 else seed, self.g])

    @staticmethod
    def of(numbers: torch.Tensor) -> RngKey:
        """The key that :meth:`tensor` wrote; ``key`` and ``generator`` do not see the difference."""
        seed, g = numbers.tolist()
        return RngKey(seed, g)


@torch.library.custom_op("roundelay::keyed_noise", mutates_args=())
def keyed_noise(
    draw: torch.Tensor, position: int, keep: float, size: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Ones with probability ``keep``, zeros elsewhere, under the key in ``draw``: opaque to a compiler."""
    noise = torch.empty(size, dtype=dtype, device=device)
    return noise.bernoulli_(keep, generator=RngKey.of(draw).generator(position, device))


@keyed_noise.register_fake
def _(
    draw: torch.Tensor, position: int, keep: float, size: list[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


def keyed_dropout(
    x: torch.Tensor, p: float, train: bool, *, draw: RngKey | torch.Tensor, position: int
) -> torch.Tensor:
    """``aten.dropout`` of a contiguous ``x`` with the mask drawn under the key; same shape as ``x``.

    The mask is drawn in the order of the indices, however ``x`` lies in memory: at a cut it is made contiguous. The key
    is a tensor (:meth:`RngKey.tensor`) while the operation is compiled; the mask is the same one.
    """
    if isinstance(draw, RngKey) and draw.states is not None:
        plain: torch.Tensor = draw.unkeyed(position, lambda: torch.ops.aten.dropout.default(x, p, train))
        return plain
    if not train or p == 0.0 or x.numel() == 0:
        return x
    if isinstance(draw, RngKey):
        noise = torch.empty_like(x, memory_format=torch.contiguous_format)
        noise.bernoulli_(1.0 - p, generator=draw.generator(position, x.device))
    else:
        noise = keyed_noise(draw, position, 1.0 - p, list(x.shape), x.dtype, x.device)
    return x * (noise.div_(1.0 - p) if p < 1.0 else noise)


def keyed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """``aten.scaled_dot_product_attention`` with dropout, written out; (..., L, E) and (..., S, E) to (..., L, Ev).

    The options are ``scale``, ``enable_gqa`` and the key: ``draw``, ``position``. A row that may attend to nothing
    is zero, as torch has it.
    """
    draw, position = options.pop("draw"), options.pop("position")
    if isinstance(draw, RngKey) and draw.states is not None:
        whole = functools.partial(torch.ops.aten.scaled_dot_product_attention.default, query, key, value)
        plain: torch.Tensor = draw.unkeyed(position, lambda: whole(attn_mask, dropout_p, is_causal, **options))
        return plain
    scale = options.get("scale")
    root = math.sqrt(1.0 / math.sqrt(query.size(-1)) if scale is None else scale)
    if options.get("enable_gqa", False):
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    scores = torch.matmul(query * root, (key * root).transpose(-2, -1))
    if is_causal:
        allowed = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    return torch.matmul(keyed_dropout(weights, dropout_p, True, draw=draw, position=position), value)


def keyed_call(
    operator: Callable[..., Any],
    *args: Any,
    draw: RngKey,
    position: int,
    on: torch.device | None = None,
    **kwargs: Any,
) -> Any:
    """Any other random operator, under the process-wide generator seeded by the key and put back afterwards.

    One that draws in the order of memory gets contiguous tensors, as it would behind a cut; unless it writes into them.
    ``on`` is the stage's device if it is not the CPU; its process-wide generator is seeded and put back, too.
    """
    if draw.states is not None:
        return draw.unkeyed(position, functools.partial(operator, *args, **kwargs))
    if isinstance(operator, torch._ops.OpOverload) and not operator._schema.is_mutable:
        args = tuple(arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args)
    if on is not None and on.type in _GENERATORS:
        return _keyed_on(on, draw.key(position), functools.partial(operator, *args, **kwargs))
    with DEFAULT_GENERATOR_LOCK:
        before = torch.random.get_rng_state()
        try:
            torch.default_generator.manual_seed(draw.key(position))
            return operator(*args, **kwargs)
        finally:
            torch.random.set_rng_state(before)


def _keyed_on(device: torch.device, key: int, call: Callable[[], Any]) -> Any:
    """``call`` under the process-wide generators of the CPU and of a CUDA device.

    A CUDA generator is read when a kernel is launched, so that the lock need not last until it has run.
    """
    generators = (torch.default_generator, torch.cuda.default_generators[device.index or 0])
    with DEFAULT_GENERATOR_LOCK:
        before = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(key)
            return call()
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
