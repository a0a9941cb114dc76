"""Tiny-ImageNet from a local folder, as it is distributed (http://cs231n.stanford.edu/tiny-imagenet-200.zip).

`wnids.txt` names the classes, one on each line. Images to train on are `train/CLASS/images/*.JPEG`; those held out are
`val/images/*.JPEG`, and `val/val_annotations.txt` says their class: file name, class, and a box, with tabs between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.datasets.trouble import existing, refused
from roundelay.optional_packages import optional

SIDE = 224
"""PipeOptim (2023), Sect. V-A: images are scaled up from 64 x 64."""

MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
REMEDY = "Unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip and name its folder tiny-imagenet-200."

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Images:
    """Images that are read when they are needed.

    Args:
        paths: their files.
        labels: (images), int64: places in wnids.txt.
        side: height and width that they are scaled to.
    """

    paths: Sequence[Path]
    labels: Tensor
    side: int

    def __len__(self) -> int:
        return len(self.paths)

    def of(self, rows: Tensor) -> Batch:
        """Those images, normalised: (rows, 3, side, side) and (rows).

        Raises:
            JobError: a file is no image.
        """
        pixels = torch.stack([decoded(self.paths[row], self.side) for row in rows.tolist()])
        return normalised(pixels), self.labels[rows]

    def shuffled(self, rows: int, seed: int) -> Iterator[Batch]:
        """All images once in full batches, in an order and with mirrorings that depend on the seed."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self), generator=generator)
        for chosen in order.split(rows)[: len(self) // rows]:
            images, labels = self.of(chosen)
            mirrored = torch.rand(len(chosen), 1, 1, 1, generator=generator) < 0.5
            yield torch.where(mirrored, images.flip(3), images), labels

    def in_order(self, rows: int) -> Iterator[Batch]:
        """All images once; the last batch may be short."""
        for chosen in torch.arange(len(self)).split(rows):
            yield self.of(chosen)


def read(folder: Path, *, train: bool, side: int = SIDE) -> Images:
    """List the images of a part; none is decoded yet.

    Raises:
        JobError: folder or file is missing, or a line or a class is none.
    """
    pillow()  # its absence is told now, not after an hour
    existing(folder, "the folder tiny-imagenet-200", REMEDY)
    classes = {name: n for n, name in enumerate(_lines(folder / "wnids.txt"))}
    found = _to_train_on(folder, classes) if train else _held_out(folder, classes)
    if not found:
        raise refused(folder / ("train" if train else "val"), "no image", "files called *.JPEG", REMEDY)
    return Images([path for path, _ in found], torch.tensor([label for _, label in found]), side)


def _to_train_on(folder: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    return [
        (path, label)
        for name, label in classes.items()
        for path in sorted(existing(folder / "train" / name / "images", "a folder of images", REMEDY).glob("*.JPEG"))
    ]


def _held_out(folder: Path, classes: dict[str, int]) -> list[tuple[Path, int]]:
    annotations = folder / "val" / "val_annotations.txt"
    found = []
    for number, line in enumerate(_lines(annotations), 1):
        name, _, rest = line.partition("\t")
        kind = rest.partition("\t")[0]
        if kind not in classes:
            raise refused(annotations, f"line {number}: {line!r}", "a file's name, a tab, a class of wnids.txt", REMEDY)
        found.append(
            (existing(folder / "val" / "images" / name, "an image that the annotations name", REMEDY), classes[kind])
        )
    return found


def _lines(path: Path) -> list[str]:
    try:
        return existing(path, "a file of Tiny-ImageNet", REMEDY).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise refused(path, f"{type(error).__name__}: {error}", "a text", REMEDY) from error


def decoded(path: Path, side: int) -> Tensor:
    """(3, side, side), between 0 and 1.

    Raises:
        JobError: the file is no image.
    """
    scaled = opened(path).resize((side, side), pillow().Resampling.BILINEAR)
    return torch.from_numpy(np.array(scaled)).permute(2, 0, 1).float() / 255


def opened(path: Path) -> Any:
    """Pillow's image, in red, green and blue.

    Raises:
        JobError: the file is no image.
    """
    try:
        with pillow().open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError) as error:
        raise refused(path, f"{type(error).__name__}: {error}", "an image", "Unpack the data again.") from error


def normalised(pixels: Tensor) -> Tensor:
    """(rows, 3, height, width), between 0 and 1, with mean 0 and spread 1 over ImageNet."""
    mean, spread = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, SPREAD))
    return (pixels - mean) / spread


def pillow() -> Any:
    """Pillow's module of images.

    Raises:
        UsageError: it is not installed.
    """
    return optional("PIL.Image", "images of ImageNet", "pillow", ".")
