"""Batches with more in them than tensors: what plain PyTorch computes, or a refusal that names the field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import roundelay
from roundelay.errors import JobError
from roundelay.job import Job
from roundelay.session.training import Trained

Batch = dict[str, Any]
ROWS, BATCHES = 4, 5


class Scaled(nn.Module):
    """Two layers; the second's input is scaled by a number, a tensor or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        """Rows x 3."""
        out: Tensor = self.second(torch.tanh(self.first(x)) * scale)
        return out


def batches(epoch: int) -> Iterator[Batch]:
    """Batches with a text for every row, and with numbers that vary from batch to batch."""
    rng = np.random.default_rng(epoch)
    for number in range(BATCHES):
        x = rng.standard_normal((ROWS, 5)).astype(np.float32)
        yield {
            "x": torch.from_numpy(x),
            "y": torch.arange(ROWS) % 3,
            "array": x,
            "texts": ["".join(chr(97 + (3 * number + 5 * row + k) % 26) for k in range(5)) for row in range(ROWS)],
            "scale": 0.5 + number,
            "words": ["never", "as", "long", "as", "the", "batch"],
        }


def tokens(texts: list[str]) -> Tensor:
    """A row of numbers for every text."""
    return torch.tensor([[(ord(letter) - 97) / 26 for letter in text] for text in texts])


def loss(outputs: Tensor, batch: Batch) -> Tensor:
    """Of the labels."""
    return functional.cross_entropy(outputs, batch["y"])


def job(inputs: Callable[[Batch], Any], loss: Callable[[Any, Any], Any] = loss) -> Job:
    """The network, called as said."""
    torch.manual_seed(0)
    return Job(model=Scaled(), loss=loss, batches=batches, inputs=inputs, optimizer=lambda named: SGD(named, lr=0.5))


def eager(job: Job) -> list[float]:
    """What plain PyTorch makes of an epoch."""
    optimizer = job.optimizer(list(job.model.named_parameters()))
    losses = []
    for batch in job.batches(0):
        args, kwargs = job.inputs(batch)  # type: ignore[misc]
        value = job.loss(job.model(*args, **kwargs), batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def trained_by(job: Job, micro_batches: int = 1) -> Trained:
    """The job, trained for an epoch."""
    made = roundelay.plan(job, workers=2, rule="1f1b", micro_batches=micro_batches, cuts="equal", transport="memory")
    return roundelay.train(job, plan=made, epochs=1)


INPUTS: dict[str, Callable[[Batch], Any]] = {
    "texts": lambda batch: ((tokens(batch["texts"]),), {}),
    "arrays": lambda batch: ((torch.from_numpy(batch["array"]),), {}),
    "a number as a tensor": lambda batch: ((batch["x"], torch.tensor(batch["scale"])), {}),
    "a number that is used": lambda batch: ((batch["x"] * batch["scale"],), {}),
}


@pytest.mark.parametrize("micro_batches", [1, 2, ROWS])
@pytest.mark.parametrize("case", INPUTS)
def test_a_run_trains_on_what_plain_pytorch_trains_on(case: str, micro_batches: int) -> None:
    trained = trained_by(job(INPUTS[case]), micro_batches)
    assert [update.loss for update in trained.updates] == pytest.approx(eager(job(INPUTS[case])), rel=1e-4)


REFUSED: dict[str, tuple[Callable[[Batch], Any], str]] = {
    "a number that varies": (
        lambda batch: ((batch["x"], batch["scale"]), {}),
        r"the call of the model, argument 1: got 1.5; expected 0.5 as for the first batch.*torch.tensor\(number\)",
    ),
    "one that varies by its kind": (
        lambda batch: ((batch["x"],), {"scale": 1 if batch["scale"] < 1 else 1.0}),
        r"argument 'scale': got 1.0; expected 1 as",
    ),
    "a tensor, and then none": (
        lambda batch: ((batch["x"], torch.ones(()) if batch["scale"] < 1 else 1.0), {}),
        r"argument 1: got 1.0; expected a tensor as",
    ),
    "an array": (lambda batch: ((batch["array"],), {}), r"argument 0: got a NumPy ndarray.*torch.from_numpy"),
    "a NumPy number": (
        lambda batch: ((batch["x"], np.float32(batch["scale"])), {}),
        r"argument 1: got a NumPy float32.*torch.tensor\(number\)",
    ),
    "a sparse tensor": (lambda batch: ((batch["x"].to_sparse(),), {}), r"tensor 0 of the model's call.*to_dense"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_the_first_batch_s_for_ever_is_refused_before_training(case: str) -> None:
    inputs, words = REFUSED[case]
    with pytest.raises(JobError, match=words):
        roundelay.plan(job(inputs), workers=2, rule="1f1b", micro_batches=1, cuts="equal")


def test_a_number_that_varies_later_is_refused_when_it_does() -> None:
    """With a plan that is at hand no more is read before than the first batch."""
    made = roundelay.plan(job(lambda batch: ((batch["x"], 0.5), {})), workers=2, rule="1f1b", cuts="equal")
    with pytest.raises(JobError, match=r"stage 0, read of micro-batch .*argument 1: got 1.5; expected 0.5"):
        roundelay.train(job(lambda batch: ((batch["x"], batch["scale"]), {})), epochs=1, plan=made)


LOSSES: dict[str, tuple[Callable[[Tensor, Batch], Any], str]] = {
    "how many texts": (lambda out, batch: loss(out, batch) / len(batch["texts"]), "batch field 'texts', a list"),
    "an array": (
        lambda out, batch: (out.sum(1) - torch.from_numpy(batch["array"]).sum(1)).mean(),
        r"(?s)the loss on the first batch.*neither a tensor nor a number.*from_numpy",
    ),
    "a sum with an array": (
        lambda out, batch: (out.sum(1) - batch["array"].sum()).mean(),
        r"batch field 'array', a ndarray \(give it as torch.from_numpy\(array\)\)",
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_may_read_nothing_that_does_not_travel(case: str) -> None:
    used, words = LOSSES[case]
    with pytest.raises(JobError, match=words):
        roundelay.capture(job(INPUTS["texts"], used))


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: {**batch, "weights": torch.ones(ROWS)},
        lambda batch: {**batch, "more": [*batch["more"], batch["x"]]},
        lambda batch: {**batch, "none": torch.ones(ROWS)},
    ],
    ids=["a field more", "a list that is longer", "a tensor for a None"],
)
def test_a_loss_that_is_shown_the_first_batch_s_layout_sees_no_other_batch(change: Callable[[Batch], Batch]) -> None:
    """It may ask whether a field is there, go through a list, or look for None; plain PyTorch shows it every batch."""

    def changing(epoch: int) -> Iterator[Batch]:
        for number, batch in enumerate(batches(epoch)):
            batch |= {"more": [batch["x"]], "none": None}
            yield change(batch) if number == 3 else batch

    def weighed(outputs: Tensor, batch: Batch) -> Tensor:
        extra = sum((x.mean() for x in batch["more"]), torch.zeros(()))
        weights = batch["weights"] if "weights" in batch else batch["none"]
        return loss(outputs, batch) * (1.0 if weights is None else 2.0) + 0 * extra

    used = replace(job(INPUTS["texts"], weighed), batches=changing)
    with pytest.raises(JobError, match="as in the first batch: keys, lengths of lists, what is None"):
        trained_by(used)
