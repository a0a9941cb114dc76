"""Test whether a batch may be cut into micro-batches: is its loss the mean of its parts' losses?

===============  ==================================================================================================
``mean``         whole = mean of the parts, weighted by rows or counts, up to rounding: any number of parts trains alike
``statistics``   the same, except that BatchNorm takes its statistics over each part
``other``        another loss: a sum over the batch, or one that compares rows with one another
``counts``       a forward that changes a buffer at every call, and so would once per part
``whole``        a batch that cannot be cut, or a part of which cannot be computed alone
===============  ==================================================================================================

This is measured: the captured graph runs forward on a few rows of the first batches, on the whole first batch, and on
their parts (:mod:`roundelay.planning.micro_batch_forwards`). Losses are compared, and so are their gradients with
respect to what the loss reads, as the losses of an untrained model differ too little from row to row. If the model
returns its own loss, the gradients of its parameters are compared instead, on a few rows. Differences that arise later
(labels missing in further batches, a term that is 0 at first) show in the batches after the first, and with other
weights. A time limit ends this early for a large model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from roundelay.errors import RoundelayError
from roundelay.frontend.batch import Batch, in_step, num_rows, part_rows, rows_between, split_rows
from roundelay.frontend.capture import Captured
from roundelay.frontend.export.traced_checks import ignoring_checks
from roundelay.planner.source import Divisibility
from roundelay.planning.micro_batch_forwards import ForwardResult, MicroBatchForwards

LOOK_S = 2.0
"""Seconds after which no further comparison begins."""

LOSS_GAP, GRADIENT_GAP = 2e-5, 2e-3
"""Relative differences of losses and of gradients that count as rounding."""

COUNTED = 4
"""As many times the least rows of a micro-batch are enough to see that counts add up."""

COARSE = 1000.0, 25.0
"""Factors on these where 16-bit numbers are computed with."""


def batch_divisibility(captured: Captured, batches: Sequence[Batch], micro_batches: int) -> Divisibility:
    """Classify a job by its first batches; changes nothing.

    Args:
        captured: the model.
        batches: the first batches, whole; no further comparison begins after :data:`LOOK_S`.
        micro_batches: the number of parts of a batch; at least 2.
    """
    batch = batches[0]
    if not in_step(batch):
        return Divisibility(
            "whole", "the tensors of the first batch have different numbers of rows, so it cannot be cut"
        )
    if counted := _counter_buffer(captured):
        return Divisibility(
            "counts", f"the forward changes buffer {counted!r} at every call, and would at every micro-batch"
        )
    rows, min_rows = num_rows(batch), captured.graph.min_rows
    planned = part_rows(batch, micro_batches, min_rows)
    if len(planned) == 1:
        return Divisibility("whole", f"the first batch, of {rows} row{'s' * (rows > 1)}, has no parts to be looked at")
    end = time.perf_counter() + LOOK_S
    normalised = False
    for comparison in _comparisons(captured, batches, micro_batches):
        with ignoring_checks():
            result = _compare(comparison)
        normalised |= bool(comparison.runs.statistics)
        if result is not None:
            return result
        if time.perf_counter() > end:
            break
    return Divisibility("statistics" if normalised else "mean")


@dataclass(frozen=True, slots=True)
class _Comparison:
    """One comparison of a batch with its parts.

    Args:
        runs: the batch's forwards.
        cuts: for each way to cut it, the sizes of the parts.
        name: the batch's name in messages.
        sure: whether it is a batch as it is trained; a few rows may have no label, or be too few for the loss.
    """

    runs: MicroBatchForwards
    cuts: Sequence[Sequence[int]]
    name: str
    sure: bool


def _comparisons(captured: Captured, batches: Sequence[Batch], micro_batches: int) -> Iterator[_Comparison]:
    """Yield the comparisons in order: for a large model first on a few rows, and on no more rows of further batches."""
    min_rows, returns_loss = captured.graph.min_rows, _reads_scalars(captured)
    few = _first_rows(batches[0], 3 * min_rows)
    seconds = 3 * num_rows(batches[0]) * (0.0 if few is None else _seconds_per_row(captured, few))
    large = seconds > LOOK_S

    def comparison(i: int, *, whole: bool, deep: bool = False, elsewhere: bool = False) -> Iterator[_Comparison]:
        batch = batches[i] if whole else _first_rows(batches[i], 3 * min_rows)
        if batch is None or not in_step(batch) or len(planned := part_rows(batch, micro_batches, min_rows)) == 1:
            return
        rows = num_rows(batch)
        cuts = (planned, _uneven(rows, len(planned), min_rows)) if whole else ([min_rows, rows - min_rows],)
        name = f"batch {i}" if i else "the first batch"
        name = (name if whole else f"the first {rows} rows of {name}") + (", with other weights," * elsewhere)
        yield _Comparison(MicroBatchForwards(captured, batch, deep=deep, elsewhere=elsewhere), cuts, name, sure=whole)

    for i in (0, 1) if large and len(batches) > 1 else (0,) if large else ():
        yield from comparison(i, whole=False)
    yield from comparison(0, whole=True)
    if returns_loss:
        yield from comparison(0, whole=False, deep=True)
    for i in range(1, len(batches)):
        yield from comparison(i, whole=not large, deep=returns_loss and large)
    yield from comparison(0, whole=False, elsewhere=True)


def _seconds_per_row(captured: Captured, few: Batch) -> float:
    """Seconds of a forward per row; 0 where it fails, as it will again where failures are handled."""
    began = time.perf_counter()
    try:
        MicroBatchForwards(captured, few, gradients=False).on(0, num_rows(few))
    except Exception:
        return 0.0
    return (time.perf_counter() - began) / num_rows(few)


def _first_rows(batch: Batch, rows: int) -> Batch | None:
    """The first rows of a batch; None if it has too few to be cut."""
    if not in_step(batch) or num_rows(batch) * 3 < 2 * rows:
        return None
    return rows_between(batch, 0, min(num_rows(batch), rows))


def _reads_scalars(captured: Captured) -> bool:
    """Whether the loss reads only scalars, as where the model returns its own loss."""
    return all(captured.graph.values[name].shape == () for name in captured.graph.outputs)


def _compare(comparison: _Comparison) -> Divisibility | None:
    """Compare the whole with its parts; None if they agree, or if a few rows do not show whether they do."""
    runs, name = comparison.runs, comparison.name
    try:
        whole = runs.on(0, num_rows(runs.batch))
    except Exception:
        if comparison.sure:
            raise
        return None
    if whole.count is not None and math.isnan(whole.count):
        return Divisibility("other", f"the loss of {name} is no mean of a cross entropy, as it was on the first batch")
    if not math.isfinite(whole.loss) or (whole.count == 0.0 and not comparison.sure):
        return Divisibility("other", f"the loss of {name} is {whole.loss}") if comparison.sure else None
    for sizes in comparison.cuts:
        try:
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            parts = [runs.on(start, size) for start, size in zip(starts, sizes, strict=True)]
        except RoundelayError as error:
            why = f"cannot be computed alone ({error.subject}: {error.got})"
        except Exception as error:  # the person's loss, or an operation of the model
            why = f"fails alone ({type(error).__name__}: {error!s:.150})"
        else:
            if not comparison.sure and not all(math.isfinite(part.loss) for part in parts):
                return None
            if parts and (why := _differing(whole, parts, runs, name)):
                return Divisibility("other", why)
            continue
        return Divisibility("whole", f"a part of {name} {why}") if comparison.sure else None
    return None


def _counter_buffer(captured: Captured) -> str:
    """The name of a buffer that a forward changes and that belongs to no BatchNorm; empty if there is none."""
    norms = [module for module in captured.model.modules() if isinstance(module, _BatchNorm)]
    known = {id(buffer) for norm in norms for buffer in norm.buffers()}
    changed = [(n, b) for n, b in captured.buffers().items() if n in captured.mutated_buffers() and id(b) not in known]
    return changed[0][0] if changed else ""


def counts_add_up(captured: Captured, batch: Batch) -> tuple[float, float] | None:
    """For a loss that returns (sum, count), return the count of some rows and the sum of the counts of their halves.

    These are the first rows of the batch if the counts add up there, else all of them. None if they cannot be cut in
    two, or a part cannot be computed alone.
    """
    few = _first_rows(batch, COUNTED * captured.graph.min_rows)
    if few is not None and num_rows(few) < num_rows(batch):
        try:
            counts = _counts_of_halves(captured, few)
        except Exception:  # the whole batch decides
            counts = None
        if counts is not None and counts[0] == counts[1] != 0.0:
            return counts
    return _counts_of_halves(captured, batch)


def _counts_of_halves(captured: Captured, batch: Batch) -> tuple[float, float] | None:
    sizes = part_rows(batch, 2, captured.graph.min_rows) if in_step(batch) else [1]
    if len(sizes) == 1:
        return None
    runs = MicroBatchForwards(captured, batch, gradients=False)
    whole = runs.on(0, sum(sizes))
    try:
        parts = [runs.on(0, sizes[0]), runs.on(sizes[0], sizes[1])]
    except Exception:  # the batch may be trained whole
        return None
    return whole.count or 0.0, sum(part.count or 0.0 for part in parts)


def _uneven(rows: int, count: int, min_rows: int) -> list[int]:
    """Sizes of about ``count`` parts that are not all equal; empty if there are none."""
    for number in (count - 1, count + 1, 3, 2):
        sizes = split_rows(rows, number)
        if len(set(sizes)) > 1 and min(sizes) >= min_rows:
            return sizes
    return []


def _coarse(captured: Captured) -> bool:
    """Whether any value of the graph has a 16-bit dtype."""
    dtypes = {value.dtype for value in captured.graph.values.values()}
    return bool(dtypes & {"float16", "bfloat16"})


def _differing(whole: ForwardResult, parts: Sequence[ForwardResult], runs: MicroBatchForwards, name: str) -> str:
    """Describe how the losses or gradients of the parts of ``name`` differ from the whole's; empty if they agree."""
    coarse = _coarse(runs.captured)
    counts = [part.count for part in parts if part.count is not None]
    total = sum(counts) if counts else float(whole.rows)
    if counts and not (total and whole.count):
        return f"the count of terms of {name} is 0"
    weights = [1.0 / total if part.count is not None else part.rows / total for part in parts]
    expected = whole.loss / whole.count if whole.count else whole.loss
    got = sum(weight * part.loss for weight, part in zip(weights, parts, strict=True))
    size = max(abs(expected), sum(weight * abs(part.loss) for weight, part in zip(weights, parts, strict=True)))
    noise = 4 * math.hypot(whole.spread, max(part.spread for part in parts)) + 0.02 * size if runs.draws else 0.0
    if not abs(got - expected) <= LOSS_GAP * (COARSE[0] if coarse else 1.0) * size + noise:
        return f"the loss of {name} is {expected:.6g}, and {got:.6g} by {len(parts)} parts"
    shares = [*weights, 1.0 / (whole.count or 1.0)]
    off = 0.0 if runs.draws else _gradients_off(whole, parts, shares, runs.layers)
    off /= 5.0 if runs.elsewhere else 1.0  # where they may be small differences of large numbers
    if not off <= GRADIENT_GAP * (COARSE[1] if coarse else 1.0):
        return f"the loss of {name} has another gradient by {len(parts)} parts ({100 * off:.2g} % off)"
    return ""


def _gradients_off(
    whole: ForwardResult, parts: Sequence[ForwardResult], weights: Sequence[float], layers: Sequence[str]
) -> float:
    """The largest relative distance, over layers, of the parts' gradients from the whole's, whose weight is the last.

    The norm that divides has a floor: a layer whose gradients are tiny compared with all others is rounding.
    """
    distance, size = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0)
    for i, (gradient, layer) in enumerate(zip(whole.gradients, layers, strict=False)):
        of_parts = [part.gradients[i] for part in parts]
        if gradient is None or any(one is None for one in of_parts):
            continue
        given = [g for g in of_parts if g is not None]
        for part, expected in _pairs(given, weights, gradient):
            distance[layer] += float((part - expected).square().sum())
            size[layer] += float(expected.square().sum())
    floor = 1e-8 * sum(size.values())
    return max((math.sqrt(distance[name] / max(size[name], floor)) for name in distance if distance[name]), default=0.0)


def _pairs(
    parts: Sequence[torch.Tensor], weights: Sequence[float], whole: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What the parts' gradients give, and the whole's: by rows, or summed for what every part reads; one at a time."""
    if all(part.shape == whole.shape for part in parts):
        weighed = [part.double() * weight for part, weight in zip(parts, weights, strict=False)]
        yield torch.stack(weighed).sum(0), whole.double() * weights[-1]
    elif all(part.shape[1:] == whole.shape[1:] for part in parts) and sum(map(len, parts)) == len(whole):
        for part, weight, rows in zip(parts, weights, whole.split([len(part) for part in parts]), strict=False):
            yield part.double() * weight, rows.double() * weights[-1]
