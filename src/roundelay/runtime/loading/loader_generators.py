"""Seed the generators that DataLoaders and their samplers hold, so that an epoch's order depends on its number alone.

A generator that a loader keeps over the epochs would otherwise be newly made where a run is continued.
"""

from __future__ import annotations

from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.utils.data import DataLoader

from roundelay.reach.installed_code import is_installed


def seed_reachable(batches: Any, seed: int) -> None:
    """Seed those of the DataLoaders that a job's ``batches`` names, which may iterate them itself."""
    for loader in loaders_of(batches):
        seed_own_generators(loader, seed)


_DEPTH = 4


def loaders_of(function: Any, depth: int = _DEPTH) -> list[DataLoader[Any]]:
    """The DataLoaders that a function names: in its closure, its globals, its object, and functions that it names."""
    if isinstance(function, DataLoader):
        return [function]
    if not depth:
        return []
    held: list[Any] = []
    if isinstance(function, MethodType):
        held = [function.__func__, *vars(function.__self__).values()] if hasattr(function.__self__, "__dict__") else []
    elif isinstance(function, FunctionType) and not is_installed(function):
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        named = [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
        held = [*cells, *named]
    elif isinstance(function, partial):
        held = [function.func, *function.args, *function.keywords.values()]
    elif isinstance(function, (list, tuple, dict)) and len(function) <= _FEW:
        held = list(function.values() if isinstance(function, dict) else function)
    elif callable(function) and hasattr(function, "__dict__") and not isinstance(function, type):
        held = [type(function).__call__, *vars(function).values()]
    return [loader for value in held for loader in loaders_of(value, depth - 1)]


_FEW = 100


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {*code.co_names}.union(*map(_names, inner))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def seed_own_generators(source: Any, seed: int) -> None:
    """Seed the generators held by a DataLoader and its samplers like the process-wide ones."""
    batch_sampler = getattr(source, "batch_sampler", None)
    holders = (source, getattr(source, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    for holder in holders:
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed & (2**63 - 1))
