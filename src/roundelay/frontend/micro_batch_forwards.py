"""Forwards of one batch and of its parts, operation by operation, with what would differ in innocent jobs taken out.

Dropout is off, other draws of the whole batch are given to its parts row by row, BatchNorm normalises the parts by the
whole batch's statistics. Parameters that are constant (a head that begins as zeros gives every row the same loss) are
moved a little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

from roundelay.frontend.batch import Batch, num_rows, rows_between
from roundelay.frontend.capture import Captured
from roundelay.frontend.describe_graph import takes_statistics
from roundelay.frontend.export_substitutes import cumulative_batch_norm
from roundelay.frontend.keyed_rng import RngKey, keyed_attention, keyed_dropout

DRAWS = 16
"""Draws over which a loss that draws random numbers is averaged."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One forward on some rows of the batch.

    Args:
        rows: how many.
        loss: the mean over them, or the sum; of a loss that draws, the mean over draws.
        count: of the sum's terms; None: the loss is a mean.
        spread: standard error of the loss.
        gradients: of the loss, for each tensor that it reads; or for each trained parameter.
    """

    rows: int
    loss: float
    count: float | None
    spread: float
    gradients: tuple[torch.Tensor | None, ...]


@dataclass(slots=True)
class MicroBatchForwards:
    """Forwards of one batch's parts, with all that is kept from the first one, of the whole.

    Args:
        captured: the model.
        batch: whole.
        gradients: whether those of the loss are taken.
        deep: take them of the model's parameters, through the whole model.
        elsewhere: move all parameters, not only those that are constant.
        noise: what random operations drew for the whole batch, by name.
        statistics: mean and variance of the whole batch, by name of the BatchNorm.
    """

    captured: Captured
    batch: Batch
    gradients: bool = True
    deep: bool = False
    elsewhere: bool = False
    noise: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    statistics: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    moved: dict[int, torch.Tensor] | None = None

    @property
    def draws(self) -> bool:
        """Whether the loss itself draws random numbers."""
        return self.captured.loss_draws

    def on(self, start: int, size: int) -> Seen:
        """Forward and loss on ``size`` rows from row ``start`` on; the whole batch first of all."""
        rows, ops, found = num_rows(self.batch), self.captured.graph.ops, []

        def each(i: int, call: Callable[[], Any]) -> Any:
            called: Any = call  # a partial
            if i == len(ops):
                found.append(self._loss(called, size))
                return [torch.zeros(())]
            with torch.set_grad_enabled(self.deep):
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
        return self._moved_weights().get(id(value), value)

    def _moved_weights(self) -> dict[int, torch.Tensor]:
        if self.moved is None:
            every = self.captured.parameters().values()
            self.moved = {id(p): _moved(p) for p in every if _is_constant(p) or (self.elsewhere and _is_movable(p))}
            for weight in self.moved.values() if self.deep else ():
                weight.requires_grad_()
        return self.moved

    @property
    def layers(self) -> list[str]:
        """For every gradient, of what layer it is: gradients are compared by layers; of what the loss reads, in all."""
        if not self.deep:
            return [""] * len(self.captured.graph.outputs)
        return [name.rpartition(".")[0] for name, p in self.captured.parameters().items() if p.requires_grad]

    def _loss(self, call: Any, rows: int) -> Seen:
        *reads, draw = call.args
        outputs = len(self.captured.graph.outputs)
        outputs = 0 if self.deep or not self.gradients else outputs
        entering = [_entering(value) if i < outputs else value for i, value in enumerate(reads)]
        draws = [RngKey(0, g) for g in range(DRAWS)] if self.draws else [draw]
        with torch.set_grad_enabled(self.gradients):
            made = [call.func(*entering, one) for one in draws]
        losses = torch.stack([one[0].detach().double() for one in made])
        leaves = [value for value in entering if isinstance(value, torch.Tensor) and value.requires_grad]
        if self.deep:
            moved = self._moved_weights()
            leaves = [moved.get(id(p), p) for p in self.captured.parameters().values() if p.requires_grad]
        gradients: tuple[torch.Tensor | None, ...] = ()
        if leaves:
            gradients = torch.autograd.grad(made[0][0], leaves, allow_unused=True)
        graph = self.captured.graph
        count = float(made[0][1].detach()) if graph.loss_counts or graph.labels_per_row else None
        if count is not None and not graph.loss_counts:  # a mean over so many labels, as a sum
            losses, gradients = losses * count, tuple(g if g is None else g * count for g in gradients)
        spread = float(losses.std()) / math.sqrt(DRAWS) if self.draws else 0.0
        return Seen(rows, float(losses.mean()), count, spread, gradients)

    def _normalised(self, name: str, function: Any, args: tuple[Any, ...]) -> torch.Tensor:
        """BatchNorm by the statistics of the whole batch."""
        x, weight, bias = args[:3]
        eps = args[6] if function is cumulative_batch_norm else args[7]
        if name not in self.statistics:
            kind = torch.float32 if x.dtype.itemsize < torch.float32.itemsize else x.dtype
            kind = kind if weight is None else weight.dtype
            over = [i for i in range(x.ndim) if i != 1]
            of = x.detach().to(kind)  # as constants, for the whole batch as for its parts
            self.statistics[name] = of.mean(over), of.var(over, correction=0)
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


def _is_movable(parameter: torch.Tensor) -> bool:
    return not parameter.is_meta and parameter.is_floating_point() and parameter.numel() > 0


def _moved(parameter: torch.Tensor) -> torch.Tensor:
    """A constant one a little from where it is, from 0 as far as a layer's weights begin, so that rows come to differ.

    Any other one as far as a training may take it.
    """
    draws = torch.Generator().manual_seed(0)
    noise = torch.empty(parameter.shape).uniform_(-1.0, 1.0, generator=draws).to(parameter)
    first = float(parameter.detach().reshape(-1)[0])
    fan_in = parameter.numel() / parameter.size(0) if parameter.ndim else 1.0
    begins = 1.0 / math.sqrt(fan_in) if fan_in > 1 else 0.1
    if _is_constant(parameter):
        return parameter.detach() + noise * (0.05 * abs(first) or begins)
    return parameter.detach() * 1.5 + noise * float(parameter.detach().abs().mean())
