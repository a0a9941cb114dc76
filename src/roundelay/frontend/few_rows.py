"""The first rows of the sample micro-batch, on which capture computes what needs values.

Which buffers are written, which values share memory, and what the loss reads are the same on two rows as on thousands.
So capture computes on few rows, and on more, up to the whole sample, only where these do not do: the exported graph
does not hold for them, an operation or the loss fails, or a size that is 0 or 1 on them is not on the whole sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundelay.frontend.batch import Batch, copy_batch, in_step, num_rows, rows_between
from roundelay.frontend.export.export import Exported
from roundelay.frontend.export.export_adapter import CallShape
from roundelay.frontend.model_call import call_inputs
from roundelay.frontend.side_channels import SampleCall
from roundelay.reach.reachable_state import DEFAULT_GENERATORS, ReachableState

LEAST, GROWTH = 2, 4
"""The fewest rows (a size of one is special to many operations), and how many times as many come next."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Some first rows of the sample.

    Args:
        batch: these rows.
        tensors: of the model's call on them.
        count: how many they are.
        whole: whether they are the sample.
    """

    batch: Batch
    tensors: list[torch.Tensor]
    count: int
    whole: bool = False


def row_steps(batch: Batch, call: SampleCall, exported: Exported, whole: Rows) -> Iterator[Rows]:
    """Few rows, then more, at last the sample; only those on which the model is called as on the sample.

    Args:
        batch: the sample before ``inputs`` was called on it.
        call: the model's call on the sample.
        exported: the model; sizes for which it does not hold are left out.
        whole: the sample.
    """
    count = LEAST
    while in_step(batch) and GROWTH * count <= 2 * whole.count:
        few = _called(rows_between(batch, 0, count), call)
        if few is not None and _holds(exported, few.tensors):
            yield few
        count *= GROWTH
    yield whole


def _called(batch: Batch, call: SampleCall) -> Rows | None:
    """The model's call on some rows, and these as ``inputs`` leaves them; None if it is another call."""
    roots = [("inputs", call.inputs)] if call.kept else []
    state = ReachableState([*roots, *DEFAULT_GENERATORS], torch.nn.Module() if call.kept else None)
    copied = copy_batch(batch)
    try:
        tensors, shape = CallShape.flatten(*call_inputs(call.inputs, copied))
    except Exception:  # raised by user code
        return None
    finally:
        state.restore()
    same = shape.spec == call.shape.spec and len(tensors) == len(call.tensors) and not shape.differing(call.shape)
    return Rows(copied, tensors, num_rows(batch)) if same else None


def _holds(exported: Exported, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether the exported graph is right for tensors of these sizes."""
    for tensor, sizes in zip(tensors, exported.sizes, strict=True):
        fixed = [(size, now) for size, now in zip(sizes, tensor.shape, strict=False) if size is not None]
        if tensor.ndim != len(sizes) or any(size != now for size, now in fixed):
            return False
    try:
        exported.guard(tensors)
    except AssertionError:
        return False
    return True


def sizes_of(node: torch.fx.Node) -> list[list[int]] | None:
    """The sizes of a node's tensors on the sample, as export has seen them; None if it has not."""
    value: Any = node.meta.get("val")
    parts: list[Any] = list(value) if isinstance(value, (tuple, list)) else [value]
    if not all(map(torch.is_tensor, parts)):
        return None
    sizes = [[_hint(size) for size in part.shape] for part in parts]
    return None if any(None in part for part in sizes) else sizes  # type: ignore[return-value]


def _hint(size: int | torch.SymInt) -> int | None:
    """A size on the sample; None if it depends on values."""
    hint: Any = size if isinstance(size, int) else size.node.hint
    return hint if isinstance(hint, int) else None


def same_small_sizes(exported: Exported, sizes: Mapping[str, Sequence[Sequence[int]] | None]) -> bool:
    """Whether sizes of 0 and 1, for which operations may return views instead of copies, are where the sample has them.

    Args:
        exported: the model.
        sizes: of the tensors of its nodes by name, on a few rows; None where a node is no tensor.
    """
    for node in exported.module.graph.nodes:
        few, sample = sizes.get(node.name), sizes_of(node)
        if few is None:
            continue
        if sample is None and any(size < LEAST for part in few for size in part):  # it depends on values
            return False
        if sample is not None and _small(few) != _small(sample):
            return False
    return True


def _small(sizes: Sequence[Sequence[int]]) -> list[list[int]]:
    """The sizes with one number in place of all that are at least :data:`LEAST`."""
    return [[min(size, LEAST) for size in part] for part in sizes]
