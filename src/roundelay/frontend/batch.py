"""Batches as the user's loader yields them: named tensor leaves, rows, and how they are cut into micro-batches."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from roundelay.errors import JobError
from roundelay.frontend.batch_objects import attributes_of, with_attributes

Batch = Any

SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
"""Tensor layouts that cannot be cut by rows."""


def leaves(batch: Batch) -> dict[str, torch.Tensor]:
    """Return a batch's tensors by path: ``x`` for ``batch["x"]``, ``0`` for ``batch[0]``, ``a.0`` when nested.

    Raises:
        JobError: the batch holds no tensor, or is of an unknown kind.
    """
    tensors: dict[str, torch.Tensor] = {}
    _collect(batch, "", tensors)
    if not tensors:
        raise JobError(
            "the batch",
            got=f"a {type(batch).__name__} without any tensor",
            expected="a mapping, tuple, list or object that holds tensors, batch dimension first",
            remedy="Let batches(epoch) yield dicts, tuples or objects of tensors, for example from a DataLoader.",
        )
    return tensors


def _collect(part: Any, path: str, tensors: dict[str, torch.Tensor]) -> None:
    if isinstance(part, torch.Tensor):
        tensors[path] = part
        return
    for key, value in _items(part):
        _collect(value, f"{path}.{key}" if path else str(key), tensors)


def _items(part: Any) -> Iterable[tuple[Any, Any]]:
    """What a container or an object holds, with the key, index or attribute of each."""
    if isinstance(part, Mapping):
        return part.items()
    if isinstance(part, (tuple, list)):
        return enumerate(part)
    return attributes_of(part).items()


def numbers(batch: Batch) -> dict[str, float]:
    """A batch's numbers by path, such as mixup's share; not those within containers without tensors."""
    found: dict[str, float] = {}
    replace(batch, lambda _, leaf: leaf, lambda path, leaf: _note_number(found, path, leaf), whole=without_tensors)
    return found


def _note_number(found: dict[str, float], path: str, leaf: Any) -> Any:
    if is_number(leaf):
        found[path] = leaf
    return leaf


_NUMBERS: tuple[type, ...] = (bool, int, float, np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.float16)
_NUMBERS += (np.float32, np.float64)
_EXACT = 2**53
"""Whole numbers up to this are sent as they are."""


def is_number(leaf: Any) -> bool:
    """Whether it is a number of Python's or NumPy's that :func:`as_tensor` sends without loss."""
    return type(leaf) in _NUMBERS and (isinstance(leaf, (float, np.floating)) or abs(int(leaf)) <= _EXACT)


def as_tensor(number: float) -> torch.Tensor:
    """A number as a complex one without dimensions, whose imaginary part says of which type it is."""
    return torch.tensor(complex(float(number), _NUMBERS.index(type(number))), dtype=torch.complex128)


def as_number(sent: torch.Tensor) -> Any:
    """The number that :func:`as_tensor` has sent."""
    value = complex(sent.item())
    return _NUMBERS[int(value.imag)](value.real)


def fields(batch: Batch) -> dict[str, torch.Tensor]:
    """All that a loss can read of a batch, by path: its tensors, and its numbers as :func:`as_tensor` gives them."""
    return leaves(batch) | {path: as_tensor(number) for path, number in numbers(batch).items()}


def replace(
    batch: Batch,
    make: Callable[[str, torch.Tensor], Any],
    other: Callable[[str, Any], Any] | None = None,
    path: str = "",
    *,
    whole: Callable[[Any], bool] = lambda part: False,
) -> Batch:
    """Return a batch of the same layout with every tensor replaced by ``make(path, tensor)``.

    Args:
        batch: a batch, or a part of one.
        make: replaces a tensor.
        other: replaces any other leaf; by default these stay.
        path: of the part.
        whole: whether a container within the batch counts as a leaf.
    """
    if isinstance(batch, torch.Tensor):
        return make(path, batch)
    if path and whole(batch):
        return batch if other is None else other(path, batch)
    if isinstance(batch, Mapping):
        named = {
            k: replace(value, make, other, f"{path}.{k}" if path else str(k), whole=whole) for k, value in batch.items()
        }
        if not isinstance(batch, MutableMapping) or type(batch) is dict:
            return named
        replaced = copy.copy(batch)  # keeps the attributes of its class, such as batch.labels
        replaced.update(named)
        return replaced
    if isinstance(batch, (tuple, list)):
        items = [
            replace(value, make, other, f"{path}.{i}" if path else str(i), whole=whole) for i, value in enumerate(batch)
        ]
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):
            return type(batch)(*items)
        return type(batch)(items)
    if own := attributes_of(batch):
        named = {
            k: replace(value, make, other, f"{path}.{k}" if path else str(k), whole=whole) for k, value in own.items()
        }
        return with_attributes(batch, named)
    return batch if other is None else other(path, batch)


def fresh(batch: Batch) -> Batch:
    """Return the same tensors in new containers, which ``inputs`` may change."""
    return replace(batch, lambda _, leaf: leaf)


def copy_batch(batch: Batch) -> Batch:
    """A batch with copies of all tensors and arrays; a tensor that occurs twice occurs twice in the copy."""
    copies: dict[int, torch.Tensor] = {}

    def clone(_: str, leaf: torch.Tensor) -> torch.Tensor:
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.clone()
        return copies[id(leaf)]

    return replace(batch, clone, lambda _, leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf)


def num_rows(batch: Batch) -> int:
    """The number of rows of a batch: the size of dimension 0 of its tensors, the largest if they differ.

    Raises:
        JobError: there is no row, or a tensor is sparse.
    """
    sizes = _sizes(batch)
    if not sizes or (len(set(sizes.values())) == 1 and 0 in sizes.values()):
        raise JobError(
            "the batch",
            got=f"tensors with these numbers of rows: {sizes or 'none'}",
            expected="tensors that have the batch dimension first, with at least one row",
            remedy="Leave empty batches out of what batches(epoch) yields, and give numbers as tensors with a row for "
            "each sample.",
        )
    return max(sizes.values())


def in_step(batch: Batch) -> bool:
    """Whether all tensors of a batch have the same number of rows, so that it can be cut by rows."""
    return len(set(_sizes(batch).values())) == 1


def _sizes(batch: Batch) -> dict[str, int]:
    """The size of dimension 0 of every tensor that has dimensions, by path."""
    tensors = leaves(batch)
    for path, leaf in tensors.items():
        if leaf.layout in SPARSE:
            raise JobError(
                f"batch field {path!r}",
                got=f"a tensor of layout {str(leaf.layout).removeprefix('torch.')}",
                expected="tensors that hold every value, which can be cut by rows and sent",
                remedy="Let batches(epoch) yield x.to_dense(), or its indices and values as tensors of their own.",
            )
    return {path: leaf.size(0) for path, leaf in tensors.items() if leaf.ndim}


def split(batch: Batch, num_micro_batches: int, min_rows: int = 1) -> list[Batch]:
    """Cut a batch into micro-batches whose numbers of rows differ by at most one, larger ones first.

    Lists, tuples and arrays without tensors that have an item per row, such as texts, are cut too. Everything else,
    zero-dimensional tensors included, goes into every micro-batch. A batch whose tensors have different numbers of rows
    is not cut.

    Args:
        batch: the batch.
        num_micro_batches: the number of micro-batches, at most.
        min_rows: the least number of rows of a micro-batch, unless the batch has fewer.

    Raises:
        JobError: it is to be cut, and its tensors have different numbers of rows.
    """
    rows = num_rows(batch)
    sizes = part_rows(batch, num_micro_batches, min_rows)
    if not in_step(batch):
        return [replace(batch, lambda _, leaf: leaf.contiguous())]
    starts = itertools.accumulate(sizes[:-1], initial=0)
    return [_rows(batch, start, size, rows) for start, size in zip(starts, sizes, strict=True)]


def part_rows(batch: Batch, num_micro_batches: int, min_rows: int = 1) -> list[int]:
    """The number of rows of each micro-batch that :func:`split` returns.

    Raises:
        JobError: as :func:`split`.
    """
    if num_micro_batches > 1 and not in_step(batch):
        raise JobError(
            "the batch",
            got=f"tensors with these numbers of rows, to be cut into {num_micro_batches} parts: {_sizes(batch)}",
            expected="tensors that all have the same number of rows, which can be cut by rows",
            remedy="Give --micro-batches 1: such a batch (nodes and edges of a graph, boxes of images) is trained "
            "whole. If rows are meant to be samples, put the batch dimension first in every tensor.",
        )
    return split_rows(num_rows(batch), num_micro_batches, min_rows)


def split_rows(rows: int, num_micro_batches: int, min_rows: int = 1) -> list[int]:
    """Distribute ``rows`` over micro-batches: fewer than requested if one had less than ``min_rows``."""
    count = max(1, min(num_micro_batches, rows // min_rows))
    return [rows // count + (i < rows % count) for i in range(count)]


def _rows(batch: Batch, start: int, size: int, rows: int) -> Batch:
    def of_tensor(_: str, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.narrow(0, start, size).contiguous() if leaf.ndim else leaf

    def of_other(_: str, leaf: Any) -> Any:
        return leaf[start : start + size] if in_rows(leaf, rows) else leaf

    return replace(batch, of_tensor, of_other, whole=lambda part: in_rows(part, rows))


def rows_between(batch: Batch, start: int, size: int) -> Batch:
    """Return ``size`` rows of a batch, from row ``start``."""
    return _rows(batch, start, size, num_rows(batch))


def twice(batch: Batch) -> Batch:
    """Return a batch of one row with that row repeated."""

    def of_other(_: str, leaf: Any) -> Any:
        if not in_rows(leaf, 1):
            return leaf
        return np.concatenate([leaf, leaf]) if isinstance(leaf, np.ndarray) else leaf + leaf

    def of_tensor(_: str, leaf: torch.Tensor) -> torch.Tensor:
        return torch.cat([leaf, leaf]) if leaf.ndim else leaf

    return replace(batch, of_tensor, of_other, whole=lambda part: in_rows(part, 1))


def in_rows(part: Any, rows: int) -> bool:
    """Whether a part of a batch without tensors has an item for every row."""
    if isinstance(part, np.ndarray):
        return part.ndim > 0 and len(part) == rows
    return type(part) in (list, tuple) and len(part) == rows and without_tensors(part)


def without_tensors(part: Any) -> bool:
    """Whether a part of a batch is a container without tensors at any depth."""
    if isinstance(part, Mapping):
        return all(map(_no_tensor, part.values()))
    return isinstance(part, (tuple, list)) and ({*map(type, part)} <= _PLAIN or all(map(_no_tensor, part)))


_PLAIN = {str, int, float, bool, bytes}


def _no_tensor(part: Any) -> bool:
    if isinstance(part, (Mapping, tuple, list)):
        return without_tensors(part)
    return not isinstance(part, torch.Tensor) and not attributes_of(part)


def layout(batch: Batch) -> Any:
    """Return a batch's structure as a loss may depend on it: keys, lengths of lists and tuples, and what is None.

    Tensors, other leaves and containers without tensors are represented by placeholders.
    """
    if isinstance(batch, torch.Tensor) or batch is None:
        return batch is None
    if without_tensors(batch):
        return ...
    if isinstance(batch, Mapping):
        return {str(key): layout(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return [layout(value) for value in batch]
    return {key: layout(value) for key, value in attributes_of(batch).items()} or ...
