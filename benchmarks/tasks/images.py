"""Images made by a recipe whose Bayes error is known: no classifier can do better, whatever it is.

A class is a pattern of three colours, drawn once. An image is its class's pattern, rolled by any number of rows and
columns, plus noise between -NOISE and NOISE in every pixel. Two classes' patterns, however rolled, differ somewhere by
more than twice that, so an image tells its class with certainty. Then the label is replaced, with probability FLIPPED,
by one of the other classes: this is what nobody can know, and the Bayes error is FLIPPED exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import roundelay
from roundelay.job import OptimizerFactory, SchedulerFactory

CLASSES, COLOURS, SIDE = 10, 3, 8
NOISE, FLIPPED = 1.0, 0.1
ROWS, UPDATES = 32, 32  # of a batch; in an epoch
HELD_OUT = 1000
BAYES_ACCURACY = 1.0 - FLIPPED

Batch = tuple[Tensor, Tensor]


@cache
def patterns() -> Tensor:
    """(CLASSES, COLOURS, SIDE, SIDE), the same for every seed."""
    return torch.randn(CLASSES, COLOURS, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def least_difference() -> float:
    """Over all pairs of classes and all ways to roll one of them: the difference in the pixel that differs most."""
    rolled = torch.stack([patterns().roll((i, j), (2, 3)) for i in range(SIDE) for j in range(SIDE)])
    apart = (patterns()[None, :, None] - rolled[:, None]).abs().amax((3, 4, 5))  # rolls, classes, classes
    return float(apart.masked_fill(torch.eye(CLASSES, dtype=torch.bool), torch.inf).min())


def draw(rows: int, seed: int) -> Batch:
    """Images (rows, COLOURS, SIDE, SIDE) and labels (rows): the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int, *size: int) -> Tensor:
        return torch.randint(limit, size, generator=generator)

    kinds = below(CLASSES, rows)
    down, across = below(SIDE, rows, 1), below(SIDE, rows, 1)
    places = torch.arange(SIDE)
    turned = (
        patterns()[kinds]
        .permute(0, 2, 3, 1)[
            torch.arange(rows)[:, None, None],
            ((places + down) % SIDE)[:, :, None],
            ((places + across) % SIDE)[:, None, :],
        ]
        .permute(0, 3, 1, 2)
    )
    noise = NOISE * (2 * torch.rand(turned.shape, generator=generator) - 1)
    wrong = (kinds + 1 + below(CLASSES - 1, rows)) % CLASSES
    flipped = torch.rand(rows, generator=generator) < FLIPPED
    return (turned + noise).contiguous(), torch.where(flipped, wrong, kinds)


def batches(seed: int, epoch: int) -> Iterator[Batch]:
    """UPDATES batches of images that nobody has seen before."""
    images, labels = draw(ROWS * UPDATES, 1_000_003 * (seed + 1) + epoch)
    yield from zip(images.split(ROWS), labels.split(ROWS), strict=True)


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a way past them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False, padding_mode="circular")
        self.norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False, padding_mode="circular")
        self.norm_behind = nn.BatchNorm2d(outputs)
        self.past = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if (inputs, stride) != (outputs, 1) else None

    def forward(self, x: Tensor) -> Tensor:
        """(rows, inputs, side, side) to (rows, outputs, side / stride, side / stride)."""
        inner = self.norm_behind(self.second(F.relu(self.norm(self.first(x)))))
        return F.relu(inner + (x if self.past is None else self.past(x)))


class ResNet(nn.Module):
    """A stem and three residual blocks."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(COLOURS, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(
            Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 2 * width, 1)
        )
        self.head = nn.Linear(2 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits (rows, CLASSES)."""
        logits: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return logits


def vgg(width: int = 12) -> nn.Module:
    """Convolutions without a way past them and without BatchNorm, then two linear layers: VGG-16 in small."""

    def convolution(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, padding_mode="circular"), nn.ReLU()]

    return nn.Sequential(
        *convolution(COLOURS, width),
        *convolution(width, width),
        nn.MaxPool2d(2),
        *convolution(width, 2 * width),
        *convolution(2 * width, 2 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 4 * width),
        nn.ReLU(),
        nn.Linear(4 * width, CLASSES),
    )


NETWORKS = {"resnet": ResNet, "vgg": vgg}


@torch.no_grad()
def evaluate(model: nn.Module) -> dict[str, float]:
    """The share of held-out labels that is said first, and the share that is among the first five."""
    images, labels = draw(HELD_OUT, 0)
    said = torch.cat([model(part) for part in images.split(250)]).topk(5).indices == labels[:, None]
    return {"accuracy": float(said[:, 0].float().mean()), "top5": float(said.any(1).float().mean())}


def job(
    seed: int, optimizer: OptimizerFactory, network: str = "resnet", scheduler: SchedulerFactory | None = None
) -> roundelay.Job:
    """The job; `network` is a key of NETWORKS."""
    return roundelay.Job(
        model=NETWORKS[network](),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: batches(seed, epoch),
        optimizer=optimizer,
        scheduler=scheduler,
        evaluate=evaluate,
    )
