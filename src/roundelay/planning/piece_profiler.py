"""Measure a model on a device: piece by piece between the places where it may be cut.

On a GPU an operation alone says little: its kernel runs while the host issues the next. So each piece is a stage of its
own, timed as stages are, and its seconds are divided among its operations as a roofline model would have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from roundelay.frontend import Captured
from roundelay.ir.graph import Graph, Profile
from roundelay.lower.partition import partition
from roundelay.planner.cost_model import CALL_S, boundaries_of, forward_seconds
from roundelay.planner.partition_dp import names_of
from roundelay.planning.stage_profiler import StageProfile, profile


def measure_pieces(captured: Captured, micro_batch: Any, device: torch.device) -> Profile:
    """Seconds of every operation on one micro-batch, the loss as the last one.

    Args:
        captured: the model; not changed.
        micro_batch: of the size that will be trained on.
        device: where it is computed.
    """
    graph, bounds = captured.graph, boundaries_of(captured.graph)
    pieces = partition(graph, [(end,) for end in names_of(graph, bounds)], ())
    measured = profile(captured, pieces, micro_batch, "stash", [device] * len(pieces.stages))
    rows = [row for i, piece in enumerate(measured) for row in _divided(graph, piece, bounds[i], bounds[i + 1])]
    return Profile(*map(tuple, zip(*rows, strict=True)))


def _divided(graph: Graph, piece: StageProfile, start: int, stop: int) -> Iterator[tuple[float, ...]]:
    """Seconds of each operation's forward, backward, update and sums; the loss is beyond the last operation."""
    weights = [forward_seconds(graph, op) for op in graph.ops[start:stop]]
    weights += [CALL_S] * (stop > len(graph.ops))
    total = sum(weights)
    for weight in weights:
        share = weight / total
        yield tuple([one * share for one in (piece.forward_s, piece.backward_s, piece.update_s, piece.add_s)])
