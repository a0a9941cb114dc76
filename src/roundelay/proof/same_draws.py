"""Makes every random operation draw the same numbers, so that programs that draw in other ways can be compared.

Two programs that compute the same may draw otherwise: one draws numbers that nothing reads, or a GPU has several
kernels of attention and of dropout, each with an order of its own, and chooses among them by what a captured graph has
made explicit. Then both sides draw every operation's numbers from one seed, and plain PyTorch's dropout and attention
are written out as a run computes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from roundelay.frontend.stages.keyed_rng import RngKey, default_generators, keyed_attention, keyed_dropout

SEED = 20_260_101

KEY = RngKey(0, 0, constant=SEED)
"""A key under which every operation draws from :data:`SEED`."""


@contextmanager
def same_draws(*, written_out: bool) -> Iterator[None]:
    """A context in which torch's random operations draw from one seed.

    Args:
        written_out: dropout and attention are computed as a run computes them under :data:`KEY`.
    """
    with _Reseeding():
        if not written_out:
            yield
            return
        with _WrittenOut():
            yield


@final
class _Reseeding(TorchDispatchMode):
    """Reseeds torch's default generators before every operation that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            for generator in default_generators():
                generator.manual_seed(SEED)
        return func(*args, **(kwargs or {}))


@final
class _WrittenOut(TorchFunctionMode):
    """Computes dropout, and attention with dropout, as the stages of a run do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            return _dropout(*given.args)
        if func is torch.dropout:
            return _dropout(*args, **kwargs)
        if func is torch.dropout_:
            return args[0].copy_(_dropout(*args, **kwargs))
        if func is functional.scaled_dot_product_attention and _draws(*args, **kwargs):
            return keyed_attention(*args, **kwargs, draw=KEY, position=0)
        return func(*args, **kwargs)


def _dropout(input: torch.Tensor, p: float, train: bool, inplace: bool = False) -> torch.Tensor:
    result = keyed_dropout(input, p, train, draw=KEY, position=0)
    return input.copy_(result) if inplace and result is not input else result


def _draws(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any) -> bool:
    return dropout_p > 0.0
