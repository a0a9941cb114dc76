"""Losses that make or hold tensors of their own: they compute where the last stage does, as in plain PyTorch there."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import roundelay
from roundelay.job import Job
from roundelay.session.training import Length, Session
from tests.zoo import ZOO
from tests.zoo.dense import CLASSES

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # kernels that a GPU has in no deterministic form

Batch = tuple[Tensor, ...]
Loss = Callable[[Tensor, Batch], Any]

WEIGHTS = torch.linspace(0.5, 1.5, CLASSES)


def arange_targets(outputs: Tensor, batch: Batch) -> Tensor:
    """Each row is to be most like itself, as in contrastive learning."""
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(outputs.size(0)))


def made_on_the_outputs_device(outputs: Tensor, batch: Batch) -> Tensor:
    """As a program that names the device itself."""
    return functional.cross_entropy(outputs @ outputs.T, torch.arange(outputs.size(0), device=outputs.device))


def global_class_weights(outputs: Tensor, batch: Batch) -> Tensor:
    """Class weights that the loss finds in its module."""
    return functional.cross_entropy(outputs, batch[-1], weight=WEIGHTS)


def closed_over_class_weights() -> Loss:
    """Class weights in the loss's closure."""
    weights = WEIGHTS.clone()
    return lambda outputs, batch: functional.cross_entropy(outputs, batch[-1], weight=weights)


def class_weights_of_a_module() -> Loss:
    """Class weights as a buffer of a loss that is a module."""
    criterion = nn.CrossEntropyLoss(weight=WEIGHTS.clone())
    return lambda outputs, batch: criterion(outputs, batch[-1])


def mask(outputs: Tensor, batch: Batch) -> Tensor:
    """A mask made anew, and one made of a Python list."""
    upper = torch.ones(CLASSES, CLASSES).triu()
    kept = torch.tensor([True, False] * outputs.size(0))[: outputs.size(0)]
    each = functional.cross_entropy(outputs @ upper, batch[-1], reduction="none")
    return torch.where(kept, each, torch.zeros(())).mean()


def sum_and_count(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """A sum and a count that is a new tensor."""
    return functional.cross_entropy(outputs, batch[-1], reduction="sum"), torch.tensor(float(outputs.size(0)))


def random_noise(outputs: Tensor, batch: Batch) -> Tensor:
    """Noise that names no device, and noise like the outputs."""
    noisy = outputs + 0.1 * torch.randn(outputs.shape) + 0.1 * torch.rand_like(outputs)
    return functional.cross_entropy(noisy, batch[-1])


class Hits:
    """Counts of right rows by class, by tensors that it holds."""

    def __init__(self) -> None:
        self.classes = torch.arange(CLASSES)

    def __call__(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The loss and the metrics."""
        right = (outputs.argmax(-1) == batch[-1]).unsqueeze(1) & (batch[-1].unsqueeze(1) == self.classes)
        share = right.float().mean(0)
        return {"loss": functional.cross_entropy(outputs, batch[-1]), "first": share[0], "most": share.max()}


class Weighted(torch.autograd.Function):
    """A backward of one's own, with a tensor that the forward was given and one that it makes."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, weights: Tensor) -> Tensor:
        """The outputs."""
        context.save_for_backward(weights)
        return outputs * 1.0

    @staticmethod
    def backward(context: Any, *grads: Any) -> Any:
        """The gradient, weighted."""
        (weights,) = context.saved_tensors
        return grads[0] * weights * torch.full((CLASSES,), 0.5), None


def backward_of_its_own(outputs: Tensor, batch: Batch) -> Tensor:
    """A function with a backward of its own, and a hook that has one as well."""
    outputs.register_hook(lambda gradient: gradient * WEIGHTS)
    return functional.cross_entropy(Weighted.apply(outputs, WEIGHTS), batch[-1])


def full_precision(outputs: Tensor, batch: Batch) -> Tensor:
    """A part that stays in single precision, as is said for the CPU, where the program was written."""
    with torch.autocast("cpu", enabled=False):
        scores = outputs.float() @ torch.linspace(0.0, 1.0, CLASSES * CLASSES).view(CLASSES, CLASSES)
    if scores.dtype != torch.float32:  # run and plain PyTorch might ignore it alike
        raise TypeError(f"computed in {scores.dtype}")
    return functional.cross_entropy(scores, batch[-1])


LOSSES: dict[str, Callable[[], Loss]] = {
    "a backward of its own": lambda: backward_of_its_own,
    "full precision": lambda: full_precision,
    "arange targets": lambda: arange_targets,
    "arange on the device of the outputs": lambda: made_on_the_outputs_device,
    "global class weights": lambda: global_class_weights,
    "class weights of a closure": closed_over_class_weights,
    "class weights of a module": class_weights_of_a_module,
    "mask": lambda: mask,
    "sum and count": lambda: sum_and_count,
    "random noise": lambda: random_noise,
    "metrics of an object": Hits,
}


@cache
def job_of(name: str) -> Job:
    """A small perceptron with the loss."""
    entry = ZOO["mlp"]
    batches = entry.batches(0, 3)
    return Job(
        model=entry.build(0),
        loss=LOSSES[name](),
        batches=lambda epoch: batches,
        optimizer=lambda named: torch.optim.AdamW(named, lr=2e-3),
    )


@pytest.mark.parametrize("name", LOSSES)
def test_it_is_plain_pytorch_and_its_reference(name: str) -> None:
    rule = ("1f1b", "pipeoptim")[list(LOSSES).index(name) % 2]
    chosen = {"precision": "bf16"} if name == "full precision" else {}
    found = roundelay.verify(
        job_of(name), workers=2, rule=rule, steps=3, cuts="equal", devices="cuda:0,cuda:0", **chosen
    )
    assert found.equal, found.differences()
    assert found.fidelity is not None
    assert found.fidelity.exact, str(found.fidelity)


@pytest.mark.parametrize(
    "name", ["arange targets", "class weights of a module", "sum and count", "metrics of an object"]
)
def test_the_host_waits_for_a_device_once_for_each_micro_batch(name: str) -> None:
    """Metrics included: a longer run's waits less a shorter's."""
    stand_in = sys.modules.get("tests.standin.device")
    if stand_in is None:
        pytest.skip("only the stand-in counts")
    job, counts = job_of(name), []
    captured = roundelay.capture(job)
    endless = replace(job, batches=lambda epoch: itertools.cycle(job.batches(0)))
    plan = roundelay.plan(job, captured=captured, workers=2, rule="1f1b", micro_batches=2, devices="cuda:0,cuda:0")
    for steps in (4, 9):
        before = sum(stand_in.host_reads().values())
        Session(endless, captured, plan, 0, Length(steps=steps)).run(notify=lambda event: None)
        counts.append(sum(stand_in.host_reads().values()) - before)
    assert counts[1] - counts[0] == 5 * 2


def test_evaluate_reads_what_a_loss_has_left_on_a_device() -> None:
    """As on the CPU, where the model is."""
    total: list[Tensor] = [torch.zeros(1)]

    def loss(outputs: Tensor, batch: Batch) -> Tensor:
        value = functional.cross_entropy(outputs, batch[-1])
        total[0] = total[0] + value.detach().reshape(1)
        return value

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {"left": float((total[0] + next(model.parameters()).sum().reshape(1)).isfinite())}

    job = replace(job_of("arange targets"), loss=loss, evaluate=evaluate)
    found = roundelay.verify(job, workers=2, rule="1f1b", steps=3, devices="cuda:0,cuda:0")
    assert found.exit_code == 0, found.differences()
    assert found.fidelity is not None
    assert "evaluate" in found.fidelity.parts
