"""What jobs of full size share: the folder of the data, an accuracy over held-out batches, schedules in epochs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.datasets import cifar, imdb, tiny_imagenet
from benchmarks.datasets.trouble import folder_named, whole_number
from roundelay.errors import JobError
from roundelay.job import SchedulerFactory

Batch = tuple[Tensor, Tensor]
Held = Callable[[], Iterable[Batch]]

FOLDER, NETWORK = "DATA", "NETWORK"
"""Environment variables: the folder of the data, and which of a job's networks is trained."""

ROWS_AT_ONCE = 250
"""Rows of a batch in an evaluation."""


def accuracy(held_out: Held) -> Callable[[nn.Module], dict[str, float]]:
    """What tells the share of held-out labels that is said first, and among the first five where there are as many."""

    @torch.no_grad()
    def evaluate(model: nn.Module) -> dict[str, float]:
        first = five = count = 0
        for inputs, labels in held_out():
            logits = model(inputs)
            said = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            first, five, count = first + int(said[:, 0].sum()), five + int(said.any(1).sum()), count + len(labels)
        return {"accuracy": first / count, "top5": five / count}

    return evaluate


def drops(epochs: Sequence[int], factor: float, updates_per_epoch: int) -> SchedulerFactory:
    """The rate times `factor` at the begin of each of those epochs; a scheduler of ours steps per update."""
    milestones = [epoch * updates_per_epoch for epoch in epochs]
    return lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, factor)


def polynomial(epochs: int, updates_per_epoch: int, power: float = 1.0) -> SchedulerFactory:
    """The rate falls to zero over the training."""
    return lambda optimizer: torch.optim.lr_scheduler.PolynomialLR(optimizer, epochs * updates_per_epoch, power)


def network(known: Mapping[str, Callable[[], nn.Module]], usual: str) -> nn.Module:
    """What the variable NETWORK names, else the usual one.

    Raises:
        JobError: it is none of the known.
    """
    name = os.environ.get(NETWORK, usual)
    if name not in known:
        raise JobError(NETWORK, got=repr(name), expected=" or ".join(known), remedy="Correct the variable.")
    return known[name]()


def folder(example: str) -> Path:
    """The folder of the data.

    Raises:
        JobError: none is named.
    """
    return folder_named(FOLDER, example)


def rows(default: int) -> int:
    """Rows of a batch: those of the paper, or what the variable ROWS says.

    Raises:
        JobError: it says something else than a number.
    """
    return whole_number("ROWS", default)


@cache
def cifar_of(place: Path, kind: cifar.Kind) -> tuple[cifar.Images, cifar.Images]:
    """Images to train on and held out; read once for all seeds."""
    return cifar.read(place, kind, train=True), cifar.read(place, kind, train=False)


@cache
def tiny_imagenet_of(place: Path, side: int) -> tuple[tiny_imagenet.Images, tiny_imagenet.Images]:
    """The same."""
    return (
        tiny_imagenet.read(place, train=True, side=side),
        tiny_imagenet.read(place, train=False, side=side),
    )


@cache
def imdb_of(place: Path, vocabulary: int, length: int) -> tuple[imdb.Reviews, imdb.Reviews]:
    """The same."""
    return imdb.read(place, vocabulary=vocabulary, length=length)


Source = cifar.Images | tiny_imagenet.Images | imdb.Reviews


def batches(train: Source, count: int, seed: int) -> Callable[[int], Iterable[Batch]]:
    """Epoch to batches, in an order of seed and epoch.

    Raises:
        JobError: there are fewer than one batch.
    """
    if len(train) < count:
        raise tiny_imagenet.refused(
            folder(""), f"{len(train)} rows to train on", f"at least a batch, {count}", "Set ROWS to fewer."
        )
    return lambda epoch: train.shuffled(count, 1_000_003 * (seed + 1) + epoch)


def held(test: Source) -> Held:
    """Held-out batches."""
    return lambda: test.in_order(ROWS_AT_ONCE)
