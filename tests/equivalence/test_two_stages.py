"""Two stages on a worker: what is computed is what as many stages compute on workers of their own, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import roundelay
from roundelay.actor.machine import Run
from roundelay.checkpoint.checkpoint import load
from roundelay.errors import PlanError, UserCodeError
from roundelay.ir.micro_batch import MicroBatch
from roundelay.planning.planning import plan as make_plan
from roundelay.proof.tamper_ways import WAYS
from roundelay.runtime.handlers import HANDLERS, Context, do_backward_weight, do_forward
from roundelay.session.training import Length, Saving, Session
from tests.equivalence.cells import OPTIMIZERS, VARIANTS, assert_same, bench, trained
from tests.resume.cuts import Trip, differences, every_checkpoint
from tests.zoo import ZOO

MODELS = ("mlp", "batchnorm", "token_mean", "tied_head")
V = VARIANTS["zb-v"]


@pytest.mark.parametrize("stages", [4, 8])
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("model", ["skip", "gpt2"])
def test_zb_v_equals_the_reference(model: str, optimizer: str, stages: int) -> None:
    place = bench(model)
    for variant, micro_batches in (("zb-v", 8), ("zb-v", 3), ("zb-v recompute", 4)):
        plan = place.plan(VARIANTS[variant], stages, micro_batches)
        found = place.verify(plan, place.job(OPTIMIZERS[optimizer]))
        assert found.equal, found.difference
        assert len(found.workers) == stages // 2


@pytest.mark.parametrize("transport", ["shm", "gloo"])
@pytest.mark.parametrize(("model", "stages"), [("batchnorm", 4), ("tied_head", 4)])
def test_zb_v_over_processes(model: str, stages: int, transport: str) -> None:
    place = bench(model)
    found = place.verify(place.plan(V, stages, 4, transport))
    assert found.equal, found.difference
    assert len({worker["pid"] for worker in found.workers.values()}) == stages // 2


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("model", MODELS)
def test_zb_v_trains_as_1f1b_and_gpipe_do_on_as_many_stages(model: str, stages: int) -> None:
    pairs, *others = (trained(model, variant, stages) for variant in ("zb-v", "1f1b", "gpipe"))
    assert sorted(pairs.workers) == list(range(stages // 2))
    for other in others:
        assert_same(pairs, other)


def test_every_model_of_the_zoo_by_two_stages() -> None:
    unequal = {}
    for name in (name for name in ZOO if name not in MODELS):
        place = bench(name)
        found = place.verify(place.plan(V, 4, 3), steps=2)
        if not found.equal:
            unequal[name] = found.difference
    assert unequal == {}


# --- what stays on a worker


def test_what_is_handed_over_on_a_worker_is_not_sent() -> None:
    run = trained("mlp", "zb-v", 2)
    (account,) = run.workers.values()
    assert (sum(account["bytes_sent"].values()), sum(account["bytes_received"].values())) == (0, 0)
    assert {(event[0], event[8]) for event in run.events[0]} == {
        ("read", 0),
        *((opcode, stage) for opcode in ("forward", "backward", "backward-weight", "update") for stage in (0, 1)),
    }


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_the_simulated_events_are_those_of_the_run(transport: str) -> None:
    place = bench("mlp")
    place.restore()
    plan = place.plan(V, 4, 4, transport)
    job = place.job(batches=lambda epoch: place.entry.batches(0, 3))
    run = Session(job, place.captured, plan, 0, Length(steps=3)).run(notify=lambda event: None)
    assert [tuple(e[-1] for e in run.events[k]) for k in (0, 1)] == list(roundelay.simulate(plan, batches=3).events)


# --- what goes wrong is found


@pytest.mark.parametrize("way", WAYS)
def test_tampering_is_found_and_placed(way: str) -> None:
    place = bench("dropout_heavy")
    plan = place.plan(V, 4, 3)
    found = place.verify(plan, tamper=way)
    assert not found.equal
    assert f"stage {found.stage}" in found.difference


@pytest.mark.parametrize("stage", [0, 3])
def test_a_second_half_that_is_left_out_is_found_on_either_of_a_worker_s_stages(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(context: Context, run: Run) -> MicroBatch | None:
        if (context.number, run.g) == (stage, 2):
            context.stage.debts[run.g].clear()
        return do_backward_weight(context, run)

    monkeypatch.setitem(HANDLERS, "backward-weight", broken)
    place = bench("mlp")
    found = place.verify(place.plan(V, 4, 4))
    assert not found.equal
    assert (found.stage, "backward of micro-batch 2" in found.difference) == (stage, True)


def test_an_error_names_the_stage_and_not_the_worker() -> None:
    def broken(context: Context, run: Run) -> MicroBatch | None:
        raise ValueError("odd")

    place = bench("mlp")
    place.restore()
    session = Session(place.job(), place.captured, place.plan(V, 4, 4), 0, Length(steps=2))
    with pytest.raises(UserCodeError, match="stage 3, forward of micro-batch 0"):
        session.run(notify=lambda event: None, handlers={3: {"forward": broken, "backward": do_forward}})


# --- checkpoints


@pytest.mark.parametrize("transport", ["memory", "shm"])
def test_it_goes_on_from_every_checkpoint_with_the_same_bits(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = bench("batchnorm")
    plan = place.plan(V, 4, 3, transport)
    made = Trip(lambda: place.job(OPTIMIZERS["adamw"]), place.captured, plan, Length(epochs=2), place.restore)
    with every_checkpoint(monkeypatch, tmp_path):
        whole = made.whole(Saving(path=tmp_path, every=1))
    for updates in (1, 4, 5):
        start = load(tmp_path / str(updates))
        assert differences(whole, made.rest(start), start) == [], f"behind update {updates}"


def test_a_checkpoint_goes_on_by_another_rule_on_other_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = bench("mlp")
    trip = Trip(place.job, place.captured, place.plan(V, 4, 4), Length(epochs=2), place.restore)
    with every_checkpoint(monkeypatch, tmp_path):
        whole = trip.whole(Saving(path=tmp_path, every=1))
    start = load(tmp_path / "3")
    assert differences(whole, replace(trip, plan=place.plan(VARIANTS["1f1b"], 3, 4)).rest(start), start) == []


# --- planning


def test_a_plan_for_so_many_workers_has_twice_as_many_stages() -> None:
    place = bench("mlp")
    made = make_plan(place.job(), workers=2, rule="zb-v", captured=place.captured, cuts="equal")
    assert (made.num_stages, made.micro_batches, len(roundelay.simulate(made).workers)) == (4, 4, 2)
    ends = [list(stage.segments) for stage in made.stages]
    again = make_plan(place.job(), rule="zb-v", captured=place.captured, cuts=ends)
    assert [stage.segments for stage in again.stages] == [stage.segments for stage in made.stages]


@pytest.mark.parametrize(("workers", "given", "expected"), [(2, 2, "4, 2 for each worker"), (None, 3, "2 for each")])
def test_cuts_for_another_number_of_stages_are_refused(workers: int | None, given: int, expected: str) -> None:
    place = bench("mlp")
    ends = [list(stage.segments) for stage in place.plan(VARIANTS["gpipe"], given, 2).stages]
    with pytest.raises(PlanError, match=f"the cuts: got {given} stages; expected {expected}"):
        make_plan(place.job(), workers=workers, rule="zb-v", captured=place.captured, cuts=ends)


@pytest.mark.parametrize("choice", [{"clip": "global:0.05"}, {"precision": "fp16", "loss_scale": "dynamic:1048576:2"}])
def test_with_updates_that_wait_for_all_stages_the_simulated_events_are_those_of_the_run(
    choice: dict[str, Any],
) -> None:
    place = bench("mlp")
    place.restore()
    plan = replace(place.plan(V, 4, 4), **choice)
    job = place.job(batches=lambda epoch: place.entry.batches(0, 3))
    run = Session(job, place.captured, plan, 0, Length(steps=3)).run(notify=lambda event: None)
    assert [tuple(e[-1] for e in run.events[k]) for k in (0, 1)] == list(roundelay.simulate(plan, batches=3).events)
    ends = [(event[0], event[8]) for event in run.events[0] if event[0] in ("grad-norm-sq", "update")]
    assert ends == [("grad-norm-sq", 3), ("grad-norm-sq", 0), ("update", 0), ("update", 3)] * 3
