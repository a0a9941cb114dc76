"""Count the labels of a micro-batch, for losses that are the mean of a cross entropy over labels.

``cross_entropy`` and ``nll_loss`` leave out labels that are ``ignore_index`` (-100: padding, prompts), so a batch's
mean is the mean of its parts weighted by their numbers of labels, not of rows; a part without labels is 0/0. Where the
loss *is* the result of such a call, in the loss function or in a model that returns its own loss, its labels are
counted as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from roundelay.frontend.export.export import Exported

aten = torch.ops.aten

_MEAN = 1
"""ATen's number for the reduction ``mean``."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Where the number of labels comes from.

    Args:
        output: index of the output leaf that the loss returns as it is; -1: the loss function calls the cross entropy.
        terms: number of labels of the sample.
    """

    output: int = -1
    terms: float = 0.0


def count_labels(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int) -> torch.Tensor:
    """Number of labels that are not ``ignore_index``, or their summed class weights: the mean's divisor; float64."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum(dtype=torch.float64)
    return torch.where(kept, weight.detach()[torch.where(kept, target, 0)], 0.0).sum(dtype=torch.float64)


class LabelWatch(TorchFunctionMode):
    """Records every mean of a cross entropy by the tensor that it returned."""

    def __init__(self) -> None:
        super().__init__()
        self._means: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SIGNATURES:
            bound = _SIGNATURES[func].bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            arguments = bound.arguments
            mean = (
                arguments["reduction"] == "mean"
                and arguments["size_average"] in (None, True)
                and arguments["reduce"] is not False
            )
            if mean and isinstance(arguments["target"], torch.Tensor) and not arguments["target"].is_floating_point():
                self._means.append((result, arguments["target"], arguments["weight"], arguments["ignore_index"]))
        return result

    def terms_of(self, value: Any) -> torch.Tensor | None:
        """The number of labels of a loss; None if it is not such a mean."""
        for result, target, weight, ignore_index in self._means:
            if result is value:
                with torch.no_grad():
                    return count_labels(target, weight, ignore_index)
        return None


_SIGNATURES = {function: signature(function) for function in (functional.cross_entropy, functional.nll_loss)}


def add_count(exported: Exported, node: torch.fx.Node) -> torch.fx.Node | None:
    """Add an operation that counts the labels of the cross entropy ``node``; None if it is not a mean of one."""
    if node.target not in (aten.cross_entropy_loss.default, aten.nll_loss_nd.default):
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    arguments: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    if arguments.get("reduction", _MEAN) != _MEAN or arguments["target"].meta["val"].dtype.is_floating_point:
        return None
    with exported.module.graph.inserting_after(node):
        count = exported.module.graph.call_function(
            count_labels, (arguments["target"], arguments.get("weight"), arguments.get("ignore_index", -100))
        )
    count.meta = dict(node.meta)
    return count
