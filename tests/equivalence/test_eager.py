"""Synchronous rules compute what plain PyTorch does: torch.equal against gradient accumulation on the module itself.

With dropout off, as the keyed random numbers of a run are not those of an eager one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from roundelay.job import Named
from roundelay.session.training import Length, Session
from tests.equivalence import eager
from tests.equivalence.cells import MICRO_BATCHES, STAGES, STEPS, Bench, Variant
from tests.equivalence.eager import Eager, without_dropout
from tests.zoo import ZOO

OPTIMIZERS: dict[str, Callable[[Named], Optimizer]] = {
    "sgd": partial(SGD, lr=0.02, momentum=0.9),
    "adamw": partial(AdamW, lr=2e-3),
}
MODES = ("stash", "recompute", "mixed")
QUIET = [name for name in ZOO if name != "dropout_heavy"]  # which draws by more than dropout
CONTIGUOUS = [("t5", 3)]
"""Cut behind a transposition: what a stage is sent is contiguous, of which a product may have other last bits."""
CASES = [
    (model, rule, stages, MICRO_BATCHES[(i + j) % 3], list(OPTIMIZERS)[(i + j // 3) % 2], MODES[(i + j // 2) % 3])
    for i, model in enumerate(QUIET)
    for j, (rule, stages) in enumerate(product(("gpipe", "1f1b"), STAGES))
    if (model, stages) not in CONTIGUOUS
]


@functools.cache
def place_of(model: str) -> Bench:
    """The bench of a model of the zoo without dropout."""
    return Bench(ZOO[model], without_dropout(ZOO[model].build(0)))


@functools.cache
def plain(model: str, micro_batches: int, optimizer: str) -> Eager:
    """The eager run."""
    entry = ZOO[model]
    batches = entry.batches(0, STEPS, short=True)
    return eager.train(entry, without_dropout(entry.build(0)), batches, micro_batches, OPTIMIZERS[optimizer])


def in_loss_precision(losses: list[float]) -> torch.Tensor:
    """The sums over a batch's micro-batches are made in double precision, in either order of their operations."""
    return torch.tensor(losses, dtype=torch.float32)


@pytest.mark.parametrize("model", QUIET)
def test_the_models_draw_nothing(model: str) -> None:
    entry = ZOO[model]
    network = without_dropout(entry.build(0))
    batch = entry.batches(0, 1)
    losses = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        place_of(model).restore()
        network.load_state_dict(place_of(model).model.state_dict())
        losses += eager.train(entry, network, batch, 1, OPTIMIZERS["sgd"]).micro_losses
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("model", "rule", "stages", "micro_batches", "optimizer", "mode"), CASES)
def test_a_synchronous_rule_equals_gradient_accumulation(
    model: str, rule: str, stages: int, micro_batches: int, optimizer: str, mode: str
) -> None:
    place, wanted = place_of(model), plain(model, micro_batches, optimizer)
    place.restore()
    plan = place.plan(Variant(rule, "none", mode), stages, micro_batches)
    session = Session(place.job(OPTIMIZERS[optimizer]), place.captured, plan, 0, Length(steps=STEPS))
    trained = session.run(notify=lambda event: None)
    assert [trained.micro_losses[g][0] for g in range(len(trained.micro_losses))] == wanted.micro_losses
    assert torch.equal(in_loss_precision([u.loss for u in trained.updates]), in_loss_precision(wanted.losses))
    ours = dict(place.model.named_parameters()) | dict(place.model.named_buffers())
    theirs = dict(wanted.model.named_parameters()) | dict(wanted.model.named_buffers())
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert any(not torch.equal(parameter, place.state[name]) for name, parameter in ours.items())
