"""CIFAR-10 and CIFAR-100 from a local folder, in their *binary* version: plain bytes, nothing to unpickle.

https://www.cs.toronto.edu/~kriz/cifar.html describes the format: a record is one byte of label (CIFAR-100: one of the
coarse class, one of the fine one) and 3072 bytes of pixels, a colour after the other, each row by row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.datasets.trouble import existing, refused

SIDE, PIXELS = 32, 3 * 32 * 32
REMEDY = "Unpack the binary version of https://www.cs.toronto.edu/~kriz/cifar.html and name its folder."

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Kind:
    """One of the two sets.

    Args:
        classes: number of classes.
        labels: bytes of label in a record; the last of them counts.
        train: files to train on.
        test: files held out.
        mean: of each colour, pixels between 0 and 1.
        spread: standard deviation of each colour.
    """

    classes: int
    labels: int
    train: tuple[str, ...]
    test: tuple[str, ...]
    mean: tuple[float, float, float]
    spread: tuple[float, float, float]


CIFAR_10 = Kind(
    classes=10,
    labels=1,
    train=tuple(f"data_batch_{n}.bin" for n in range(1, 6)),
    test=("test_batch.bin",),
    mean=(0.4914, 0.4822, 0.4465),
    spread=(0.2470, 0.2435, 0.2616),
)
CIFAR_100 = Kind(
    classes=100,
    labels=2,
    train=("train.bin",),
    test=("test.bin",),
    mean=(0.491, 0.482, 0.447),  # as in PipeOptim (2023), Sect. V-A
    spread=(0.247, 0.243, 0.262),
)


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """A set of images.

    Args:
        pixels: (images, 3, 32, 32), uint8.
        labels: (images), int64.
        kind: which set they are of.
    """

    pixels: Tensor
    labels: Tensor
    kind: Kind

    def __len__(self) -> int:
        return len(self.labels)

    def normalised(self, rows: Tensor) -> Batch:
        """Those images with mean 0 and spread 1 over the whole set, and their labels."""
        return _normalised(self.pixels[rows], self.kind), self.labels[rows]

    def shuffled(self, rows: int, seed: int) -> Iterator[Batch]:
        """All images once in full batches, in an order and with crops and mirrorings that depend on the seed."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator)
        for chosen in order.split(rows)[: len(self) // rows]:
            yield _normalised(augmented(self.pixels[chosen], generator), self.kind), self.labels[chosen]

    def in_order(self, rows: int) -> Iterator[Batch]:
        """All images once, as they lie in the files; the last batch may be short."""
        for chosen in torch.arange(len(self)).split(rows):
            yield self.normalised(chosen)


def read(folder: Path, kind: Kind, *, train: bool) -> Images:
    """Read the files of a set.

    Raises:
        JobError: folder or file is missing, or a file is none of this format.
    """
    names = kind.train if train else kind.test
    existing(folder, f"a folder with {', '.join(names)}", REMEDY)
    records = torch.cat([_records(existing(folder / name, "a file of CIFAR", REMEDY), kind) for name in names])
    pixels = records[:, kind.labels :].reshape(-1, 3, SIDE, SIDE)
    return Images(pixels, records[:, kind.labels - 1].long(), kind)


def _records(path: Path, kind: Kind) -> Tensor:
    """(records, bytes of one), uint8."""
    size = kind.labels + PIXELS
    try:
        content = path.read_bytes()
    except OSError as error:
        raise refused(path, str(error.strerror), "a file that can be read", REMEDY) from error
    if not content or len(content) % size:
        raise refused(path, f"{len(content)} bytes", f"records of {size} bytes each", REMEDY)
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, size)
    highest = int(records[:, kind.labels - 1].max())
    if highest >= kind.classes:
        raise refused(path, f"a label of {highest}", f"labels below {kind.classes}", REMEDY)
    return records


def augmented(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Each image shifted by up to 4 pixels over a black border, and mirrored or not: (rows, 3, 32, 32)."""
    rows = len(pixels)
    bordered = torch.nn.functional.pad(pixels, (4, 4, 4, 4))
    down, across = (torch.randint(9, (rows, 1), generator=generator) for _ in range(2))
    mirrored = torch.rand(rows, 1, generator=generator) < 0.5
    places = torch.arange(SIDE)
    columns = across + torch.where(mirrored, SIDE - 1 - places, places)
    picked = bordered.permute(0, 2, 3, 1)[
        torch.arange(rows)[:, None, None], (down + places)[:, :, None], columns[:, None, :]
    ]
    return picked.permute(0, 3, 1, 2).contiguous()


def _normalised(pixels: Tensor, kind: Kind) -> Tensor:
    mean, spread = (torch.tensor(values).view(3, 1, 1) for values in (kind.mean, kind.spread))
    return (pixels.float() / 255 - mean) / spread
