"""Readers of local data sets, on files that are written here in the same formats."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmarks.datasets import cifar, imdb, tiny_imagenet
from roundelay.errors import JobError, UsageError

IMAGES = 5


def write_cifar(folder: Path, kind: cifar.Kind, images: int = IMAGES) -> Tensor:
    """Files of the set, `images` in each; what the first file holds: (images, bytes of a record)."""
    folder.mkdir()
    made = []
    for number, name in enumerate((*kind.train, *kind.test)):
        generator = torch.Generator().manual_seed(number)
        records = torch.randint(256, (images, kind.labels + cifar.PIXELS), generator=generator).to(torch.uint8)
        records[:, : kind.labels] %= kind.classes
        (folder / name).write_bytes(bytes(records.flatten().tolist()))
        made.append(records)
    return made[0]


@pytest.mark.parametrize("kind", [cifar.CIFAR_10, cifar.CIFAR_100], ids=["10", "100"])
def test_cifar_reads_label_and_pixels_of_every_record(tmp_path: Path, kind: cifar.Kind) -> None:
    first = write_cifar(tmp_path / "data", kind)
    train, test = (cifar.read(tmp_path / "data", kind, train=part) for part in (True, False))
    assert (len(train), len(test)) == (IMAGES * len(kind.train), IMAGES)
    assert torch.equal(train.labels[:IMAGES], first[:, kind.labels - 1].long())
    red_of_second_row = first[2, kind.labels + 32]  # a colour after the other, each row by row
    assert train.pixels[2, 0, 1, 0] == red_of_second_row
    assert train.pixels[2, 2, 31, 31] == first[2, -1]
    pixels, labels = next(iter(train.in_order(3)))
    expected = (float(first[1, kind.labels]) / 255 - kind.mean[0]) / kind.spread[0]
    assert pixels[1, 0, 0, 0] == pytest.approx(expected, rel=1e-5)
    assert labels.tolist() == first[:3, kind.labels - 1].tolist()


def test_an_epoch_of_cifar_has_every_image_once_and_depends_on_the_seed_alone(tmp_path: Path) -> None:
    write_cifar(tmp_path / "data", cifar.CIFAR_10)
    train = cifar.read(tmp_path / "data", cifar.CIFAR_10, train=True)
    labels = torch.cat([part for _, part in train.shuffled(5, seed=1)])
    assert sorted(labels.tolist()) == sorted(train.labels.tolist())
    assert [len(part) for _, part in train.shuffled(10, seed=1)] == [10, 10]  # no short batch
    one, same, other = (next(iter(train.shuffled(10, seed))) for seed in (1, 1, 2))
    assert torch.equal(one[0], same[0])
    assert not torch.equal(one[0], other[0])


def test_a_crop_is_a_shifted_image_mirrored_or_not() -> None:
    pixels = torch.arange(3 * 32 * 32).remainder(251).to(torch.uint8).reshape(1, 3, 32, 32)
    bordered = torch.nn.functional.pad(pixels, (4, 4, 4, 4))
    shifted = {bordered[0, :, i : i + 32, j : j + 32].numpy().tobytes() for i in range(9) for j in range(9)}
    for seed in range(20):
        (cut,) = cifar.augmented(pixels, torch.Generator().manual_seed(seed))
        assert cut.numpy().tobytes() in shifted or cut.flip(2).contiguous().numpy().tobytes() in shifted


def write_tiny_imagenet(folder: Path) -> None:
    """Two classes with two images each to train on, and one held out of the second."""
    colours = {"n01": (250, 10, 10), "n02": (10, 10, 250)}
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("n02\nn01\n")
    for name, colour in colours.items():
        (folder / "train" / name / "images").mkdir(parents=True)
        for number in range(2):
            Image.new("RGB", (64, 64), colour).save(folder / "train" / name / "images" / f"{name}_{number}.JPEG")
    Image.new("L", (64, 64), 128).save(folder / "val" / "images" / "val_0.JPEG")  # grey ones exist too
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\t0\t62\t62\n")


def test_tiny_imagenet_reads_images_with_their_classes(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path / "tiny")
    train = tiny_imagenet.read(tmp_path / "tiny", train=True, side=80)
    test = tiny_imagenet.read(tmp_path / "tiny", train=False, side=80)
    assert (len(train), train.labels.tolist(), test.labels.tolist()) == (4, [0, 0, 1, 1], [1])
    images, labels = next(iter(train.in_order(4)))
    assert images.shape == (4, 3, 80, 80)
    blue, red = images[labels == 0].mean((0, 2, 3)), images[labels == 1].mean((0, 2, 3))
    assert blue[2] > 2 > 0 > blue[0]
    assert red[0] > 2 > 0 > red[2]
    (grey, _) = next(iter(test.in_order(1)))
    assert grey[0, 0].mean() == pytest.approx((128 / 255 - 0.485) / 0.229, abs=0.02)
    assert torch.equal(next(iter(train.shuffled(2, 3)))[0], next(iter(train.shuffled(2, 3)))[0])


REVIEWS = {
    "train/pos/0_9.txt": "A good, good film<br />indeed",
    "train/neg/0_1.txt": "a bad film",
    "test/pos/0_8.txt": "good or strange",
    "test/neg/0_2.txt": "!",
}


def write_imdb(folder: Path) -> None:
    for name, text in REVIEWS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_imdb_numbers_words_by_how_often_they_are_trained_on(tmp_path: Path) -> None:
    write_imdb(tmp_path / "aclImdb")
    train, test = imdb.read(tmp_path / "aclImdb", vocabulary=5, length=4)
    assert train.labels.tolist() == [0, 1]
    # the three that occur twice are known; the rest, and what no one has trained on, is 1; the end counts
    a, film, good = 2, 4, 3
    bad, praise = train.words.tolist()
    assert len({a, film, good}) == 3
    assert bad[0] == imdb.PAD
    assert bad[2] == imdb.UNKNOWN
    assert praise[0] == praise[1] > imdb.UNKNOWN
    assert praise[3] == imdb.UNKNOWN
    assert praise[2] == bad[3] > imdb.UNKNOWN
    assert test.words[1, 1:].tolist() == [praise[0], imdb.UNKNOWN, imdb.UNKNOWN]
    assert test.words[0].tolist() == [imdb.PAD] * 4


def spoilt(folder: Path, name: str, content: bytes | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)


def read_all_of_tiny_imagenet(folder: Path) -> None:
    for part in (True, False):
        list(tiny_imagenet.read(folder, train=part, side=16).in_order(2))


SETS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "cifar-10": (
        lambda folder: write_cifar(folder, cifar.CIFAR_10),
        lambda folder: cifar.read(folder, cifar.CIFAR_10, train=True),
    ),
    "cifar-100": (
        lambda folder: write_cifar(folder, cifar.CIFAR_100),
        lambda folder: cifar.read(folder, cifar.CIFAR_100, train=False),
    ),
    "tiny-imagenet": (write_tiny_imagenet, read_all_of_tiny_imagenet),
    "imdb": (write_imdb, lambda folder: imdb.read(folder, vocabulary=9, length=4)),
}


@pytest.mark.parametrize("name", SETS)
def test_a_missing_folder_is_told_with_where_to_get_it(tmp_path: Path, name: str) -> None:
    with pytest.raises(JobError, match=r"nothing there.*https?://") as error:
        SETS[name][1](tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in str(error.value)


@pytest.mark.parametrize(
    ("name", "file", "content", "words"),
    [
        ("cifar-10", "data_batch_3.bin", None, "nothing there"),
        ("cifar-10", "data_batch_3.bin", b"\1" * 3000, "3000 bytes"),
        ("cifar-10", "data_batch_3.bin", b"", "0 bytes"),
        ("cifar-10", "data_batch_1.bin", b"\12" + b"\0" * 3072, "a label of 10"),
        ("cifar-100", "test.bin", b"\0\144" + b"\0" * 3072, "a label of 100"),
        ("tiny-imagenet", "wnids.txt", None, "nothing there"),
        ("tiny-imagenet", "wnids.txt", b"n01\nn02\nn03\n", "n03"),
        ("tiny-imagenet", "val/val_annotations.txt", b"val_0.JPEG n01\n", "line 1"),
        ("tiny-imagenet", "val/val_annotations.txt", b"val_7.JPEG\tn01\n", "val_7.JPEG"),
        ("tiny-imagenet", "train/n01/images/n01_0.JPEG", b"no image", "n01_0.JPEG"),
        ("tiny-imagenet", "train/n01/images/n01_0.JPEG", b"\xff\xd8\xff\xe0 cut short", "n01_0.JPEG"),
        ("imdb", "train/pos/0_9.txt", None, "no file called"),
        ("imdb", "test/neg/0_2.txt", b"\xff\xfe\xfa", "UnicodeDecodeError"),
    ],
)
def test_a_broken_file_is_told_by_name(tmp_path: Path, name: str, file: str, content: bytes | None, words: str) -> None:
    write, read = SETS[name]
    write(tmp_path / "data")
    read(tmp_path / "data")
    spoilt(tmp_path / "data", file, content)
    with pytest.raises(JobError) as error:
        read(tmp_path / "data")
    assert words in str(error.value)
    assert str(tmp_path / "data") in str(error.value)


def test_without_pillow_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UsageError, match="pip install pillow"):
        tiny_imagenet.read(tmp_path, train=True)
