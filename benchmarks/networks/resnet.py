"""Residual networks (He et al., 2015): 18, 50 and 101 layers, for large images and for those of CIFAR."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
"""Depth to the blocks of each of the four stretches; from 50 on a block has a bottleneck."""


class Basic(nn.Module):
    """Two convolutions of 3 x 3 beside a way past them."""

    widening = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm = convolution(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.second, self.norm_behind = convolution(width, width, 3, 1), nn.BatchNorm2d(width)
        self.past = past(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, inputs, side, side) to (rows, width, side / stride, side / stride)."""
        inner = F.relu(self.norm(self.first(x)))
        return F.relu(self.norm_behind(self.second(inner)) + self.past(x))


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, the last one four times as wide, beside a way past them."""

    widening = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.widening * width
        self.narrow, self.norm = convolution(inputs, width, 1, 1), nn.BatchNorm2d(width)
        self.middle, self.norm_of_middle = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.widen, self.norm_behind = convolution(width, outputs, 1, 1), nn.BatchNorm2d(outputs)
        self.past = past(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, inputs, side, side) to (rows, 4 width, side / stride, side / stride)."""
        inner = F.relu(self.norm(self.narrow(x)))
        inner = F.relu(self.norm_of_middle(self.middle(inner)))
        return F.relu(self.norm_behind(self.widen(inner)) + self.past(x))


def convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Conv2d:
    """Without a bias, for a norm follows."""
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


def past(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The way past a block: nothing, or a convolution of 1 x 1 where shapes differ."""
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


def stem(width: int, small: bool) -> list[nn.Module]:
    """What comes first; for small images, as CDP (2024), Sect. 5: 3 x 3, no stride, no pooling."""
    if small:
        return [convolution(3, width, 3, 1), nn.BatchNorm2d(width), nn.ReLU()]
    return [convolution(3, width, 7, 2), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]


def resnet(depth: int, classes: int, *, small: bool = False) -> nn.Module:
    """Images (rows, 3, side, side) to logits (rows, classes).

    Args:
        depth: 18, 50 or 101.
        classes: number of classes.
        small: whether images are small, as those of CIFAR.
    """
    return residual(Basic if depth < 50 else Bottleneck, BLOCKS[depth], classes, small=small)


def residual(
    block: type[Basic] | type[Bottleneck],
    counts: Sequence[int],
    classes: int,
    *,
    width: int = 64,
    small: bool = False,
) -> nn.Module:
    """The same, of any size.

    Args:
        block: what it is made of.
        counts: blocks of each stretch.
        classes: number of classes.
        width: of the stem and the first stretch; every further stretch is twice as wide.
        small: whether images are small, as those of CIFAR.
    """
    layers, inputs = stem(width, small), width
    for stretch, count in enumerate(counts):
        narrow = width << stretch
        for place in range(count):
            layers.append(block(inputs, narrow, 2 if stretch and not place else 1))
            inputs = block.widening * narrow
    made = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    for module in made.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return made
