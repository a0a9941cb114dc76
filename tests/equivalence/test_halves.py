"""Backwards in two halves change when things are computed, and no bit of what is."""

from __future__ import annotations

from typing import Any

import pytest

from roundelay.actor.machine import Run
from roundelay.frontend.stages.deferred_wgrad import PendingWgrad
from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.handlers import HANDLERS, Context, do_backward_weight
from tests.equivalence.cells import OPTIMIZERS, VARIANTS, assert_same, bench, trained
from tests.zoo import ZOO

MODELS = ("mlp", "batchnorm", "token_mean")


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_zb_h1_equals_the_reference_whose_backwards_are_whole(model: str, optimizer: str, stages: int) -> None:
    place = bench(model)
    for variant, micro_batches in (("zb-h1", 4), ("zb-h1 recompute", 3), ("zb-h1 mixed", 6)):
        plan = place.plan(VARIANTS[variant], stages, micro_batches)
        found = place.verify(plan, place.job(OPTIMIZERS[optimizer]))
        assert found.equal, found.difference


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("model", [*MODELS, "gpt2", "tied_head"])
def test_zb_h1_trains_as_1f1b_and_gpipe_do(model: str, stages: int) -> None:
    halves, *others = (trained(model, variant, stages) for variant in ("zb-h1", "1f1b", "gpipe"))
    for other in others:
        assert_same(halves, other)


def test_second_halves_come_a_stage_s_number_of_backwards_later() -> None:
    for k, events in trained("mlp", "zb-h1", 4).events.items():
        done = [(event[0], event[1]) for event in events if event[0].startswith("backward")]
        assert done.index(("backward-weight", 0)) == k + 1


@pytest.mark.parametrize("way", ["left out", "twice", "with the gradient of another"])
def test_a_second_half_that_goes_wrong_is_found_with_its_stage_and_micro_batch(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(context: Context, run: Run) -> MicroBatch | None:
        if (context.worker, run.g) == (2, 2):
            debt: list[tuple[list[PendingWgrad], Any]] = context.stage.debts[run.g]
            spoil(way, debt, context.stage.debts.get(run.g + 1, []))
        return do_backward_weight(context, run)

    monkeypatch.setitem(HANDLERS, "backward-weight", broken)
    place = bench("mlp")
    found = place.verify(place.plan(VARIANTS["zb-h1"], 3, 4))
    assert not found.equal
    assert (found.stage, "backward of micro-batch 2" in found.difference) == (2, True)


def spoil(way: str, debt: list[tuple[list[PendingWgrad], Any]], later: list[tuple[list[PendingWgrad], Any]]) -> None:
    """Break what a second half is given."""
    if way == "left out":
        debt.clear()
    elif way == "twice":
        debt[0][0].append(debt[0][0][0])
    else:
        debt[0][0][0].grad_output = later[0][0][0].grad_output


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_halves_over_processes(transport: str) -> None:
    place = bench("batchnorm")
    found = place.verify(place.plan(VARIANTS["zb-h1"], 3, 4, transport))
    assert found.equal, found.difference


def test_every_model_of_the_zoo_by_halves() -> None:
    unequal = {}
    for name in (name for name in ZOO if name not in MODELS):
        place = bench(name)
        found = place.verify(place.plan(VARIANTS["zb-h1"], 3, 3), steps=2)
        if not found.equal:
            unequal[name] = found.difference
    assert unequal == {}
