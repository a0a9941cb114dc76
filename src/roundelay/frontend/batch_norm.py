"""BatchNorm in training mode: what takes its statistics over the rows that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.fx

from roundelay.frontend.export_substitutes import cumulative_batch_norm

aten = torch.ops.aten


def takes_statistics(target: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation is a BatchNorm that takes statistics over its input, ``args[0]`` of rows x channels x ..."""
    return target is cumulative_batch_norm or (target is aten.batch_norm.default and bool(args[5]))


def least_rows(module: torch.fx.GraphModule) -> int:
    """Rows that a part of a batch has at least: two where statistics are taken over them."""
    return 2 if any(takes_statistics(node.target, node.args) for node in _operations(module)) else 1


def on_one_row(module: torch.fx.GraphModule, values: Mapping[str, Any], rows: int) -> str:
    """Why one row alone cannot be trained on, in torch's words; empty if it can.

    Args:
        module: the graph.
        values: of its nodes by name, on a sample.
        rows: of the sample.
    """
    for node in module.graph.nodes:
        if node.op == "call_function" and takes_statistics(node.target, node.args):
            size = values[node.name].shape
            if size.numel() == size[1] * rows:
                one = [1, *size[1:]]
                return f"Expected more than 1 value per channel when training, got input size torch.Size({one})"
    return ""


def _operations(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Every operation of a graph, and of the graphs that its operations run."""
    graphs = [part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule)]
    return [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
