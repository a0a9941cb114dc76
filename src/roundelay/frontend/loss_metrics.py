"""Metrics that the loss returns in addition to the loss: ``{"loss": loss, "accuracy": right / rows, ...}``.

A metric is averaged as a loss is: a scalar is the mean over the micro-batch's rows, a pair (sum, count) is divided by
the batch's summed count. It has no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roundelay.errors import JobError
from roundelay.ir.graph import LOSS, METRIC, TERMS

Metrics = tuple[tuple[str, bool], ...]
"""Name of every metric in order, and whether it is a pair."""


def split(value: Any) -> tuple[Any, dict[str, Any]]:
    """The loss itself and the metrics by name, from what a loss function has returned.

    Raises:
        JobError: a mapping without a loss, or with an invalid name.
    """
    if not isinstance(value, Mapping):
        return value, {}
    names = list(value)
    if LOSS not in names or not all(isinstance(name, str) and name.isprintable() and name for name in names):
        raise JobError(
            "the loss",
            got=f"a mapping with {', '.join(map(repr, names)) or 'nothing'}",
            expected="an entry 'loss', and metrics under names of their own",
            remedy='For example: return {"loss": loss, "accuracy": (predicted == labels).float().mean()}.',
        )
    return value[LOSS], {name: metric for name, metric in value.items() if name != LOSS}


def check_count(total: float, count: float) -> None:
    """Refuse a pair that cannot be (sum, count).

    Raises:
        JobError: the count is not a whole number, or it is 0 and the sum is not.
    """
    if count == 0 and total != 0:
        raise no_count(f"0 with a sum of {total:.6g}")
    if not (math.isfinite(count) and count >= 0 and count == int(count)):
        raise no_count(f"{count:.6g}")


def no_count(got: str) -> JobError:
    """The error for a pair whose second number is not a count."""
    return JobError(
        "the pair that the loss returns",
        got=f"a second number of {got}",
        expected="(sum, count): a sum over terms, and their number, by which gradients are divided",
        remedy='To report a number in addition to the loss, return a metric: {"loss": loss, "accuracy": accuracy}. '
        "Return a mean of another kind alone, as one number.",
    )


def layout(metrics: Mapping[str, Any]) -> Metrics:
    """Name and kind of each metric."""
    return tuple((name, isinstance(metric, tuple | list)) for name, metric in metrics.items())


def value_names(metrics: Metrics) -> tuple[str, ...]:
    """The value names of metrics, and of their counts where they have them, as outputs of the last stage."""
    return tuple(before + name for name, pair in metrics for before in ((METRIC, TERMS) if pair else (METRIC,)))


def tensors(metrics: Mapping[str, Any], expected: Metrics) -> list[torch.Tensor]:
    """The metrics as float64 scalars without gradients, in the order of :func:`value_names`.

    Raises:
        JobError: a metric is not a number, or they are not those of the first batch.
    """
    if layout(metrics) != expected:
        raise JobError(
            "the metrics returned with the loss",
            got=_listed(layout(metrics)),
            expected=f"{_listed(expected)}, as on the first batch",
            remedy="Return the same metrics in the same order and form for every batch.",
        )
    return [_scalar(name, part) for name, metric in metrics.items() for part in _parts(metric)]


def _parts(metric: Any) -> Sequence[Any]:
    return metric if isinstance(metric, tuple | list) and len(metric) == 2 else (metric,)


def _scalar(name: str, part: Any) -> torch.Tensor:
    if isinstance(part, int | float):
        return torch.tensor(float(part), dtype=torch.float64)
    if isinstance(part, torch.SymInt | torch.SymFloat):  # while the loss is traced
        number: Any = part
        return torch.scalar_tensor(number, dtype=torch.float64)
    if isinstance(part, torch.Tensor) and part.numel() == 1 and not part.is_complex():
        return part.detach().reshape(()).to(torch.float64)
    raise JobError(
        f"the metric {name!r} returned with the loss",
        got=f"tensor of shape {tuple(part.shape)} {part.dtype}" if isinstance(part, torch.Tensor) else repr(part),
        expected="one number (the mean over the micro-batch's rows), or the pair (sum, count)",
        remedy="Reduce it with .mean(), or return (x.sum(), number_of_terms).",
    )


def _listed(metrics: Metrics) -> str:
    return ", ".join(f"{name} as (sum, count)" if pair else name for name, pair in metrics) or "none"
