"""Distributed runs end with the reference's bits: every pair of choices once, and what a pair does not say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

import roundelay
from roundelay.errors import UserCodeError
from roundelay.job import Named
from roundelay.proof import run_vs_reference
from roundelay.proof.run_vs_reference import Verification
from roundelay.runtime.optimizer.stage_optimizer import RateTable
from roundelay.session.training import Length, Session
from tests.equivalence.cells import (
    PAIRED,
    PAIRS,
    STEPS,
    VARIANTS,
    Bench,
    Cell,
    Variant,
    bench,
    delays,
    run_cell,
    stages_per_worker,
)
from tests.equivalence.pairwise import covering
from tests.zoo import ZOO, Batch, rows

CELLS = sorted((Cell(**row) for row in covering(PAIRS)), key=lambda cell: list(ZOO).index(cell.model))
RECOMPUTE, STASH = VARIANTS["pipeoptim improved recompute"], VARIANTS["pipeoptim improved stash"]
PREDICTORS = ("improved", "paper", "released-code")
PREDICTED = [Variant("pipeoptim", predictor, "stash") for predictor in PREDICTORS]


def held(found: Verification) -> None:
    """Everything was equal, and there was something to compare."""
    assert found.equal, found.difference
    assert found.tensors > 0
    assert found.losses >= found.steps


def rotated(index: int) -> Variant:
    """Another variant for another index."""
    return VARIANTS[PAIRED[index % len(PAIRED)]]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_run_equals_its_reference(cell: Cell) -> None:
    found = run_cell(cell, bench(cell.model))
    held(found)
    assert found.steps == STEPS
    pids = {worker["pid"] for worker in found.workers.values()}
    assert (found.reference_pid in pids) == (cell.transport == "memory")
    each = stages_per_worker(VARIANTS[cell.variant])
    assert len(pids) == (1 if cell.transport == "memory" else -(-cell.stages // each))


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize("model", ZOO)
def test_every_model_runs_between_processes(model: str, transport: str) -> None:
    assert any(cell.model == model and cell.transport == transport for cell in CELLS)


def test_a_run_through_shared_memory_needs_no_luck_with_its_timing() -> None:
    """As it is, without the delays of the cells."""
    place = bench("skip")
    held(place.verify(place.plan(RECOMPUTE, 4, 3, "shm"), wrap=None))


def warm_up(optimizer: Optimizer) -> LambdaLR:
    """Rates that grow for four updates, then fall."""
    return LambdaLR(optimizer, lambda update: min((update + 1) / 4, 0.9**update))


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize(
    "optimizer", [partial(SGD, lr=0.05, momentum=0.9), partial(AdamW, lr=5e-3)], ids=["sgd", "adamw"]
)
def test_a_schedule_of_rates_is_followed_and_foreseen(optimizer: Callable[[Named], Optimizer], predictor: str) -> None:
    place = bench("mlp")
    plan = place.plan(Variant("pipeoptim", predictor, "recompute"), 3, 1)
    held(place.verify(plan, place.job(optimizer, scheduler=warm_up), steps=8))


def test_a_predictor_that_does_not_see_the_schedule_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    place = bench("mlp")
    real = RateTable.rates

    def blind(table: RateTable, group: int, update: int, count: int) -> tuple[float, ...]:
        return real(table, group, update, 1) * count

    monkeypatch.setattr(RateTable, "rates", blind)
    job = place.job(partial(SGD, lr=0.05, momentum=0.9), scheduler=warm_up)
    assert not place.verify(place.plan(RECOMPUTE, 3, 1), job, steps=8).equal


def grouped(named: Named) -> Optimizer:
    """Biases apart, with a rate and a decay of their own; the groups interleave over the stages."""
    biases = [item for item in named if item[0].endswith("bias")]
    others = [item for item in named if not item[0].endswith("bias")]
    groups: list[dict[str, Any]] = [{"params": biases, "lr": 5e-3, "weight_decay": 0.0}, {"params": others}]
    return AdamW(groups, lr=1e-3, weight_decay=0.1)


@pytest.mark.parametrize("variant", [VARIANTS["1f1b"], VARIANTS["pipedream"], *PREDICTED], ids=str)
@pytest.mark.parametrize("model", ["mlp", "gpt2"])
def test_parameter_groups_keep_their_settings(model: str, variant: Variant) -> None:
    place = bench(model)
    held(place.verify(place.plan(variant, 3, 3), place.job(grouped, scheduler=warm_up)))


@pytest.mark.parametrize("index", range(len(PAIRED)), ids=PAIRED)
def test_a_loss_of_sum_and_count_is_divided_once(index: int) -> None:
    place = bench("token_mean")
    held(place.verify(place.plan(rotated(index), 2 + index % 3, 4)))


@pytest.mark.parametrize("variant", [VARIANTS[name] for name in PAIRED], ids=PAIRED)
def test_batches_of_any_size_down_to_a_single_row(variant: Variant) -> None:
    place = bench("skip")
    whole = place.entry.batches(0, 6)
    sizes = [6, 1, 5, 2, 1, 4]
    batches = [rows(batch, 0, size) for batch, size in zip(whole, sizes, strict=True)]
    found = place.verify(place.plan(variant, 3, 4), place.job(batches=lambda epoch: batches), steps=6)
    held(found)
    assert found.losses == sum(min(4, size) for size in sizes)


@pytest.mark.parametrize("model", [name for name, entry in ZOO.items() if entry.varies])
def test_lengths_may_vary_from_batch_to_batch(model: str) -> None:
    place = bench(model)
    batches = place.entry.batches(0, STEPS, short=True, varying=True)
    plan = place.plan(rotated(list(ZOO).index(model)), 3, 3)
    held(place.verify(plan, place.job(batches=lambda epoch: batches)))


@pytest.mark.parametrize("variant", [VARIANTS[name] for name in PAIRED], ids=PAIRED)
def test_two_epochs_of_different_data(variant: Variant) -> None:
    place = bench("two_inputs")
    job = place.job(batches=lambda epoch: place.entry.batches(epoch, 3, short=True))
    found = place.verify(place.plan(variant, 3, 3), job, steps=None, epochs=2)
    held(found)
    assert found.steps == 6


@pytest.mark.parametrize("rule", ["gpipe", "1f1b", "zb-h1", "zb-v", "pipedream", "pipeoptim improved stash"])
def test_only_synchronous_rules_drain_at_the_end_of_an_epoch(rule: str) -> None:
    place = bench("mlp")
    place.restore()
    job = place.job(batches=lambda epoch: place.entry.batches(epoch, 4))
    session = Session(job, place.captured, place.plan(VARIANTS[rule], 3, 1), 0, Length(epochs=2))
    done = [(event[0], event[1]) for event in session.run(notify=lambda event: None).events[0]]
    drained = done.index(("backward", 3)) < done.index(("forward", 4))
    assert drained == (rule in ("gpipe", "1f1b", "zb-h1", "zb-v"))


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
@pytest.mark.parametrize("frozen", ["first", "last", "all but one"])
def test_frozen_parameters_stay_what_they_are(frozen: str, transport: str) -> None:
    entry = ZOO["mlp"]
    model = entry.build(0)
    names = [name for name, _ in model.named_parameters()]
    kept = {"first": names[2:], "last": names[:-2], "all but one": names[2:3]}[frozen]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in kept)
    place = Bench(entry, model)
    for variant in ("1f1b", "pipeoptim improved mixed"):
        held(place.verify(place.plan(VARIANTS[variant], 4, 3, transport)))
        changed = {n for n, p in model.named_parameters() if not torch.equal(p, place.state[n])}
        assert changed == set(kept)


OUTSIDE: dict[str, Callable[[Named], Optimizer]] = {
    "RMSprop": partial(RMSprop, lr=1e-3, momentum=0.5),
    "Adagrad": partial(Adagrad, lr=1e-2),
    "NAdam": partial(NAdam, lr=2e-3),
}
OPTIONS: dict[str, Callable[[Named], Optimizer]] = {
    "Adam amsgrad": partial(Adam, lr=2e-3, amsgrad=True, weight_decay=0.01),
    "AdamW amsgrad maximize": partial(AdamW, lr=1e-3, amsgrad=True, maximize=True),
    "SGD maximize": partial(SGD, lr=1e-2, maximize=True),
    "SGD dampening maximize": partial(SGD, lr=1e-2, momentum=0.9, dampening=0.1, maximize=True),
    "AdamW fused": partial(AdamW, lr=2e-3, fused=True),
    "SGD fused": partial(SGD, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
}


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("name", OUTSIDE | OPTIONS)
def test_other_optimizers_and_their_options(name: str, predictor: str) -> None:
    place = bench("frozen")
    plan = place.plan(Variant("pipeoptim", predictor, "stash"), 3, 1)
    held(place.verify(plan, place.job((OUTSIDE | OPTIONS)[name])))


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_optimizer_outside_the_tables_is_predicted_all_the_same(name: str) -> None:
    """Its displacement moves the forward's weights: without prediction the losses are others."""
    place = bench("mlp")
    losses = []
    for variant in (VARIANTS["pipedream"], STASH):
        place.restore()
        session = Session(place.job(OUTSIDE[name]), place.captured, place.plan(variant, 3, 1), 0, Length(steps=STEPS))
        losses.append(session.run(notify=lambda event: None).micro_losses)
    assert losses[0] != losses[1]


def test_delays_change_nothing() -> None:
    place = bench("skip")
    plan = place.plan(RECOMPUTE, 4, 3)
    for seed in range(3):
        held(place.verify(plan, wrap=delays(seed)))


def test_a_model_in_double_precision() -> None:
    entry = ZOO["mlp"]
    doubled = dataclasses.replace(entry, loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[-1]))
    batches: list[Batch] = []
    for batch in entry.batches(0, STEPS, short=True):
        assert isinstance(batch, tuple)
        batches.append((batch[0].double(), batch[1]))
    place = Bench(doubled, entry.build(0).double(), batches)
    held(place.verify(place.plan(RECOMPUTE, 3, 3, "gloo")))


def test_a_loss_that_cannot_be_computed_again_is_told_as_the_persons(monkeypatch: pytest.MonkeyPatch) -> None:
    place, weights = run_vs_reference.run_reference, [1.0] * 99

    def loss(outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return outputs.square().mean() * weights.pop()

    def run_reference(*args: Any, **kwargs: Any) -> Any:
        weights.clear()
        return place(*args, **kwargs)

    job = roundelay.Job(
        model=nn.Linear(3, 3),
        loss=loss,
        batches=lambda epoch: [(torch.ones(4, 3), torch.ones(4))] * 9,
        optimizer=partial(SGD, lr=0.1),
    )
    monkeypatch.setattr(run_vs_reference, "run_reference", run_reference)
    with pytest.raises(UserCodeError, match="the one-process reference: got IndexError: pop from empty list"):
        roundelay.verify(job, plan=roundelay.plan(job, workers=1, rule="gpipe", cuts="equal"), steps=3)
