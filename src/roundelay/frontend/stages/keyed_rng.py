"""Random numbers that depend only on the seed, the operation and the micro-batch.

PyTorch has one default CPU generator per process, and dropout accepts no other: with several threads, or when a forward
is run again, its numbers would depend on timing. Here every random operation of the graph draws from a generator seeded
by (seed, position of the operation in the whole graph, micro-batch), so its numbers are the same for any number of
stages, order of execution and number of repetitions.

Dropout and attention's dropout are reimplemented on a generator of their own; dropout's numbers equal
``aten.dropout``'s for the same generator state. Any other random operator runs on the process-wide generator, seeded
and restored under :data:`DEFAULT_GENERATOR_LOCK`, which is also held while the user's data loader runs.

A :class:`RngKey` with ``states`` draws as plain PyTorch does: the captured operations on torch's default generator, one
after the other. It must give the same bits as a plain forward with the same seed.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from roundelay.errors import DeadlineError

LONGEST_HELD_S = 3600.0
"""Seconds to wait for torch's default generator: longer than any live loader or evaluation holds it."""


@final
class GeneratorLock:
    """A re-entrant lock with a deadline.

    Args:
        what: what it guards, for error messages.
    """

    def __init__(self, what: str = "torch's default generator") -> None:
        self._what = what
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """Release the lock in a forked child if a thread held it that does not exist there."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
        else:
            self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=LONGEST_HELD_S):
            raise DeadlineError(
                self._what,
                got=f"another thread has kept it for {LONGEST_HELD_S:g} s: the data loader, capture or `evaluate`",
                expected="it to return",
                remedy="Find out why it hangs.",
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


DEFAULT_GENERATOR_LOCK = GeneratorLock()


_MASK = (1 << 64) - 1
_GENERATORS = ("cuda",)
"""Device types with generators of their own; the meta device, which draws nothing, gets the CPU's."""


def _mix(x: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit integers that scatters neighbouring inputs."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def default_generators() -> list[torch.Generator]:
    """Torch's default generators that code of this thread may draw from: the CPU's, and the current GPU's if in use."""
    own = torch.cuda.is_initialized()  # not in a process forked from one that uses CUDA, as it cannot
    return [torch.default_generator, *([torch.cuda.default_generators[torch.cuda.current_device()]] if own else [])]


def set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    """Set the state of each generator."""
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


@dataclass(frozen=True, slots=True)
class RngKey:
    """Key of the random numbers of one micro-batch.

    Args:
        seed: the run's seed.
        g: global number of the micro-batch.
        states: None where numbers are keyed. Otherwise operations draw from torch's default generators, as plain
            PyTorch does, and this holds their states before each, by position: a forward that is run again draws the
            same numbers.
        constant: seed of every operation's numbers; None for a seed of its own.
    """

    seed: int
    g: int
    states: dict[int, list[torch.Tensor]] | None = field(default=None, repr=False, compare=False)
    constant: int | None = None

    @staticmethod
    def plain(seed: int, g: int) -> RngKey:
        """A key whose numbers come from torch's default generator, in the order of the calls."""
        return RngKey(seed, g, {})

    def unkeyed(self, position: int, call: Callable[[], Any]) -> Any:
        """Call a random operation on torch's default generator; a repeated call starts from the first one's state."""
        assert self.states is not None
        generators = default_generators()
        before = [generator.get_state() for generator in generators]
        if position not in self.states:
            self.states[position] = before
            return call()
        set_states(generators, self.states[position])
        try:
            return call()
        finally:
            set_states(generators, before)

    def key(self, position: int) -> int:
        """Seed of the random operation at ``position``: 63 bits."""
        if self.constant is not None:
            return self.constant
        return _mix(_mix(_mix(self.seed & _MASK) ^ position) ^ self.g) >> 1

    def generator(self, position: int, device: torch.device) -> torch.Generator:
        """A new generator for the random operation at ``position``; each device type has its own numbers."""
        generator = torch.Generator(device) if device.type in _GENERATORS else torch.Generator()
        return generator.manual_seed(self.key(position))

    def tensor(self) -> torch.Tensor:
        """Seed and g as two int64, an input of compiled code; the inverse of :meth:`of`."""
        seed = self.seed & _MASK
        return torch.tensor([seed - (1 << 64) if seed >> 63 else seed, self.g])

    @staticmethod
    def of(numbers: torch.Tensor) -> RngKey:
        """The key that :meth:`tensor` wrote: same ``key`` and ``generator``."""
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
    """``aten.dropout`` with the mask of a contiguous ``x`` drawn under the key; same shape as ``x``.

    The mask is drawn in index order whatever the strides of ``x``, which is made contiguous at a cut. In compiled code
    the key is a tensor (:meth:`RngKey.tensor`); the mask is the same.
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

    The options are ``scale``, ``enable_gqa``, the key: ``draw``, ``position``, and ``dropout``, a function in place of
    :func:`keyed_dropout`. A fully masked row is zero, as in torch.
    """
    draw, position, dropout = options.pop("draw"), options.pop("position"), options.pop("dropout", keyed_dropout)
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
    return torch.matmul(dropout(weights, dropout_p, True, draw=draw, position=position), value)


def keyed_call(
    operator: Callable[..., Any],
    *args: Any,
    draw: RngKey,
    position: int,
    on: torch.device | None = None,
    **kwargs: Any,
) -> Any:
    """Any other random operator, on the process-wide generator, seeded by the key and restored afterwards.

    An operator that draws in memory order gets contiguous tensors, as it would after a cut, unless it writes into them.
    ``on`` is the stage's device if it is not the CPU; its default generator is seeded and restored as well.
    """
    if draw.states is not None:
        return draw.unkeyed(position, functools.partial(operator, *args, **kwargs))
    if isinstance(operator, torch._ops.OpOverload) and not operator._schema.is_mutable:
        args = tuple(arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args)
    generators = [torch.default_generator]
    if on is not None and on.type in _GENERATORS:  # read when a kernel is launched: the lock covers no more than that
        generators.append(torch.cuda.default_generators[on.index or 0])
    with DEFAULT_GENERATOR_LOCK:
        before = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(draw.key(position))
            return operator(*args, **kwargs)
        finally:
            set_states(generators, before)
