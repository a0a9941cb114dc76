"""What this machine computes with: a digest of a fixed probe.

The same operation gives other last bits on another processor: softmax and attention where vectors are wider, all of
them without vectors. Two machines on which the probe gives the same bits may be expected to agree; on others a run
cannot be replayed bit for bit.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional

from roundelay.observe.digest import digest


@cache
def arithmetic() -> str:
    """Sixteen hexadecimal digits of what a fixed probe gives on this machine's CPU, with one intra-op thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return digest(_probe())
    finally:
        torch.set_num_threads(before)


def _probe() -> dict[str, torch.Tensor]:
    """Nine operations and their gradient, on numbers that no generator makes."""
    places = torch.arange(48 * 64, dtype=torch.float32)
    x = (torch.frac(places * 0.754877666) - 0.5).reshape(48, 64).requires_grad_()
    weight = (torch.frac(places * 0.569840291) - 0.5).reshape(48, 64)
    heads = x.reshape(1, 4, 12, 64)
    found = {
        "linear": functional.linear(x, weight),
        "softmax": functional.softmax(x, -1),
        "layer_norm": functional.layer_norm(x, (64,)),
        "gelu": functional.gelu(x),
        "attention": functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
        "conv": functional.conv1d(x.reshape(1, 48, 64), weight.reshape(16, 48, 4)),
        "exp": x.exp(),
        "norm": torch.linalg.vector_norm(x),
        "mean": x.mean(),
    }
    total = torch.stack([value.double().square().mean() for value in found.values()]).sum()
    (gradient,) = torch.autograd.grad(total, x)
    return {**found, "gradient": gradient}
