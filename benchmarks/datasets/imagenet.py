"""ImageNet from a local folder, with a folder for each class: `train/CLASS/*.JPEG` and `val/CLASS/*.JPEG`.

https://www.image-net.org distributes both parts of ILSVRC 2012; images held out lie there in one folder, and go into
those of their classes before (the script valprep.sh of soumith/imagenetloader.torch does that). Fewer classes will do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.datasets import tiny_imagenet
from benchmarks.datasets.tiny_imagenet import Batch, normalised, opened, pillow
from benchmarks.datasets.trouble import existing, refused

SIDE = 224
SHARE, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""Of a part to train on: its share of an image's area, width over height, and how often both are drawn at most."""

REMEDY = (
    "Unpack both parts of ILSVRC 2012 from https://www.image-net.org and put every image into a folder of its class: "
    "train/CLASS/*.JPEG, val/CLASS/*.JPEG."
)

Box = tuple[int, int, int, int]


class Images(tiny_imagenet.Images):
    """Images that are read when they are needed; several threads decode, for Pillow leaves Python's lock meanwhile."""

    __slots__ = ()

    def of(self, rows: Tensor) -> Batch:
        """The middles of those images, normalised: (rows, 3, side, side) and (rows).

        Raises:
            JobError: a file is no image.
        """
        paths = [self.paths[row] for row in rows.tolist()]
        with ThreadPoolExecutor() as pool:
            return stacked(pool.map(partial(middle, side=self.side), paths)), self.labels[rows]

    def shuffled(self, rows: int, seed: int) -> Iterator[Batch]:
        """All images once in full batches, in an order and with parts and mirrorings that depend on the seed."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator)
        for chosen in order.split(rows)[: len(self) // rows]:
            paths = [self.paths[row] for row in chosen.tolist()]
            seeds = torch.randint(2**62, (rows,), generator=generator).tolist()
            with ThreadPoolExecutor() as pool:
                images = stacked(pool.map(augmented, paths, repeat(self.side), seeds))
            yield images, self.labels[chosen]


def read(folder: Path, *, train: bool, side: int = SIDE) -> Images:
    """List the images of a part; none is decoded yet. A class's label is its place among the sorted names.

    Raises:
        JobError: a folder is missing or without images, or a class is held out only.
    """
    pillow()  # its absence is told now, not after an hour
    classes, part = classes_of(folder / "train"), folder / ("train" if train else "val")
    if strange := sorted({*classes_of(part)} - {*classes}):
        raise refused(part / strange[0], "a class that is not in train", "the classes of train", REMEDY)
    found = [(path, label) for label, name in enumerate(classes) for path in _images(part / name)]
    return Images([path for path, _ in found], torch.tensor([label for _, label in found]), side)


@cache
def both(folder: Path, side: int) -> tuple[Images, Images]:
    """Images to train on and held out; listed once for all seeds."""
    return read(folder, train=True, side=side), read(folder, train=False, side=side)


def classes_of(part: Path) -> list[str]:
    """Names of the classes, sorted.

    Raises:
        JobError: the folder is missing, or there is none in it.
    """
    inside = existing(part, "a folder with a folder for each class", REMEDY).iterdir()
    names = sorted(path.name for path in inside if path.is_dir())
    if not names:
        raise refused(part, "no folder in it", "a folder for each class", REMEDY)
    return names


def _images(folder: Path) -> list[Path]:
    paths = sorted(existing(folder, "a folder of images", REMEDY).glob("*.JPEG"))
    if not paths:
        raise refused(folder, "no image", "files called *.JPEG", REMEDY)
    return paths


def augmented(path: Path, side: int, seed: int) -> Tensor:
    """A part of an image, mirrored or not, both as the seed says: (side, side, 3), uint8.

    Raises:
        JobError: the file is no image.
    """
    image, generator = opened(path), torch.Generator().manual_seed(seed)
    scaled = image.crop(part_of(image.size, generator)).resize((side, side), pillow().Resampling.BILINEAR)
    if torch.rand((), generator=generator) < 0.5:
        scaled = scaled.transpose(pillow().Transpose.FLIP_LEFT_RIGHT)
    return pixels_of(scaled)


def part_of(size: tuple[int, int], generator: torch.Generator) -> Box:
    """Left, top, right and bottom of a part drawn within the limits; if none fits, the largest one in the middle."""
    width, height = size
    for _ in range(TRIES):
        area, shape, across, down = torch.rand(4, generator=generator).tolist()
        area = width * height * (SHARE[0] + area * (SHARE[1] - SHARE[0]))
        shape = RATIO[0] * (RATIO[1] / RATIO[0]) ** shape  # 3 : 4 is as likely as 4 : 3
        wide, high = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < wide <= width and 0 < high <= height:
            left, top = int(across * (width - wide + 1)), int(down * (height - high + 1))
            return left, top, left + wide, top + high
    return centred(size, (min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))))


def middle(path: Path, side: int) -> Tensor:
    """The middle of an image whose shorter side is scaled to 8 / 7 of what is cut, 256 for 224: (side, side, 3), uint8.

    Raises:
        JobError: the file is no image.
    """
    image, short = opened(path), side * 8 // 7
    width, height = (length * short // min(image.size) for length in image.size)
    scaled = image.resize((width, height), pillow().Resampling.BILINEAR)
    return pixels_of(scaled.crop(centred(scaled.size, (side, side))))


def centred(size: tuple[int, int], part: tuple[int, int]) -> Box:
    """Left, top, right and bottom of a part of that size in the middle."""
    left, top = ((whole - length) // 2 for whole, length in zip(size, part, strict=True))
    return left, top, left + part[0], top + part[1]


def pixels_of(image: Any) -> Tensor:
    """(height, width, 3), uint8."""
    return torch.from_numpy(np.array(image))


def stacked(images: Iterator[Tensor]) -> Tensor:
    """Images (side, side, 3) as a batch, normalised: (rows, 3, side, side)."""
    pixels = torch.stack(list(images)).permute(0, 3, 1, 2).contiguous()
    return normalised(pixels.float() / 255)
