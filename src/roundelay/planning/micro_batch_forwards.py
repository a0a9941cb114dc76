"""Forwards of a batch and of its parts, operation by operation, without the differences that every job has.

Dropout is off, other random numbers drawn for the whole batch are reused for its parts row by row, and BatchNorm
normalises the parts by the whole batch's statistics. Constant parameters are perturbed: a head initialised to zeros
gives every row the same loss.
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
from roundelay.frontend.export.export_substitutes import cumulative_batch_norm, takes_statistics
from roundelay.frontend.stages.keyed_rng import RngKey, keyed_attention, keyed_dropout

DRAWS = 16
"""Evaluations over which a loss that draws random numbers is averaged."""


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The result of one forward on some rows of the batch.

    Args:
        rows: the number of rows.
        loss: their mean loss, or the sum; for a loss that draws random numbers, averaged over :data:`DRAWS`.
        count: the number of terms of the sum; None if the loss is a mean.
        spread: standard error of the loss.
        gradients: of the loss with respect to each tensor that it reads, or to each trained parameter.
    """

    rows: int
    loss: float
    count: float | None
    spread: float
    gradients: tuple[torch.Tensor | None, ...]


@dataclass(slots=True)
class MicroBatchForwards:
    """Forwards of one batch's parts; the first forward must be of the whole, whose random numbers are reused.

    Args:
        captured: the model.
        batch: the whole batch.
        gradients: whether to compute gradients of the loss.
        deep: compute them with respect to the model's parameters, through the whole model.
        elsewhere: perturb all parameters, not only constant ones.
        noise: what random operations drew for the whole batch, by operation name.
        statistics: mean and variance of the whole batch, by operation name of the BatchNorm.
        moved: id of a parameter to its perturbed copy.
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

    def on(self, start: int, size: int) -> ForwardResult:
        """Run forward and loss on ``size`` rows from row ``start``; the first call must be on the whole batch."""
        rows, ops, results = num_rows(self.batch), self.captured.graph.ops, []

        def each(i: int, call: Callable[[], Any]) -> Any:
            operation: Any = call  # a partial
            if i == len(ops):
                results.append(self._loss(operation, size))
                return [torch.zeros(())]
            with torch.set_grad_enabled(self.deep):
                args, kwargs = tree_map(self._weight, (operation.args, operation.keywords))
                if takes_statistics(operation.func, args):
                    return self._normalised(ops[i].name, operation.func, args)
                if ops[i].draws >= 0:
                    return self._drawn(ops[i].name, operation.func, args, kwargs, (start, size, rows))
                return operation.func(*args, **kwargs)

        self.captured.walk(rows_between(self.batch, start, size), each)
        return results[0]

    def _weight(self, value: Any) -> Any:
        """Replace a parameter by its perturbed copy, if it has one."""
        if not isinstance(value, torch.nn.Parameter):
            return value
        return self._perturbed_weights().get(id(value), value)

    def _perturbed_weights(self) -> dict[int, torch.Tensor]:
        if self.moved is None:
            every = self.captured.parameters().values()
            self.moved = {id(p): _perturbed(p) for p in every if _is_constant(p) or (self.elsewhere and _is_movable(p))}
            for weight in self.moved.values() if self.deep else ():
                weight.requires_grad_()
        return self.moved

    @property
    def layers(self) -> list[str]:
        """The layer of every gradient, by which gradients are compared; one for all that the loss reads."""
        if not self.deep:
            return [""] * len(self.captured.graph.outputs)
        return [name.rpartition(".")[0] for name, p in self.captured.parameters().items() if p.requires_grad]

    def _loss(self, call: Any, rows: int) -> ForwardResult:
        *reads, draw = call.args
        graph = self.captured.graph
        flows = [] if self.deep or not self.gradients else [graph.values[name].requires_grad for name in graph.outputs]
        arguments = [_as_leaf(value) if i < len(flows) and flows[i] else value for i, value in enumerate(reads)]
        draws = [RngKey(0, g) for g in range(DRAWS)] if self.draws else [draw]
        with torch.set_grad_enabled(self.gradients):
            results = [call.func(*arguments, one) for one in draws]
        losses = torch.stack([one[0].detach().double() for one in results])
        leaves = [value for value in arguments if isinstance(value, torch.Tensor) and value.requires_grad]
        if self.deep:
            moved = self._perturbed_weights()
            leaves = [moved.get(id(p), p) for p in self.captured.parameters().values() if p.requires_grad]
        gradients: tuple[torch.Tensor | None, ...] = ()
        if leaves:
            gradients = torch.autograd.grad(results[0][0], leaves, allow_unused=True)
        count = float(results[0][1].detach()) if graph.loss_counts or graph.labels_per_row else None
        if count is not None and not graph.loss_counts:  # turn a mean over labels into a sum
            losses, gradients = losses * count, tuple(g if g is None else g * count for g in gradients)
        spread = float(losses.std()) / math.sqrt(DRAWS) if self.draws else 0.0
        return ForwardResult(rows, float(losses.mean()), count, spread, gradients)

    def _normalised(self, name: str, function: Any, args: tuple[Any, ...]) -> torch.Tensor:
        """Apply a BatchNorm with the statistics of the whole batch."""
        x, weight, bias = args[:3]
        eps = args[6] if function is cumulative_batch_norm else args[7]
        if name not in self.statistics:
            kind = torch.float32 if x.dtype.itemsize < torch.float32.itemsize else x.dtype
            kind = kind if weight is None else weight.dtype
            over = [i for i in range(x.ndim) if i != 1]
            constant = x.detach().to(kind)  # no gradient through statistics, for the whole batch as for its parts
            self.statistics[name] = constant.mean(over), constant.var(over, correction=0)
        return torch.batch_norm(x, weight, bias, *self.statistics[name], False, 0.0, eps, False)

    def _drawn(self, name: str, function: Any, args: Any, kwargs: Any, rows_of_part: tuple[int, int, int]) -> Any:
        """Run a random operation without dropout, or with what it drew for these rows of the whole batch."""
        if function is keyed_dropout:
            return args[0].clone()
        if function is keyed_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
            return function(*args, **kwargs)
        evaluated = _in_evaluation(args[0], args[1:], kwargs)
        if evaluated is not None:
            return evaluated()
        result = function(*args, **kwargs)
        drawn = [part for part in (result if isinstance(result, (tuple, list)) else [result]) if torch.is_tensor(part)]
        noise = self.noise.setdefault(name, [part.clone() for part in drawn])
        for part, whole_draw in zip(drawn, noise, strict=True):
            if (rows := _rows_of(whole_draw, part, *rows_of_part)) is not None:
                part.copy_(rows)
        return result


def _in_evaluation(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """A call of the operator in evaluation mode, if it has an argument for that, as all kinds of dropout have."""
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    names = [argument.name for argument in operator._schema.arguments]
    switch = next((name for name in ("train", "training") if name in names), None)
    if switch is None:
        return None
    arguments = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names} | {switch: False}
    return lambda: operator(**arguments)


def _rows_of(whole: torch.Tensor, part: torch.Tensor, start: int, size: int, rows: int) -> torch.Tensor | None:
    """The rows of a part in what was drawn for the whole batch; None if no dimension is the rows'."""
    if whole.shape == part.shape:
        return whole
    for i, (whole_size, part_size) in enumerate(zip(whole.shape, part.shape, strict=False)):
        others = whole.shape[:i] + whole.shape[i + 1 :] == part.shape[:i] + part.shape[i + 1 :]
        if others and whole_size * size == part_size * rows:
            return whole.narrow(i, start * whole_size // rows, part_size)
    return None


def _as_leaf(value: Any) -> Any:
    floats = isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    return value.detach().requires_grad_() if floats else value


def _is_constant(parameter: torch.Tensor) -> bool:
    """Whether all of its numbers are the same; a single one only if it is 0, as a gate that lets nothing through."""
    if not _is_movable(parameter):
        return False
    if parameter.numel() == 1:
        return not bool(parameter.detach())
    least, most = torch.aminmax(parameter.detach())
    return bool(least == most)


def _is_movable(parameter: torch.Tensor) -> bool:
    return not parameter.is_meta and parameter.is_floating_point() and parameter.numel() > 0


def _perturbed(parameter: torch.Tensor) -> torch.Tensor:
    """Perturb a parameter: a constant one by a little, so that rows differ, any other one as far as training may go.

    A constant of 0 is perturbed by the usual magnitude of a layer's initial weights.
    """
    draws = torch.Generator().manual_seed(0)
    noise = torch.empty(parameter.shape).uniform_(-1.0, 1.0, generator=draws).to(parameter)
    value = float(parameter.detach().reshape(-1)[0])
    fan_in = parameter.numel() / parameter.size(0) if parameter.ndim else 1.0
    initial = 1.0 / math.sqrt(fan_in) if fan_in > 1 else 0.1
    if _is_constant(parameter):
        return parameter.detach() + noise * (0.05 * abs(value) or initial)
    return parameter.detach() * 1.5 + noise * float(parameter.detach().abs().mean())
