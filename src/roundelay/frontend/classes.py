"""Whether a batch may be cut into micro-batches: do the losses of its parts make the whole batch's loss?

===============  ==================================================================================================
``mean``         whole = mean of the parts, weighed by rows or counts, up to rounding: any number of parts trains alike
``statistics``   the same, but for BatchNorm, which takes its statistics over each part
``other``        another loss: a sum over the batch, one that compares rows with one another; or a forward that counts
``whole``        a batch that cannot be cut, or of which a part cannot be computed alone
===============  ==================================================================================================

It is seen, not guessed: the captured graph runs forward on the whole first batch and on its parts, cut as planned and
once more unevenly. What would differ in innocent jobs is taken out first: dropout is off, other draws of the whole
batch are given to its parts row by row, BatchNorm normalises the parts by the whole batch's statistics. Parameters that
are constant (a head that begins as zeros gives every row the same loss) are moved a little. Beside the losses their
gradients for what the loss reads are compared: the losses of an untrained model differ too little from row to row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from roundelay.errors import RoundelayError
from roundelay.frontend.batch import Batch, in_step, num_rows, part_rows, rows_between
from roundelay.frontend.batch_norms import takes_statistics
from roundelay.frontend.captured import Captured
from roundelay.frontend.draws import Draw, keyed_attention, keyed_dropout
from roundelay.frontend.standins import cumulative_batch_norm

Kind = Literal["mean", "statistics", "other", "whole"]

LOSS_GAP, GRADIENT_GAP = 1e-4, 2e-3
"""Differences of losses and of gradients, relative to their size, up to which they count as rounding."""

COARSE = 200.0, 25.0
"""How many times more that is where 16-bit numbers are computed with."""

DRAWS = 16
"""Draws over which a loss that draws random numbers is averaged."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What was seen of a batch and its parts.

    Args:
        kind: see the module's docstring.
        why: in words, where it is ``other`` or ``whole``.
    """

    kind: Kind
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Seen:
    """One forward on some rows of the batch.

    Args:
        rows: how many.
        loss: the mean over them, or the sum; of a loss that draws, the mean over draws.
        count: of the sum's terms; None: the loss is a mean.
        spread: standard error of the loss.
        gradients: of the loss, for each tensor that it reads.
    """

    rows: int
    loss: float
    count: float | None
    spread: float
    gradients: tuple[torch.Tensor | None, ...]


def classify(captured: Captured, batch: Batch, micro_batches: int) -> Parts:
    """The class of a job, as its first batch shows it; computes gradients of the loss alone.

    Args:
        captured: the model.
        batch: the first batch, whole.
        micro_batches: into how many it is to be cut; at least 2.
    """
    if not in_step(batch):
        return Parts("whole", "the tensors of the first batch have different numbers of rows, so it cannot be cut")
    if counted := _counting(captured):
        return Parts("other", f"the forward changes buffer {counted!r} at every call, and would at every micro-batch")
    rows, least = num_rows(batch), captured.graph.min_rows
    planned = part_rows(batch, micro_batches, least)
    if len(planned) == 1:
        return Parts("whole", f"the first batch, of {rows} row{'s' * (rows > 1)}, has no parts to be looked at")
    runs = _Runs(captured, batch)
    whole = runs.on(0, rows)
    if not math.isfinite(whole.loss):
        return Parts("other", f"the first batch's loss is {whole.loss}")
    for sizes in (planned, _uneven(rows, len(planned), least)):
        try:
            starts = [sum(sizes[:i]) for i in range(len(sizes))]
            parts = [runs.on(start, size) for start, size in zip(starts, sizes, strict=True)]
        except RoundelayError as error:
            return Parts("whole", f"a part of the first batch cannot be computed alone ({error.subject}: {error.got})")
        except Exception as error:  # the person's loss, or an operation of the model
            return Parts("whole", f"a part of the first batch fails alone ({type(error).__name__}: {error!s:.150})")
        if parts and (why := _differing(whole, parts, coarse=_coarse(captured), draws=runs.draws)):
            return Parts("other", why)
    return Parts("statistics" if runs.statistics else "mean")


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
    runs = _Runs(captured, batch, gradients=False)
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


def _differing(whole: _Seen, parts: Sequence[_Seen], *, coarse: bool, draws: bool) -> str:
    """In words how the parts' losses, or gradients, do not make the whole's; empty if they do."""
    counts = [part.count for part in parts if part.count is not None]
    total = sum(counts) if counts else float(whole.rows)
    if counts and not (total and whole.count):
        return "a count of 0 terms in the first batch"
    weights = [1.0 / total if part.count is not None else part.rows / total for part in parts]
    expected = whole.loss / whole.count if whole.count else whole.loss
    got = sum(weight * part.loss for weight, part in zip(weights, parts, strict=True))
    size = max(abs(expected), sum(weight * abs(part.loss) for weight, part in zip(weights, parts, strict=True)))
    noise = 4 * math.hypot(whole.spread, max(part.spread for part in parts)) + 0.02 * size if draws else 0.0
    if not abs(got - expected) <= LOSS_GAP * (COARSE[0] if coarse else 1.0) * size + noise:
        return f"the first batch's loss is {expected:.6g}, and {got:.6g} by its {len(parts)} parts"
    off = 0.0 if draws else _gradients_off(whole, parts, [*weights, 1.0 / (whole.count or 1.0)])
    if not off <= GRADIENT_GAP * (COARSE[1] if coarse else 1.0):
        return f"the first batch's loss has another gradient by its {len(parts)} parts ({100 * off:.2g} % off)"
    return ""


def _gradients_off(whole: _Seen, parts: Sequence[_Seen], weights: Sequence[float]) -> float:
    """The distance of the parts' gradients to the whole's, relative to these; the last weight is the whole's."""
    apart = size = 0.0
    for i, gradient in enumerate(whole.gradients):
        own = [part.gradients[i] for part in parts]
        if gradient is None or any(one is None for one in own):
            continue
        expected = gradient.double() * weights[-1]
        joined = _joined([one.double() * w for one, w in zip(own, weights, strict=False) if one is not None], expected)
        if joined is not None:
            apart += float((joined - expected).square().sum())
            size += float(expected.square().sum())
    return math.sqrt(apart / size) if size else 0.0


def _joined(parts: Sequence[torch.Tensor], whole: torch.Tensor) -> torch.Tensor | None:
    """Gradients of parts as one for the whole: row by row, or added up for what every part reads."""
    if all(part.shape == whole.shape for part in parts):
        return torch.stack(list(parts)).sum(0)
    if all(part.shape[1:] == whole.shape[1:] for part in parts) and sum(map(len, parts)) == len(whole):
        return torch.cat(list(parts))
    return None


@dataclass(slots=True)
class _Runs:
    """Forwards of one batch's parts, with all that is kept from the first one, of the whole.

    Args:
        captured: the model.
        batch: whole.
        gradients: whether those of the loss are taken.
        noise: what random operations drew for the whole batch, by name.
        statistics: mean and variance of the whole batch, by name of the BatchNorm.
    """

    captured: Captured
    batch: Batch
    gradients: bool = True
    noise: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    statistics: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    moved: dict[int, torch.Tensor] | None = None

    @property
    def draws(self) -> bool:
        """Whether the loss itself draws random numbers."""
        return self.captured.loss_draws

    def on(self, start: int, size: int) -> _Seen:
        """Forward and loss on ``size`` rows from row ``start`` on; the whole batch first of all."""
        rows, ops, found = num_rows(self.batch), self.captured.graph.ops, []

        def each(i: int, call: Callable[[], Any]) -> Any:
            called: Any = call  # a partial
            if i == len(ops):
                found.append(self._loss(called, size))
                return [torch.zeros(())]
            with torch.no_grad():
                args, kwargs = tree_map(self._weight, (called.args, called.keywords))
                if takes_statistics(called.func, args):
                    return self._normalised(ops[i].name, called.func, args)
                if ops[i].draws >= 0:
                    return self._drawn(ops[i].name, called.func, args, kwargs, (start, size, rows))
                return called.func(*args, **kwargs)

        self.captured.walk(rows_between(self.batch, start, size), each)
        return found[0]

    def _weight(self, value: Any) -> Any:
        """A parameter as it is, or moved a little if it is constant."""
        if not isinstance(value, torch.nn.Parameter):
            return value
        if self.moved is None:
            self.moved = {id(p): _moved(p) for p in self.captured.parameters().values() if _is_constant(p)}
        return self.moved.get(id(value), value)

    def _loss(self, call: Any, rows: int) -> _Seen:
        *reads, draw = call.args
        outputs = len(self.captured.graph.outputs)
        entering = [_entering(value) if i < outputs and self.gradients else value for i, value in enumerate(reads)]
        draws = [Draw(0, g) for g in range(DRAWS)] if self.draws else [draw]
        with torch.set_grad_enabled(self.gradients):
            made = [call.func(*entering, one) for one in draws]
        losses = torch.stack([one[0].detach().double() for one in made])
        leaves = [value for value in entering if isinstance(value, torch.Tensor) and value.requires_grad]
        gradients: tuple[torch.Tensor | None, ...] = ()
        if leaves:
            gradients = torch.autograd.grad(made[0][0], leaves, allow_unused=True)
        graph = self.captured.graph
        count = float(made[0][1].detach()) if graph.loss_counts or graph.labels_per_row else None
        if count is not None and not graph.loss_counts:  # a mean over so many labels, as a sum
            losses, gradients = losses * count, tuple(g if g is None else g * count for g in gradients)
        spread = float(losses.std()) / math.sqrt(DRAWS) if self.draws else 0.0
        return _Seen(rows, float(losses.mean()), count, spread, gradients)

    def _normalised(self, name: str, function: Any, args: tuple[Any, ...]) -> torch.Tensor:
        """BatchNorm by the statistics of the whole batch."""
        x, weight, bias = args[:3]
        eps = args[6] if function is cumulative_batch_norm else args[7]
        if name not in self.statistics:
            kind = torch.float32 if x.dtype.itemsize < torch.float32.itemsize else x.dtype
            kind = kind if weight is None else weight.dtype
            over = [i for i in range(x.ndim) if i != 1]
            self.statistics[name] = x.to(kind).mean(over), x.to(kind).var(over, correction=0)
        return torch.batch_norm(x, weight, bias, *self.statistics[name], False, 0.0, eps, False)

    def _drawn(self, name: str, function: Any, args: Any, kwargs: Any, place: tuple[int, int, int]) -> Any:
        """A random operation without its dropout, or with what it drew for these rows of the whole batch."""
        if function is keyed_dropout:
            return args[0].clone()
        if function is keyed_attention:
            return function(*args[:4], *((0.0, *args[5:]) if len(args) > 4 else ()), **_without_dropout(args, kwargs))
        switched = _switched_off(args[0], args[1:], kwargs)
        if switched is not None:
            return switched()
        made = function(*args, **kwargs)
        drawn = [part for part in (made if isinstance(made, (tuple, list)) else [made]) if torch.is_tensor(part)]
        kept = self.noise.setdefault(name, [part.clone() for part in drawn])
        for part, of_whole in zip(drawn, kept, strict=True):
            if (rows := _rows_of(of_whole, part, *place)) is not None:
                part.copy_(rows)
        return made


def _without_dropout(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return kwargs if len(args) > 4 else {**kwargs, "dropout_p": 0.0}


def _switched_off(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """A call of the operator as in evaluation, if it has a switch for that, as dropout of every kind has."""
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    names = [argument.name for argument in operator._schema.arguments]
    switch = next((name for name in ("train", "training") if name in names), None)
    if switch is None:
        return None
    given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names} | {switch: False}
    return lambda: operator(**given)


def _rows_of(whole: torch.Tensor, part: torch.Tensor, start: int, size: int, rows: int) -> torch.Tensor | None:
    """Of what was drawn for the whole batch that which a part is given; None if no dimension is rows."""
    if whole.shape == part.shape:
        return whole
    for i, (of_whole, of_part) in enumerate(zip(whole.shape, part.shape, strict=False)):
        others = whole.shape[:i] + whole.shape[i + 1 :] == part.shape[:i] + part.shape[i + 1 :]
        if others and of_whole * size == of_part * rows:
            return whole.narrow(i, start * of_whole // rows, of_part)
    return None


def _entering(value: Any) -> Any:
    floats = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return value.detach().requires_grad_() if floats else value


def _is_constant(parameter: torch.Tensor) -> bool:
    if parameter.is_meta or parameter.numel() < 2 or not parameter.is_floating_point():
        return False
    least, most = torch.aminmax(parameter.detach())
    return bool(least == most)


def _moved(parameter: torch.Tensor) -> torch.Tensor:
    """A little from where it is; from 0 as far as a layer's weights begin, so that rows come to differ."""
    draws = torch.Generator().manual_seed(0)
    noise = torch.empty(parameter.shape).uniform_(-1.0, 1.0, generator=draws).to(parameter)
    first = float(parameter.detach().reshape(-1)[0])
    fan_in = parameter.numel() / parameter.size(0)
    begins = 1.0 / math.sqrt(fan_in) if fan_in > 1 else 0.1
    return parameter.detach() + noise * (0.05 * abs(first) or begins)
