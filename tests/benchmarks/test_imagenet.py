"""ImageNet from a folder of images: which part of each is read, what is drawn anew, and the figures of its job."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import roundelay
from benchmarks.cdp.jobs.imagenet import reported
from benchmarks.datasets import imagenet
from benchmarks.networks.resnet import Basic, residual
from roundelay.comparison.comparison import Compared
from roundelay.comparison.comparison_table import curves_csv
from roundelay.comparison.comparison_variants import OWN, Variant
from roundelay.comparison.run_results import Point, RunResult
from roundelay.errors import JobError
from roundelay.planning.job_file import load_job

JOB = Path(__file__).parents[2] / "benchmarks" / "cdp" / "jobs" / "imagenet.py"
COLOURS = {"n01": (250, 10, 10), "n02": (10, 10, 250)}
PER_CLASS = 8


def write_imagenet(folder: Path) -> None:
    """Two classes, each with eight images to train on and one held out; they are darker from left to right."""
    for name, colour in COLOURS.items():
        for part, count in (("train", PER_CLASS), ("val", 1)):
            (folder / part / name).mkdir(parents=True)
            for number in range(count):
                columns = np.linspace(1, 0.8, 48)[None, :, None] * np.array(colour)
                pixels = np.broadcast_to(columns, (40 + number, 48, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{name}_{number}.JPEG")


def counted(path: Path, height: int, width: int, side: int) -> imagenet.Images:
    """A set of one image whose colours are the row, the column, and 7: a PNG, which keeps them, by the usual name."""
    rows, columns = np.indices((height, width))
    pixels = np.stack([rows, columns, np.full_like(rows, 7)], 2).astype(np.uint8)
    Image.fromarray(pixels).save(path / "counted.JPEG", format="PNG")
    return imagenet.Images([path / "counted.JPEG"], torch.tensor([0]), side)


def pixels_again(images: Tensor) -> Tensor:
    """What was normalised, as 0 to 255."""
    mean, spread = (torch.tensor(x).view(3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return (images * spread + mean) * 255


def test_images_are_read_with_the_classes_of_their_folders(tmp_path: Path) -> None:
    write_imagenet(tmp_path / "data")
    train, test = imagenet.both(tmp_path / "data", 16)
    assert train.labels.tolist() == [0] * PER_CLASS + [1] * PER_CLASS
    assert test.labels.tolist() == [0, 1]
    for batches in (train.in_order(2 * PER_CLASS), test.in_order(2), train.shuffled(2 * PER_CLASS, 3)):
        ((images, labels),) = batches
        assert (images.shape[1:], images.dtype) == ((3, 16, 16), torch.float32)
        red, blue = (pixels_again(images[labels == n]).mean((0, 2, 3)) for n in (0, 1))
        assert red[0] > 190 > 20 > red[2]
        assert blue[2] > 190 > 20 > blue[0]


def test_of_a_held_out_image_the_middle_is_normalised(tmp_path: Path) -> None:
    images = counted(tmp_path, 32, 64, side=28)  # 32 is what the shorter side is scaled to
    ((found, _),) = images.in_order(1)
    assert found[0, 2, 5, 5] == pytest.approx((7 / 255 - 0.406) / 0.225, rel=1e-5)
    expected = torch.stack(torch.meshgrid(torch.arange(2, 30), torch.arange(18, 46), indexing="ij"))
    torch.testing.assert_close(pixels_again(found)[0, :2], expected.float(), atol=1e-3, rtol=0)


def test_a_held_out_image_s_shorter_side_is_scaled_to_256_for_224(tmp_path: Path) -> None:
    images = counted(tmp_path, 128, 200, imagenet.SIDE)
    ((found, _),) = images.in_order(1)
    assert found.shape == (1, 3, 224, 224)
    first, last = (pixels_again(found)[0, :2, place, place].tolist() for place in (0, -1))
    assert first == pytest.approx([16 / 2, (400 - 224) / 4], abs=1)
    assert last == pytest.approx([128 - 16 / 2, 200 - (400 - 224) / 4], abs=1.5)


def test_an_epoch_has_every_image_once_in_full_batches(tmp_path: Path) -> None:
    write_imagenet(tmp_path / "data")
    train = imagenet.read(tmp_path / "data", train=True, side=16)
    labels = torch.cat([part for _, part in train.shuffled(4, seed=1)])
    assert labels.tolist() != sorted(labels.tolist()) == train.labels.tolist()
    assert [len(part) for _, part in train.shuffled(5, seed=1)] == [5, 5, 5]


def test_an_image_is_cut_and_mirrored_as_the_seed_says(tmp_path: Path) -> None:
    images = counted(tmp_path, 120, 160, side=32)
    drawn, again = ([next(iter(images.shuffled(1, seed)))[0] for seed in range(30)] for _ in range(2))
    assert all(torch.equal(one, same) for one, same in zip(drawn, again, strict=True))
    found = torch.cat([pixels_again(one) for one in drawn])
    assert (found[:, 0, -1, 16] > found[:, 0, 0, 16]).all()
    mirrored = found[:, 1, 16, 0] > found[:, 1, 16, -1]
    assert 5 < mirrored.sum() < 25
    assert found[:, 0].amin((1, 2)).unique().numel() > 10  # where they begin
    assert (found[:, 0].amax((1, 2)) - found[:, 0].amin((1, 2))).unique().numel() > 10  # and how high they are


def test_a_part_has_8_to_100_per_cent_of_the_image_and_a_shape_near_a_square() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = torch.tensor([imagenet.part_of((500, 375), generator) for _ in range(500)])
    left, top, right, bottom = parts.unbind(1)
    assert min(left.min(), top.min()) >= 0
    assert right.max() <= 500
    assert bottom.max() <= 375
    wide, high = right - left, bottom - top
    share, shape = wide * high / (500 * 375), wide / high
    assert 0.078 < share.min() < 0.12
    assert 0.9 < share.max() <= 1
    assert 0.74 < shape.min() < 0.78
    assert 1.28 < shape.max() < 1.35
    assert left.float().mean() == pytest.approx(float((500 - wide).float().mean() / 2), rel=0.1)


def test_where_no_part_fits_the_largest_in_the_middle_is_taken() -> None:
    generator = torch.Generator().manual_seed(0)
    assert imagenet.part_of((1000, 12), generator) == (492, 0, 508, 12)
    assert imagenet.part_of((12, 1000), generator) == (0, 492, 12, 508)


def leave_classes(folder: Path) -> None:
    """Put the images held out into one folder, as they are distributed."""
    for image in list((folder / "val").glob("*/*")):
        image.rename(folder / "val" / image.name)
    for name in COLOURS:
        (folder / "val" / name).rmdir()


def read_all(folder: Path) -> None:
    for train in (True, False):
        list(imagenet.read(folder, train=train, side=16).shuffled(2, 0))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (shutil.rmtree, r"nothing there.*https://www.image-net.org.*train/CLASS/\*.JPEG, val/CLASS/\*.JPEG"),
        (lambda folder: shutil.rmtree(folder / "val"), "val: got nothing there"),
        (lambda folder: shutil.rmtree(folder / "val" / "n01"), "n01: got nothing there"),
        (lambda folder: (folder / "val" / "n03").mkdir(), "n03: got a class that is not in train"),
        (lambda folder: (folder / "train" / "n00").mkdir(), "n00: got no image"),
        (leave_classes, "val: got no folder in it"),
        (lambda folder: (folder / "train" / "n01" / "n01_2.JPEG").write_bytes(b"none"), "n01_2.JPEG"),
    ],
    ids=["folder", "part", "class", "strange class", "empty class", "images in no class", "broken image"],
)
def test_what_is_missing_or_broken_is_told(tmp_path: Path, harm: Callable[[Path], object], words: str) -> None:
    write_imagenet(tmp_path / "data")
    harm(tmp_path / "data")
    with pytest.raises(JobError, match=words) as error:
        read_all(tmp_path / "data")
    assert str(tmp_path / "data") in str(error.value)


@pytest.fixture
def job_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], roundelay.Job]:
    """The job in small, of a seed."""
    write_imagenet(tmp_path / "data")
    for variable, value in {"DATA": str(tmp_path / "data"), "DEPTH": "18", "SIDE": "32", "ROWS": "8"}.items():
        monkeypatch.setenv(variable, value)
    return lambda seed: load_job(JOB, seed)


def test_an_epoch_s_batches_are_those_of_seed_and_epoch(job_of: Callable[[int], roundelay.Job]) -> None:
    def drawn(seed: int, epoch: int) -> bytes:
        return b"".join(images.numpy().tobytes() for images, _ in job_of(seed).batches(epoch))

    assert drawn(0, 0) == drawn(0, 0)
    assert len({drawn(0, 0), drawn(0, 1), drawn(1, 0), drawn(1, 1)}) == 4


def test_the_job_trains_in_four_stages_with_the_paper_s_rule(job_of: Callable[[int], roundelay.Job]) -> None:
    job = replace(job_of(0), model=residual(Basic, (1, 1, 1, 1), len(COLOURS), width=4))
    plan = roundelay.plan(job, workers=4, rule="cdp-v2", micro_batches=4, cuts="equal")
    trained = roundelay.train(job, plan=plan, epochs=1)
    assert len(trained.updates) == 2 * PER_CLASS // 8
    assert trained.evaluations[-1].metrics["accuracy"] in (0.0, 0.5, 1.0)


def test_the_network_and_its_optimizer_are_the_paper_s(
    job_of: Callable[[int], roundelay.Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DEPTH")
    job = job_of(0)
    named = list(job.model.named_parameters())
    assert sum(p.numel() for _, p in named) == 25_557_032 - 998 * (2048 + 1)  # two classes of 1000
    settings = job.optimizer(named).param_groups[0]
    assert [settings[name] for name in ("lr", "momentum", "weight_decay")] == [0.1, 0.9, 1e-4]
    monkeypatch.setenv("DEPTH", "101")
    with pytest.raises(JobError, match="expected 18 or 50"):
        job_of(0)


def test_the_best_of_the_last_ten_epochs_is_reported_of_runs_that_came_to_the_end(tmp_path: Path) -> None:
    exact, delayed, lost = (Variant(optimizer=OWN, rate=None, rule=name) for name in ("1f1b", "cdp-v2", "async"))

    def run(rule: Variant, seed: int, *accuracies: float) -> RunResult:
        points = tuple(Point(n, 1.0, value) for n, value in enumerate(accuracies))
        curves = {"accuracy": points, "top5": tuple(replace(point, value=1.0) for point in points)}
        return RunResult(variant=rule.name, seed=seed, curves=curves, samples_per_second=1.0, diverged=None)

    runs = [
        run(exact, 0, 0.9, 0.8, 0.7, *[0.5] * 8, 0.6),
        run(exact, 1, 0.9, 0.8, 0.3, *[0.5] * 8, 0.6),
        run(delayed, 0, *[0.1] * 11, 0.2),
        run(delayed, 1, *[0.4] * 11),
        run(lost, 0, 0.4),
    ]
    results = {(one.variant, one.seed): one for one in runs}
    compared = Compared(variants=(exact, delayed, lost), seeds=(0, 1), plans={}, refused={}, results=results)
    (tmp_path / "curves.csv").write_text(curves_csv(compared))
    assert reported(tmp_path / "curves.csv") == {"1f1b": [0.7, 0.6], "cdp-v2": [0.2]}
