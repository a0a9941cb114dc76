"""A job of milliseconds: a small network on random data. `make` lets a test replace any part of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import roundelay

BATCHES = 6
ROWS = 8


def model() -> nn.Module:
    """Four linear layers with a dropout: five pieces and more to cut, random numbers, buffers."""
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.ReLU(),
        nn.BatchNorm1d(16),
        nn.Linear(16, 16),
        nn.Dropout(0.1),
        nn.Tanh(),
        nn.Linear(16, 16),
        nn.GELU(),
        nn.Linear(16, 3),
    )


def batches(epoch: int) -> Iterator[dict[str, torch.Tensor]]:
    """Six batches of eight rows, other ones in every epoch."""
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(BATCHES):
        x = torch.randn(ROWS, 6, generator=generator)
        yield {"x": x, "y": (x[:, 0] > 0).long() + (x[:, 1] > 0).long()}


def loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy."""
    return functional.cross_entropy(outputs, batch["y"])


def inputs(batch: dict[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The model takes x alone."""
    return (batch["x"],), {}


def optimizer(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Adam: momentum for the predictor, state for the checkpoint."""
    return torch.optim.Adam(named, lr=3e-3)


def make(**changes: Any) -> roundelay.Job:
    """The job, with fields replaced."""
    fields: dict[str, Any] = {
        "model": changes.pop("model", None) or model(),
        "loss": loss,
        "batches": batches,
        "inputs": inputs,
        "optimizer": optimizer,
    }
    return roundelay.Job(**(fields | changes))


def job(seed: int) -> roundelay.Job:
    """The job as it is."""
    return make()
