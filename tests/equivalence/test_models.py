"""Models as they come, from a library or a paper, run as a pipeline with the reference's bits and plain PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import SGD, Optimizer

import roundelay
from roundelay.job import Named
from roundelay.session.training import Length, Session
from tests.equivalence import eager
from tests.equivalence.cells import STEPS, VARIANTS, Bench, Cell, bench, run_cell
from tests.equivalence.eager import without_dropout
from tests.zoo import MODELS, NETWORKS, ZOO
from tests.zoo.dense import class_loss
from tests.zoo.entry import Entry, built_by

LIBRARY = ("gpt2", "llama", "bert_classifier", "t5")
RULES = ("1f1b", "pipedream", "pipeoptim improved stash", "cdp-v2")
STAGES = (2, 3, 4)
CELLS = [
    Cell(model, RULES[(i + j) % 4], ("adamw", "nesterov")[(i + j) % 2], stages, 3 + (i + j) % 2, "memory")
    for i, model in enumerate((*LIBRARY, *NETWORKS))
    for j, stages in enumerate(STAGES)
]


def test_every_rule_meets_every_number_of_stages() -> None:
    assert {(cell.variant, cell.stages) for cell in CELLS} == set(product(RULES, STAGES))
    assert {cell.model for cell in CELLS} == {*LIBRARY, *NETWORKS}


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_model_nobody_prepared_runs_and_equals_its_reference(cell: Cell) -> None:
    found = run_cell(cell, bench(cell.model))
    assert found.equal, found.difference
    assert found.steps == STEPS


@pytest.mark.parametrize("model", NETWORKS)
def test_lengths_and_sides_may_vary(model: str) -> None:
    place = bench(model)
    batches = place.entry.batches(0, STEPS, short=True, varying=True)
    found = place.verify(
        place.plan(VARIANTS["pipeoptim improved stash"], 3, 3), place.job(batches=lambda epoch: batches)
    )
    assert found.equal, found.difference


def sgd(named: Named) -> Optimizer:
    """Momentum, so that a wrong gradient stays wrong."""
    return SGD(named, lr=0.02, momentum=0.9)


def odd(entry: Entry, *, varying: bool = False) -> list[str]:
    """What differs between a run by `1f1b` and gradient accumulation on the plain module, dropout off.

    Not the last bit where lengths vary and the loss is a mean over labels: shares by labels are then rounded otherwise
    than shares by rows.
    """
    batches = entry.batches(0, 3, short=True, varying=varying)
    place = Bench(entry, without_dropout(entry.build(0)), batches)
    plan = place.plan(VARIANTS["1f1b"], 3, 3)
    Session(place.job(sgd), place.captured, plan, 0, Length(steps=3)).run(notify=lambda event: None)
    plain = eager.train(entry, without_dropout(entry.build(0)), batches, 3, sgd).model
    ours, theirs = place.model.state_dict(), plain.state_dict()
    assert any(not torch.equal(tensor, place.state[name]) for name, tensor in place.model.named_parameters())
    rounded = 1e-6 if varying and place.captured.graph.labels_per_row else 0.0
    return [n for n, tensor in ours.items() if not torch.allclose(tensor, theirs[n], rtol=rounded, atol=rounded / 100)]


@pytest.mark.parametrize("model", NETWORKS)
def test_a_network_in_stages_computes_what_plain_pytorch_does(model: str) -> None:
    assert odd(NETWORKS[model]) == []


@pytest.mark.parametrize("model", [name for name, entry in MODELS.items() if entry.specialises])
def test_recurrent_networks_do_so_with_lengths_that_vary(model: str) -> None:
    assert odd(MODELS[model], varying=True) == []


def entry_of(make: Callable[[], nn.Module], loss: Callable[..., Tensor] = class_loss) -> Entry:
    """A model over the data of the zoo's `lstm`: rows x length x 8 and a class."""
    return Entry("own", built_by(make), ZOO["lstm"].batches, loss)


class Idle(nn.Module):
    """Two layers whose parameters no loss reads: one never called, one whose result is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.aside = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, series: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows x classes, and something else."""
        hidden = self.first(series).relu().mean(1)
        return self.head(self.middle(hidden).tanh()), self.aside(hidden)


def first_loss(outputs: tuple[Tensor, ...], batch: tuple[Tensor, ...]) -> Tensor:
    """Of the first output alone."""
    return class_loss(outputs[0], batch)


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_parameters_that_no_loss_depends_on_stay_what_they_are(transport: str) -> None:
    place = Bench(entry_of(Idle, first_loss))
    found = place.verify(place.plan(VARIANTS["pipeoptim improved stash"], 3, 3, transport))
    assert found.equal, found.difference
    changed = {n.split(".")[0] for n, p in place.model.named_parameters() if not torch.equal(p, place.state[n])}
    assert changed == {"first", "middle", "head"}


def test_a_checkpoint_holds_idle_parameters_and_a_run_goes_on_from_it(tmp_path: Path) -> None:
    place = Bench(entry_of(Idle, first_loss))
    trained = roundelay.train(place.job(), steps=3, save_to=tmp_path / "kept")
    assert trained.updates
    again = roundelay.verify(place.job(), steps=5, resume=tmp_path / "kept")
    assert again.equal, again.difference
    loaded = roundelay.load(Idle(), tmp_path / "kept")
    assert torch.equal(loaded.never.weight, place.state["never.weight"])


class Normed(nn.Module):
    """Weight and spectral normalisation; the latter changes its buffers within no_grad, beside a trained weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(8, 8))
        self.middle = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, series: Tensor) -> Tensor:
        """Return rows x classes."""
        out: Tensor = self.head(self.middle(self.first(series).relu()).tanh().mean(1))
        return out


@dataclass
class Result:
    """What people return who like names."""

    logits: Tensor
    extra: list[Tensor]


class WithNames(nn.Sequential):
    """Returns a dataclass that holds a list."""

    def forward(self, series: Tensor) -> Result:
        """Return the logits, rows x classes, and the hidden state."""
        hidden = self[0](series).relu().mean(1)
        return Result(self[1](hidden), [hidden])


def result_loss(outputs: Result, batch: tuple[Tensor, ...]) -> Tensor:
    """Reads both fields."""
    return class_loss(outputs.logits, batch) + 0.1 * outputs.extra[0].mean()


class Reverse(nn.Module):
    """A gradient that is turned round, by the operator that the refusal of autograd functions recommends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, series: Tensor) -> Tensor:
        """Return rows x classes."""
        out: Tensor = self.head(reverse(self.first(series).relu()).mean(1))
        return out


@torch.library.custom_op("roundelay_tests::reverse", mutates_args=())
def reverse(x: Tensor) -> Tensor:
    """A copy of x, whose gradient is the negative one."""
    return x.clone()


@reverse.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


reverse.register_autograd(lambda ctx, gradient: -gradient)


@pytest.mark.parametrize(
    "entry",
    [
        entry_of(Idle, first_loss),
        entry_of(Normed),
        entry_of(lambda: WithNames(nn.Linear(8, 8), nn.Linear(8, 4)), result_loss),
        entry_of(Reverse),
    ],
    ids=["idle", "normed", "dataclass", "custom_op"],
)
def test_ways_to_write_a_model(entry: Entry) -> None:
    assert odd(entry) == []
