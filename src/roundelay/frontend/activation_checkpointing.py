"""Modules that a model checkpoints by itself, by ``torch.utils.checkpoint`` with ``use_reentrant=False``.

``torch.export`` follows the function that is checkpointed and leaves the checkpointing behind. So it is noted while the
model is exported whose module's function that was; a plan can say the same with ``recompute``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint

_INNER = "_checkpoint_without_reentrant_generator"
"""What torch calls for every checkpoint with ``use_reentrant=False``: the function is its first argument."""


@contextmanager
def noting_checkpoints(model: torch.nn.Module) -> Iterator[list[str]]:
    """Note which modules of ``model`` are checkpointed in this block, by path, each once, in order of their calls.

    A function that is no module's own (a lambda, say) is not known to belong to one, and is not among them.
    """
    paths = {module: path for path, module in model.named_modules()}
    found: list[str] = []
    torch_s_own: Any = getattr(torch.utils.checkpoint, _INNER, None)

    def noting(function: Any, *args: Any, **kwargs: Any) -> Any:
        module = _module_of(function)
        path = "" if module is None else paths.get(module, "")
        if path and path not in found:
            found.append(path)
        return torch_s_own(function, *args, **kwargs)

    if torch_s_own is None:
        yield found
        return
    setattr(torch.utils.checkpoint, _INNER, noting)
    try:
        yield found
    finally:
        setattr(torch.utils.checkpoint, _INNER, torch_s_own)


def _module_of(function: Any) -> torch.nn.Module | None:
    """The module that a function is, is bound to, or gets as its first argument."""
    if isinstance(function, torch.nn.Module):
        return function
    first: Any = getattr(function, "__self__", None)
    if isinstance(function, functools.partial):
        first = function.args[0] if function.args else None
        if not isinstance(first, torch.nn.Module):
            return _module_of(function.func)
    return first if isinstance(first, torch.nn.Module) else None
