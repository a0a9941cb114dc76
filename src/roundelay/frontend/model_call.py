"""How the person's model is called: in which mode, and with what their ``inputs`` makes of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from roundelay.errors import JobError
from roundelay.frontend.batch import Batch
from roundelay.frontend.export_adapter import Inputs
from roundelay.frontend.keyed_rng import DEFAULT_GENERATOR_LOCK, generator_states


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
