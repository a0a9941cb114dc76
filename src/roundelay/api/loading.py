"""Load a checkpoint into the plain model."""

from __future__ import annotations

from pathlib import Path

import torch

from roundelay.checkpoint.atomic_files import present
from roundelay.checkpoint.checkpoint import load_into


def load(model: torch.nn.Module, path: str | Path, *, averaged: bool = False) -> torch.nn.Module:
    """Put a checkpoint's weights and buffers into ``model``, which needs nothing of Roundelay.

    Args:
        model: of the class and sizes that were trained.
        path: a checkpoint folder, or a run folder that holds one.
        averaged: load the moving averages (``ema``) of the weights in their place. Of an optimizer with an ``eval()``
            (schedule-free) the weights are loaded as that makes them, in any case.

    Raises:
        CheckpointError: it is missing, damaged, or of another model; or it has no averages.
    """
    folder = Path(path)
    inner = folder / "checkpoint"
    return load_into(model, inner if present(inner).exists() else folder, averaged=averaged)
