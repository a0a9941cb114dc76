"""Examine into how many micro-batches the first batches may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from roundelay.frontend import Captured
from roundelay.frontend.batch import Batch, in_step, part_rows
from roundelay.frontend.loss_metrics import no_count
from roundelay.planner.source import Divisibility
from roundelay.planning.batch_divisibility import batch_divisibility, counts_add_up
from roundelay.planning.torch_scope import in_child, user_code

_EXAMINING = "looking at the loss of the first batches and of their parts"


EXAMINED_BATCHES = 4
"""The number of first batches that are examined, at most."""


def examined(captured: Captured, batches: Sequence[Batch], parts: int) -> Divisibility:
    """Whether the first batches may be cut into so many parts; in a process of its own.

    Raises:
        UserCodeError: the model or its loss fails on the first batch.
    """
    with user_code(_EXAMINING):
        found = in_child(lambda: batch_divisibility(captured, batches, parts), _EXAMINING, result=Divisibility)
    return replace(found, run=_parts_of(captured, batches[0], parts))


def _parts_of(captured: Captured, batch: Batch, parts: int) -> int:
    """Into how many parts a batch is cut that is to be cut into so many."""
    return len(part_rows(batch, parts, captured.graph.min_rows)) if in_step(batch) else 1


def check_counts(captured: Captured, batch: Batch) -> None:
    """Check that a loss that returns (sum, count) counts the terms of the sum.

    Raises:
        JobError: the parts' counts do not add up to that of the whole first batch.
    """
    if not captured.graph.loss_counts:
        return
    counts = counts_add_up(captured, batch)
    if counts is not None and counts[0] != counts[1]:
        raise no_count(f"{counts[0]:.6g} for the first batch, and {counts[1]:.6g} for its two halves together")
