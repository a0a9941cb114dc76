"""GoogLeNet (Szegedy et al., 2014) and Inception-V3 (Szegedy et al., 2015), with BatchNorm and without side heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

Size = int | tuple[int, int]

GOOGLENET: tuple[tuple[int, int, int, int, int, int] | None, ...] = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    None,
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    None,
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)
"""Table 1 of the first paper: widths of 1 x 1; 1 x 1, 3 x 3; 1 x 1, 5 x 5; behind the pooling. None: a pooling."""


class Branches(nn.Module):
    """Ways beside each other, whose channels are put behind each other."""

    def __init__(self, *ways: nn.Module) -> None:
        super().__init__()
        self.ways = nn.ModuleList(ways)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, inputs, height, width) to (rows, sum of the ways' channels, ...)."""
        return torch.cat([way(x) for way in self.ways], 1)


def convolution(inputs: int, outputs: int, size: Size, stride: int = 1, *, padded: bool = True) -> nn.Sequential:
    """A convolution without bias, BatchNorm and ReLU; `padded`: as large as its input, but for the stride."""
    sides = (size, size) if isinstance(size, int) else size
    padding = tuple(side // 2 for side in sides) if padded else 0
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, sides, stride, padding, bias=False), nn.BatchNorm2d(outputs, 1e-3), nn.ReLU()
    )


def chain(inputs: int, *steps: tuple[int, Size]) -> nn.Sequential:
    """Convolutions one behind the other: the width and size of each."""
    made: list[nn.Module] = []
    for outputs, size in steps:
        made.append(convolution(inputs, outputs, size))
        inputs = outputs
    return nn.Sequential(*made)


def googlenet(classes: int, *, small: bool = False) -> nn.Module:
    """Images (rows, 3, 224, 224), or small ones (rows, 3, 32, 32), to logits (rows, classes)."""
    stem: list[nn.Module] = [
        convolution(3, 64, 7, 2),
        nn.MaxPool2d(3, 2, 1),
        convolution(64, 64, 1),
        convolution(64, 192, 3),
        nn.MaxPool2d(3, 2, 1),
    ]
    layers, inputs = [convolution(3, 192, 3)] if small else stem, 192
    for widths in GOOGLENET:
        if widths is None:
            layers.append(nn.MaxPool2d(3, 2, 1))
            continue
        one, to_three, three, to_five, five, pooled = widths
        layers.append(
            Branches(
                chain(inputs, (one, 1)),
                chain(inputs, (to_three, 1), (three, 3)),
                chain(inputs, (to_five, 1), (five, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), convolution(inputs, pooled, 1)),
            )
        )
        inputs = one + three + five + pooled
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(inputs, classes))


def inception_v3(classes: int) -> nn.Module:
    """Images (rows, 3, side, side), of 75 pixels or more, to logits (rows, classes); the paper's have 299."""
    return nn.Sequential(
        convolution(3, 32, 3, 2, padded=False),
        convolution(32, 32, 3, padded=False),
        convolution(32, 64, 3),
        nn.MaxPool2d(3, 2),
        convolution(64, 80, 1, padded=False),
        convolution(80, 192, 3, padded=False),
        nn.MaxPool2d(3, 2),
        *(_fives(inputs, pooled) for inputs, pooled in ((192, 32), (256, 64), (288, 64))),
        _to_768(),
        *(_sevens(width) for width in (128, 160, 160, 192)),
        _to_1280(),
        _wide(1280),
        _wide(2048),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(2048, classes),
    )


def _pooled(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), convolution(inputs, outputs, 1))


def _fives(inputs: int, pooled: int) -> nn.Module:
    """Figure 5 of the second paper; the 5 x 5 of one way is kept, as in the authors' own network."""
    return Branches(
        chain(inputs, (64, 1)),
        chain(inputs, (48, 1), (64, 5)),
        chain(inputs, (64, 1), (96, 3), (96, 3)),
        _pooled(inputs, pooled),
    )


def _to_768() -> nn.Module:
    """Half the side: Figure 10."""
    return Branches(
        convolution(288, 384, 3, 2, padded=False),
        nn.Sequential(chain(288, (64, 1), (96, 3)), convolution(96, 96, 3, 2, padded=False)),
        nn.MaxPool2d(3, 2),
    )


def _sevens(width: int) -> nn.Module:
    """Figure 6, with n = 7."""
    return Branches(
        chain(768, (192, 1)),
        chain(768, (width, 1), (width, (1, 7)), (192, (7, 1))),
        chain(768, (width, 1), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7))),
        _pooled(768, 192),
    )


def _to_1280() -> nn.Module:
    """Half the side again."""
    return Branches(
        nn.Sequential(chain(768, (192, 1)), convolution(192, 320, 3, 2, padded=False)),
        nn.Sequential(chain(768, (192, 1), (192, (1, 7)), (192, (7, 1))), convolution(192, 192, 3, 2, padded=False)),
        nn.MaxPool2d(3, 2),
    )


def _wide(inputs: int) -> nn.Module:
    """Figure 7: the last convolutions side by side."""

    def both(width: int) -> Branches:
        return Branches(convolution(width, 384, (1, 3)), convolution(width, 384, (3, 1)))

    return Branches(
        chain(inputs, (320, 1)),
        nn.Sequential(chain(inputs, (384, 1)), both(384)),
        nn.Sequential(chain(inputs, (448, 1), (384, 3)), both(384)),
        _pooled(inputs, 192),
    )
