"""The vision transformer (Dosovitskiy et al., 2020), by default ViT-B/16, without dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCH = 16
"""Height and width of a patch."""


class Tokens(nn.Module):
    """The class token and a token for each patch, with learned positions."""

    def __init__(self, side: int, width: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, PATCH, PATCH)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, (side // PATCH) ** 2 + 1, width), std=0.02))

    def forward(self, images: Tensor) -> Tensor:
        """(rows, 3, side, side) to (rows, patches + 1, width)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(patches.size(0), -1, -1), patches], 1) + self.positions


class Attention(nn.Module):
    """Attention of every token to all."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.joined = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, tokens, width) to the same shape."""
        query, key, value = (self.by_head(layer(x)) for layer in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value)
        joined: Tensor = self.joined(mixed.transpose(1, 2).flatten(2))
        return joined

    def by_head(self, x: Tensor) -> Tensor:
        """(rows, tokens, width) to (rows, heads, tokens, width / heads)."""
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class Block(nn.Module):
    """Attention and a perceptron four times as wide, each behind a norm and beside a way past it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width, 1e-6), Attention(width, heads)
        self.norm_behind = nn.LayerNorm(width, 1e-6)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, tokens, width) to the same shape."""
        x = x + self.attention(self.norm(x))
        changed: Tensor = x + self.perceptron(self.norm_behind(x))
        return changed


class FirstToken(nn.Module):
    """What the class token has become."""

    def forward(self, x: Tensor) -> Tensor:
        """(rows, tokens, width) to (rows, width)."""
        return x[:, 0]


def vit(classes: int, *, side: int = 224, width: int = 768, layers: int = 12, heads: int = 12) -> nn.Module:
    """Images (rows, 3, side, side) to logits (rows, classes).

    Args:
        classes: number of classes.
        side: height and width of an image, a multiple of the patches'.
        width: of a token.
        layers: number of blocks.
        heads: of each attention; they share the width.
    """
    made = nn.Sequential(
        Tokens(side, width),
        *(Block(width, heads) for _ in range(layers)),
        nn.LayerNorm(width, 1e-6),
        FirstToken(),
        nn.Linear(width, classes),
    )
    for module in made.modules():
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
    return made
