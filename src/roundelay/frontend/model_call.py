"""How the person's model is called: in which mode, and with what their ``inputs`` makes of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roundelay.errors import CaptureError, JobError
from roundelay.frontend.batch import Batch
from roundelay.frontend.export_adapter import CallShape, Inputs
from roundelay.frontend.keyed_rng import DEFAULT_GENERATOR_LOCK, generator_states
from roundelay.frontend.reachable_state import MISSING, ReachableState


def train(model: torch.nn.Module) -> None:
    """The model in training mode, as every loop has it; one that is already keeps parts in eval mode that it has there.

    Parts whose class has a ``train`` of its own, by which BatchNorm layers stay in eval mode, are told of it in any
    case, and then have their say.
    """
    if not model.training:
        model.train()
        return
    apart = [module for module in model.modules() if not module.training]
    for module in list(model.modules()):
        if module.training and type(module).train is not torch.nn.Module.train:
            module.train()
    for module in apart:
        module.training = False


def alone_if_drawing(inputs: Inputs, batch: Batch) -> tuple[Inputs, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The function, holding the generators for itself if it draws random numbers; and what it returned for a batch."""
    before = generator_states()
    made = called(inputs, batch)
    if before == generator_states():
        return inputs, made

    def alone(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with DEFAULT_GENERATOR_LOCK:
            return inputs(batch)

    return alone, made


def called(inputs: Inputs, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the person's function says the model is called with.

    Raises:
        JobError: it returns something else.
    """
    found = inputs(batch)
    pair: Any = found  # the person's own function: it may return anything
    good = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], (tuple, list))
    if not good or not isinstance(pair[1], Mapping):
        raise JobError(
            "Job(inputs=...)",
            got=f"{type(found).__name__}",
            expected="a function batch -> (args, kwargs): a tuple and a dict",
            remedy='For example: inputs=lambda batch: ((batch["x"],), {}).',
        )
    return tuple(found[0]), dict(found[1])


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
