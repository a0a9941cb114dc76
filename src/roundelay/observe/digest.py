"""Digests of tensors, to find the first value that two runs computed differently."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def digest(values: Mapping[str, object]) -> str:
    """Sixteen hexadecimal digits of the tensors' names, dtypes, shapes and bits; other values are ignored."""
    hashed = hashlib.blake2b(digest_size=8)
    for name in sorted(values):
        value = values[name]
        if isinstance(value, torch.Tensor):
            hashed.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            if value.numel():  # an expanded tensor without elements has strides that no view takes
                hashed.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
