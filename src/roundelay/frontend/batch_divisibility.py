"""Whether a batch may be cut into micro-batches: do the losses of its parts make the whole batch's loss?

===============  ==================================================================================================
``mean``         whole = mean of the parts, weighed by rows or counts, up to rounding: any number of parts trains alike
``statistics``   the same, but for BatchNorm, which takes its statistics over each part
``other``        another loss: a sum over the batch, one that compares rows with one another
``counts``       a forward that changes a buffer at every call, and would at every part
``whole``        a batch that cannot be cut, or of which a part cannot be computed alone
===============  ==================================================================================================

It is seen, not guessed: the captured graph runs forward on a few rows of the first batches and on all of the first,
and on their parts (:mod:`roundelay.frontend.micro_batch_forwards`). Beside the losses their gradients for what the loss
reads are compared: the losses of an untrained model differ too little from row to row. Where the model returns its own
loss, those of its parameters are, on a few rows. What comes to differ later (labels that are missing in further
batches, a term that is 0 at first) shows in the batches behind the first, and with other weights. Of a large model the
clock ends it early.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from roundelay.errors import RoundelayError
from roundelay.frontend.batch import Batch, in_step, num_rows, part_rows, rows_between
from roundelay.frontend.capture import Captured
from roundelay.frontend.micro_batch_forwards import MicroBatchForwards, Seen

Kind = Literal["mean", "statistics", "other", "counts", "whole"]

LOOK_S = 2.0
"""Seconds behind which no look is begun."""

LOSS_GAP, GRADIENT_GAP = 2e-5, 2e-3
"""Differences of losses and of gradients, relative to their size, up to which they count as rounding."""

COARSE = 1000.0, 25.0
"""How many times more that is where 16-bit numbers are computed with."""


@dataclass(frozen=True, slots=True)
class Divisibility:
    """What was seen of a batch and its parts.

    Args:
        kind: see the module's docstring.
        why: in words, where it is ``other``, ``counts`` or ``whole``.
    """

    kind: Kind
    why: str = ""


def batch_divisibility(captured: Captured, batches: Sequence[Batch], micro_batches: int) -> Divisibility:
    """The class of a job, as its first batches show it; changes nothing.

    Args:
        captured: the model.
        batches: the first ones, whole; no further look is taken behind :data:`LOOK_S`.
        micro_batches: into how many one is to be cut; at least 2.
    """
    batch = batches[0]
    if not in_step(batch):
        return Divisibility(
            "whole", "the tensors of the first batch have different numbers of rows, so it cannot be cut"
        )
    if counted := _counting(captured):
        return Divisibility(
            "counts", f"the forward changes buffer {counted!r} at every call, and would at every micro-batch"
        )
    rows, least = num_rows(batch), captured.graph.min_rows
    planned = part_rows(batch, micro_batches, least)
    if len(planned) == 1:
        return Divisibility("whole", f"the first batch, of {rows} row{'s' * (rows > 1)}, has no parts to be looked at")
    end = time.perf_counter() + LOOK_S
    normalised = False
    for look in _looks(captured, batches, micro_batches):
        found = _looked(look)
        normalised |= bool(look.runs.statistics)
        if found is not None:
            return found
        if time.perf_counter() > end:
            break
    return Divisibility("statistics" if normalised else "mean")


@dataclass(frozen=True, slots=True)
class _Look:
    """What is looked at.

    Args:
        runs: forwards of it.
        cuts: sizes of its parts, in one way or another.
        name: what it is called for people.
        sure: whether it is a batch as it is trained: a few rows may have no label, or be too few for a loss.
    """

    runs: MicroBatchForwards
    cuts: Sequence[Sequence[int]]
    name: str
    sure: bool


def _looks(captured: Captured, batches: Sequence[Batch], micro_batches: int) -> Iterator[_Look]:
    """What is looked at, in this order: of a large model a few rows first, and of further batches no more."""
    least, own = captured.graph.min_rows, _reads_scalars(captured)
    few = _first_rows(batches[0], 3 * least)
    seconds = 3 * num_rows(batches[0]) * (0.0 if few is None else _seconds_per_row(captured, few))
    large = seconds > LOOK_S

    def look(i: int, *, whole: bool, deep: bool = False, elsewhere: bool = False) -> Iterator[_Look]:
        batch = batches[i] if whole else _first_rows(batches[i], 3 * least)
        if batch is None or not in_step(batch) or len(planned := part_rows(batch, micro_batches, least)) == 1:
            return
        rows = num_rows(batch)
        cuts = (planned, _uneven(rows, len(planned), least)) if whole else ([least, rows - least],)
        name = f"batch {i}" if i else "the first batch"
        name = (name if whole else f"the first {rows} rows of {name}") + (", with other weights," * elsewhere)
        yield _Look(MicroBatchForwards(captured, batch, deep=deep, elsewhere=elsewhere), cuts, name, sure=whole)

    for i in (0, 1) if large and len(batches) > 1 else (0,) if large else ():
        yield from look(i, whole=False)
    yield from look(0, whole=True)
    if own:
        yield from look(0, whole=False, deep=True)
    for i in range(1, len(batches)):
        yield from look(i, whole=not large, deep=own and large)
    yield from look(0, whole=False, elsewhere=True)


def _seconds_per_row(captured: Captured, few: Batch) -> float:
    """Of a forward; 0 where it fails, which is met again."""
    began = time.perf_counter()
    try:
        MicroBatchForwards(captured, few, gradients=False).on(0, num_rows(few))
    except Exception:
        return 0.0
    return (time.perf_counter() - began) / num_rows(few)


def _first_rows(batch: Batch, rows: int) -> Batch | None:
    """The first rows of a batch that has more of them than a part may have; None of any other."""
    if not in_step(batch) or num_rows(batch) * 3 < 2 * rows:
        return None
    return rows_between(batch, 0, min(num_rows(batch), rows))


def _reads_scalars(captured: Captured) -> bool:
    """Whether the loss reads single numbers alone, as where the model returns its own loss."""
    return all(captured.graph.values[name].shape == () for name in captured.graph.outputs)


def _looked(look: _Look) -> Divisibility | None:
    """Why parts of such sizes do not make what the whole does; None if they do, or if a few rows do not tell."""
    runs, name = look.runs, look.name
    try:
        whole = runs.on(0, num_rows(runs.batch))
    except Exception:
        if look.sure:
            raise
        return None
    if whole.count is not None and math.isnan(whole.count):
        return Divisibility("other", f"the loss of {name} is no mean of a cross entropy, as it was on the first batch")
    if not math.isfinite(whole.loss) or (whole.count == 0.0 and not look.sure):
        return Divisibility("other", f"the loss of {name} is {whole.loss}") if look.sure else None
    for sizes in look.cuts:
        try:
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            parts = [runs.on(start, size) for start, size in zip(starts, sizes, strict=True)]
        except RoundelayError as error:
            why = f"cannot be computed alone ({error.subject}: {error.got})"
        except Exception as error:  # the person's loss, or an operation of the model
            why = f"fails alone ({type(error).__name__}: {error!s:.150})"
        else:
            if not look.sure and not all(math.isfinite(part.loss) for part in parts):
                return None
            if parts and (why := _differing(whole, parts, runs, coarse=_coarse(runs.captured))):
                return Divisibility("other", why.replace(_IT, name))
            continue
        return Divisibility("whole", f"a part of {name} {why}") if look.sure else None
    return None


def _counting(captured: Captured) -> str:
    """A buffer that a forward changes and that holds no statistics of a BatchNorm; empty if there is none."""
    norms = [module for module in captured.model.modules() if isinstance(module, _BatchNorm)]
    known = {id(buffer) for norm in norms for buffer in norm.buffers()}
    changed = [(n, b) for n, b in captured.buffers().items() if n in captured.mutated_buffers() and id(b) not in known]
    return changed[0][0] if changed else ""


def counts_add_up(captured: Captured, batch: Batch) -> tuple[float, float] | None:
    """The count that a loss of (sum, count) gives for the whole batch, and the sum of those of two parts.

    None where it cannot be known: no two parts can be cut, or one of them cannot be computed alone.
    """
    sizes = part_rows(batch, 2, captured.graph.min_rows) if in_step(batch) else [1]
    if len(sizes) == 1:
        return None
    runs = MicroBatchForwards(captured, batch, gradients=False)
    whole = runs.on(0, sum(sizes))
    try:
        parts = [runs.on(0, sizes[0]), runs.on(sizes[0], sizes[1])]
    except Exception:  # of a batch that is trained whole, nobody asks for parts
        return None
    return whole.count or 0.0, sum(part.count or 0.0 for part in parts)


def _uneven(rows: int, count: int, least: int) -> list[int]:
    """Sizes of about as many parts that are not all of one size, or none."""
    for number in (count - 1, count + 1, 3, 2):
        sizes = [rows // number + (i < rows % number) for i in range(number)] if number > 1 else [rows]
        if len(set(sizes)) > 1 and min(sizes) >= least:
            return sizes
    return []


def _coarse(captured: Captured) -> bool:
    """Whether anything is computed with 16-bit numbers."""
    dtypes = {value.dtype for value in captured.graph.values.values()}
    return bool(dtypes & {"float16", "bfloat16"})


_IT = "the rows"
"""What :func:`_differing` calls what was looked at."""


def _differing(whole: Seen, parts: Sequence[Seen], runs: MicroBatchForwards, *, coarse: bool) -> str:
    """In words how the parts' losses, or gradients, do not make the whole's; empty if they do."""
    counts = [part.count for part in parts if part.count is not None]
    total = sum(counts) if counts else float(whole.rows)
    if counts and not (total and whole.count):
        return f"the count of terms of {_IT} is 0"
    weights = [1.0 / total if part.count is not None else part.rows / total for part in parts]
    expected = whole.loss / whole.count if whole.count else whole.loss
    got = sum(weight * part.loss for weight, part in zip(weights, parts, strict=True))
    size = max(abs(expected), sum(weight * abs(part.loss) for weight, part in zip(weights, parts, strict=True)))
    noise = 4 * math.hypot(whole.spread, max(part.spread for part in parts)) + 0.02 * size if runs.draws else 0.0
    if not abs(got - expected) <= LOSS_GAP * (COARSE[0] if coarse else 1.0) * size + noise:
        return f"the loss of {_IT} is {expected:.6g}, and {got:.6g} by {len(parts)} parts"
    shares = [*weights, 1.0 / (whole.count or 1.0)]
    off = 0.0 if runs.draws else _gradients_off(whole, parts, shares, runs.layers)
    off /= 5.0 if runs.elsewhere else 1.0  # where they may be small differences of large numbers
    if not off <= GRADIENT_GAP * (COARSE[1] if coarse else 1.0):
        return f"the loss of {_IT} has another gradient by {len(parts)} parts ({100 * off:.2g} % off)"
    return ""


def _gradients_off(whole: Seen, parts: Sequence[Seen], weights: Sequence[float], layers: Sequence[str]) -> float:
    """The distance of the parts' gradients to the whole's, relative to the layer's; the last weight is the whole's.

    A layer whose gradients are next to nothing beside all is rounding: it counts as if they were more.
    """
    apart, size = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0)
    for i, (gradient, layer) in enumerate(zip(whole.gradients, layers, strict=False)):
        own = [part.gradients[i] for part in parts]
        if gradient is None or any(one is None for one in own):
            continue
        expected = gradient.double() * weights[-1]
        joined = _joined([one.double() * w for one, w in zip(own, weights, strict=False) if one is not None], expected)
        if joined is not None:
            apart[layer] += float((joined - expected).square().sum())
            size[layer] += float(expected.square().sum())
    floor = 1e-8 * sum(size.values())
    return max((math.sqrt(apart[layer] / max(size[layer], floor)) for layer in apart if apart[layer]), default=0.0)


def _joined(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> torch.Tensor | None:
    """Gradients of parts as one for the whole: row by row, or added up for what every part reads."""
    if all(part.shape == whole.shape for part in parts):
        return torch.stack(list(parts)).sum(0)
    if all(part.shape[1:] == whole.shape[1:] for part in parts) and sum(map(len, parts)) == len(whole):
        return torch.cat(list(parts))
    return None
