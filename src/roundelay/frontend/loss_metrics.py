"""Metrics that the loss returns beside the loss: ``{"loss": loss, "accuracy": right / rows, ...}``.

A metric is weighed as a loss is: a scalar is the mean over the micro-batch's rows, a pair (sum, count) is divided by
the batch's summed count. No gradient comes of it.
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
    """The loss itself, and the metrics beside it by name, from what a loss has returned.

    Raises:
        JobError: a mapping without a loss, or a name that is none.
    """
    if not isinstance(value, Mapping):
        return value, {}
    names = list(value)
    if LOSS not in names or not all(isinstance(name, str) and name.isprintable() and name for name in names):
        raise JobError(
            "the loss",
            got=f"a mapping with {', '.join(map(repr, names)) or 'nothing'}",
            expected="'loss', and beside it metrics by their names",
            remedy='For example: return {"loss": loss, "accuracy": (predicted == labels).float().mean()}.',
        )
    return value[LOSS], {name: metric for name, metric in value.items() if name != LOSS}


def check_count(total: float, count: float) -> None:
    """Refuse what cannot be (sum, count).

    Raises:
        JobError: the count is no whole number of terms, or there are none and the sum is not 0.
    """
    if count == 0 and total != 0:
        raise no_count(f"0 beside a sum of {total:.6g}")
    if not (math.isfinite(count) and count >= 0 and count == int(count)):
        raise no_count(f"{count:.6g}")


def no_count(got: str) -> JobError:
    """The error for a pair whose second number counts nothing."""
    return JobError(
        "the pair that the loss returns",
        got=f"a second number of {got}",
        expected="(sum, count): a sum over terms, and their number, by which gradients are divided",
        remedy='A number to be told beside the loss is a metric: return {"loss": loss, "accuracy": accuracy}. A mean '
        "of another kind is returned alone, as one number.",
    )


def layout(metrics: Mapping[str, Any]) -> Metrics:
    """What the metrics of the first batch are."""
    return tuple((name, isinstance(metric, tuple | list)) for name, metric in metrics.items())


def value_names(metrics: Metrics) -> tuple[str, ...]:
    """The names under which metrics, and counts where they have them, leave the last stage."""
    return tuple(before + name for name, pair in metrics for before in ((METRIC, TERMS) if pair else (METRIC,)))


def tensors(metrics: Mapping[str, Any], expected: Metrics) -> list[torch.Tensor]:
    """Scalars in the order of :func:`value_names`, in double precision, without a gradient.

    Raises:
        JobError: a metric is no number, or they are not those of the first batch.
    """
    if layout(metrics) != expected:
        raise JobError(
            "the metrics beside the loss",
            got=_told(layout(metrics)),
            expected=f"{_told(expected)}, as on the first batch",
            remedy="Return the same metrics in the same order and form for every batch.",
        )
    return [_scalar(name, part) for name, metric in metrics.items() for part in _parts(metric)]


def _parts(metric: Any) -> Sequence[Any]:
    return metric if isinstance(metric, tuple | list) and len(metric) == 2 else (metric,)


def _scalar(name: str, part: Any) -> torch.Tensor:
    if isinstance(part, int | float):
        return torch.tensor(float(part), dtype=torch.float64)
    if isinstance(part, torch.Tensor) and part.numel() == 1 and not part.is_complex():
        return part.detach().reshape(()).to(torch.float64)
    raise JobError(
        f"the metric {name!r} beside the loss",
        got=f"tensor of shape {tuple(part.shape)} {part.dtype}" if isinstance(part, torch.Tensor) else repr(part),
        expected="one number (the mean over the micro-batch's rows), or the pair (sum, count)",
        remedy="Reduce it with .mean(), or return (x.sum(), number_of_terms).",
    )


def _told(metrics: Metrics) -> str:
    return ", ".join(f"{name} as (sum, count)" if pair else name for name, pair in metrics) or "none"
