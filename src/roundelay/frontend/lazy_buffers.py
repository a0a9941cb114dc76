"""A first forward, for models that make buffers in it: a graph knows one way through the model only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roundelay.errors import CaptureError
from roundelay.frontend.export_adapter import CallShape
from roundelay.frontend.reachable_state import MISSING, ReachableState


def first_forward(
    model: torch.nn.Module, call: CallShape, tensors: list[torch.Tensor], roots: Sequence[tuple[str, Any]]
) -> set[int]:
    """Call the model once, and keep of what that changes the buffers that were None before.

    Returns:
        Ids of these buffers, which the model holds.
    """
    world = ReachableState(roots)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    args, kwargs = call.unflatten([tensor.clone() for tensor in tensors])
    try:
        with torch.random.fork_rng(devices=[]):
            model(*args, **kwargs)
        changes = world.changes()
    finally:
        world.restore()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    made = set()
    for change in changes:
        if change.slot.kind == "buffer" and change.before in (None, MISSING):
            value = change.after.detach().clone()
            change.slot.write(value)
            made.add(id(value))
    return made


def changes_on(name: str) -> CaptureError:
    """What is told of a buffer that the first forward makes and later ones change."""
    return CaptureError(
        f"buffer {name!r}, which the first forward makes",
        got="one that further forwards change, so that what it began with is not known",
        expected="a buffer that __init__ has given its first value, or that the first forward sets for good",
        remedy=f'Register it in __init__: self.register_buffer("{name.split(".")[-1]}", torch.zeros(...)).',
    )
