"""A program in plain PyTorch, and by Roundelay; and how they differ."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

import roundelay
from roundelay import Job
from tests.programs.table import Make

STEPS = 4
Tensors = dict[str, torch.Tensor]


def fresh(make: Make) -> Job:
    """The job, made from the same random state."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return make()


def state(model: torch.nn.Module) -> Tensors:
    """Copies of weights and buffers."""
    return {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}


def trained_plainly(make: Make) -> tuple[list[float], Tensors]:
    """Losses, and the state behind the last update."""
    job = fresh(make)
    model, losses = job.model, []
    if not model.training or type(model).train is not torch.nn.Module.train:
        model.train()
    optimizer = job.optimizer(list(model.named_parameters()))
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    while len(losses) < STEPS:
        for batch in job.batches(0):
            args, kwargs = job.inputs(batch) if job.inputs else (batch[:-1], {})
            optimizer.zero_grad()
            loss = _scalar(job.loss(model(*args, **kwargs), batch))
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            losses.append(float(loss))
            if len(losses) == STEPS:
                break
    return losses, state(model)


def _scalar(value: Any) -> torch.Tensor:
    value = value["loss"] if isinstance(value, dict) else value
    return value[0] / value[1] if isinstance(value, tuple) else value


def trained(make: Make, **how: Any) -> tuple[list[float], Tensors]:
    """The same by Roundelay."""
    job = fresh(make)
    done = roundelay.train(job, workers=2, steps=STEPS, **how)
    return [update.loss for update in done.updates], state(job.model)


def difference(plain: tuple[list[float], Tensors], ours: tuple[list[float], Tensors], *, rounding: bool = False) -> str:
    """The first loss or tensor that differs, in any bit or by more than rounding; empty if none does."""
    near = 1e-5 if rounding else 0.0
    if not torch.allclose(torch.tensor(plain[0]), torch.tensor(ours[0]), rtol=near, atol=0.0):
        return f"losses {plain[0]} and {ours[0]}"
    if plain[1].keys() != ours[1].keys():
        return f"{plain[1].keys() ^ ours[1].keys()}"
    pairs = [(name, tensor, ours[1][name]) for name, tensor in plain[1].items()]
    return next((name for name, a, b in pairs if not torch.allclose(a, b, rtol=near, atol=near)), "")
