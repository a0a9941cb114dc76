"""Batches as the person's loader gives them: rows, micro-batches, and named tensor leaves."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from roundelay.errors import JobError

Batch = Any


def leaves(batch: Batch) -> dict[str, torch.Tensor]:
    """Tensor leaves of a batch by their path: ``x`` for ``batch["x"]``, ``0`` for ``batch[0]``, ``a.0`` when nested.

    Raises:
        JobError: the batch holds no tensor, or is of an unknown kind.
    """
    found: dict[str, torch.Tensor] = {}
    _collect(batch, "", found)
    if not found:
        raise JobError(
            "the batch",
            got=f"a {type(batch).__name__} without any tensor",
            expected="a mapping, tuple or list of tensors, batch dimension first",
            remedy="Let batches(epoch) yield dicts or tuples of tensors, for example from a DataLoader.",
        )
    return found


def _collect(part: Any, path: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(part, torch.Tensor):
        found[path] = part
    elif isinstance(part, Mapping):
        for key, value in part.items():
            _collect(value, f"{path}.{key}" if path else str(key), found)
    elif isinstance(part, (tuple, list)):
        for i, value in enumerate(part):
            _collect(value, f"{path}.{i}" if path else str(i), found)


def replace(
    batch: Batch,
    make: Callable[[str, torch.Tensor], Any],
    other: Callable[[str, Any], Any] | None = None,
    path: str = "",
) -> Batch:
    """A batch of the same layout with every tensor leaf replaced by ``make(path, leaf)``.

    Other leaves stay, or are replaced by ``other(path, leaf)``.
    """
    if isinstance(batch, torch.Tensor):
        return make(path, batch)
    if isinstance(batch, Mapping):
        named = {k: replace(value, make, other, f"{path}.{k}" if path else str(k)) for k, value in batch.items()}
        if not isinstance(batch, MutableMapping) or type(batch) is dict:
            return named
        made = copy.copy(batch)  # keeps what the kind can do, such as batch.labels
        made.update(named)
        return made
    if isinstance(batch, (tuple, list)):
        parts = [replace(value, make, other, f"{path}.{i}" if path else str(i)) for i, value in enumerate(batch)]
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*parts)
        return type(batch)(parts)
    return batch if other is None else other(path, batch)


def fresh(batch: Batch) -> Batch:
    """The same tensors in containers of their own: ``inputs`` may take things out of a batch, or put things in."""
    return replace(batch, lambda _, leaf: leaf)


def num_rows(batch: Batch) -> int:
    """Rows of a batch: the size of dimension 0, the same for every tensor that has dimensions.

    Raises:
        JobError: the tensors disagree, or there is no row.
    """
    sizes = {path: leaf.size(0) for path, leaf in leaves(batch).items() if leaf.ndim}
    if len(set(sizes.values())) != 1 or 0 in sizes.values():
        raise JobError(
            "the batch",
            got=f"tensors with these numbers of rows: {sizes or 'none'}",
            expected="tensors that all have the batch dimension first, with the same number of rows, at least one",
            remedy="Put the batch dimension first in every tensor that batches(epoch) yields.",
        )
    return next(iter(sizes.values()))


def split(batch: Batch, num_micro_batches: int) -> list[Batch]:
    """Cut a batch into min(num_micro_batches, rows) micro-batches whose rows differ by at most one, larger ones first.

    Tensors without dimensions go into every micro-batch.
    """
    sizes = split_rows(num_rows(batch), num_micro_batches)
    starts = itertools.accumulate(sizes[:-1], initial=0)
    return [_rows(batch, start, size) for start, size in zip(starts, sizes, strict=True)]


def split_rows(rows: int, num_micro_batches: int) -> list[int]:
    """Rows of each micro-batch of a batch of ``rows``."""
    count = min(num_micro_batches, rows)
    return [rows // count + (i < rows % count) for i in range(count)]


def _rows(batch: Batch, start: int, size: int) -> Batch:
    return replace(batch, lambda _, leaf: leaf.narrow(0, start, size).contiguous() if leaf.ndim else leaf)
