"""The chains of linear layers that AutoDDL is tried on (Sects. 1, 4.6, 5.1)."""

from __future__ import annotations

from itertools import pairwise

from roundelay.planner.autoddl.space import Chain, Linear

FIGURE_8_WIDTHS = (32768, 16384, 4096, 2048, 512)


def mlp(widths: tuple[int, ...], batch: int) -> Chain:
    """A multilayer perceptron on data in any layout (Sect. 4.6).

    Args:
        widths: features of the data and of each layer's output.
        batch: samples.
    """
    layers = [Linear(f"layer {k}", *pair) for k, pair in enumerate(pairwise(widths), 1)]
    return Chain(layers, batch, "free")


def attention(width: int, tokens: int) -> Chain:
    """The two linears of an attention layer between equal ones, without sums of weight gradients (Fig. 3)."""
    layers = [Linear("qkv", width, 3 * width, summed=0), Linear("projection", width, width, summed=0)]
    return Chain(layers, tokens, "last")


def transformer(width: int, tokens: int) -> Chain:
    """The four linears of a transformer block between equal ones, which share a strategy (Sect. 4.5.1)."""
    pairs = {"qkv": (1, 3), "projection": (1, 1), "mlp in": (1, 4), "mlp out": (4, 1)}
    return Chain([Linear(name, a * width, b * width) for name, (a, b) in pairs.items()], tokens, "last")


def vgg13(batch: int) -> Chain:
    """VGG-13's three dense layers after data-parallel convolutions (Sects. 4.5.3, 5.1.1)."""
    layers = [Linear(f"dense {k}", *pair) for k, pair in enumerate(pairwise((25088, 4096, 4096, 1000)), 1)]
    return Chain(layers, batch, "rows", replicated=9_404_992)
