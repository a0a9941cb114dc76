"""Detect modules that a model checkpoints itself, with ``torch.utils.checkpoint`` and ``use_reentrant=False``.

``torch.export`` traces the checkpointed function and drops the checkpointing. So the module of each such function is
recorded during export; a plan can checkpoint the same modules with ``recompute``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.utils.checkpoint

_INNER = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
"""torch's functions behind every checkpoint with ``use_reentrant=False``, the first since 2.14, the other before; the
first argument is the user's function."""


@contextmanager
def recording_checkpoints(model: torch.nn.Module) -> Iterator[list[str]]:
    """Record the paths of modules of ``model`` that are checkpointed within the block, in order of their first calls.

    Functions that do not belong to a module (a lambda, say) are ignored.
    """
    paths = {module: path for path, module in model.named_modules()}
    recorded: list[str] = []
    inner = next((name for name in _INNER if hasattr(torch.utils.checkpoint, name)), None)
    original: Any = inner and getattr(torch.utils.checkpoint, inner)

    def recording(function: Any, *args: Any, **kwargs: Any) -> Any:
        module = _module_of(function)
        path = "" if module is None else paths.get(module, "")
        if path and path not in recorded:
            recorded.append(path)
        return original(function, *args, **kwargs)

    if inner is None:
        yield recorded
        return
    with mock.patch.object(torch.utils.checkpoint, inner, recording):
        yield recorded


def _module_of(function: Any) -> torch.nn.Module | None:
    """The module that a function is, is bound to, or has bound as its first argument."""
    if isinstance(function, torch.nn.Module):
        return function
    first: Any = getattr(function, "__self__", None)
    if isinstance(function, functools.partial):
        first = function.args[0] if function.args else None
        if not isinstance(first, torch.nn.Module):
            return _module_of(function.func)
    return first if isinstance(first, torch.nn.Module) else None
