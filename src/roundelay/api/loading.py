"""Load a checkpoint into the plain model."""

from __future__ import annotations

from pathlib import Path

import torch

from roundelay.observe.checkpoint import load_into
from roundelay.observe.files import present


def load(model: torch.nn.Module, path: str | Path) -> torch.nn.Module:
    """Put a checkpoint's weights and buffers into ``model``, which needs nothing of Roundelay.

    Args:
        model: of the class and sizes that were trained.
        path: a checkpoint folder, or a run folder that holds one.

    Raises:
        CheckpointError: it is missing, damaged, or of another model.
    """
    folder = Path(path)
    inner = folder / "checkpoint"
    return load_into(model, inner if present(inner).exists() else folder)
