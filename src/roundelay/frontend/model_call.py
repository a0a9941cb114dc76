"""Call the user's model: training mode, arguments from ``inputs``, and the first forward of lazy buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from roundelay.errors import JobError
from roundelay.frontend.batch import Batch
from roundelay.frontend.export.export_adapter import CallShape, Inputs
from roundelay.frontend.stages.keyed_rng import DEFAULT_GENERATOR_LOCK
from roundelay.reach.reachable_state import DEFAULT_GENERATORS, ReachableState
from roundelay.reach.slot_values import MISSING


def train(model: torch.nn.Module) -> None:
    """Put the model into training mode; if it already is, submodules in eval mode stay there.

    A submodule whose class overrides ``train`` (to keep BatchNorm layers in eval mode, say) has it called in any case.
    """
    if not model.training:
        model.train()
        return
    in_eval = [module for module in model.modules() if not module.training]
    for module in list(model.modules()):
        if module.training and type(module).train is not torch.nn.Module.train:
            module.train()
    for module in in_eval:
        module.training = False


def locked_if_random(inputs: Inputs, batch: Batch) -> tuple[Inputs, tuple[tuple[Any, ...], dict[str, Any]]]:
    """``inputs`` and its result for ``batch``; if it draws random numbers, wrapped to hold the generator lock."""
    state = ReachableState(DEFAULT_GENERATORS)
    result = call_inputs(inputs, batch)
    if not state.changes():
        return inputs, result

    def locked(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
        with DEFAULT_GENERATOR_LOCK:
            return inputs(batch)

    return locked, result


def call_inputs(inputs: Inputs, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The model's (args, kwargs) for a batch, from the user's ``inputs``.

    Raises:
        JobError: it returns something else.
    """
    result = inputs(batch)
    pair: Any = result  # a user's function may return anything
    good = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], (tuple, list))
    if not good or not isinstance(pair[1], Mapping):
        raise JobError(
            "Job(inputs=...)",
            got=f"{type(result).__name__}",
            expected="a function batch -> (args, kwargs): a tuple and a dict",
            remedy='For example: inputs=lambda batch: ((batch["x"],), {}).',
        )
    return tuple(result[0]), dict(result[1])


def first_forward(
    model: torch.nn.Module, call: CallShape, tensors: list[torch.Tensor], roots: Sequence[tuple[str, Any]]
) -> set[int]:
    """Call the model once; of all that changes, keep only buffers that were None before.

    Returns:
        Ids of these buffers.
    """
    state = ReachableState(roots)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    args, kwargs = call.unflatten([tensor.clone() for tensor in tensors])
    try:
        with torch.random.fork_rng(devices=[]):
            model(*args, **kwargs)
        changes = state.changes()
    finally:
        state.restore()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    created = set()
    for change in changes:
        if change.slot.kind == "buffer" and change.before in (None, MISSING):
            value = change.after.detach().clone()
            change.slot.write(value)
            created.add(id(value))
    return created
