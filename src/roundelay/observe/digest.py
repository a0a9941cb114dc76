"""Fingerprints of tensors, to find the first thing that two runs computed differently."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def digest(values: Mapping[str, object]) -> str:
    """Sixteen hexadecimal digits that depend on every tensor's name, dtype, shape and bits; nothing else counts."""
    made = hashlib.blake2b(digest_size=8)
    for name in sorted(values):
        value = values[name]
        if isinstance(value, torch.Tensor):
            made.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            made.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()
