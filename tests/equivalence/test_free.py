"""A free order: whatever it was, its replay computes the same bits; and a run that was broken is told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import roundelay
from roundelay.checkpoint.checkpoint import load
from roundelay.errors import UsageError
from roundelay.ir.clip import Clip
from roundelay.job import Named
from roundelay.proof.reference_start import ReferenceStart, reference_start_of
from roundelay.proof.replayed import replayed_trace, told
from roundelay.proof.run_vs_reference import Verification
from roundelay.reference import Replayed
from roundelay.session.run_record import Trained
from roundelay.session.training import Length, Saving, Session
from tests.equivalence.cells import OPTIMIZERS, Bench, bench, delays
from tests.equivalence.free_runs import FREE, free_run, letters
from tests.resume.cuts import every_checkpoint

STEPS = 150
"""Of runs with digests: 300 letters for each stage."""


@pytest.mark.parametrize("seed", [1, 5])
def test_a_run_with_delays_by_lot_is_replayed_bit_for_bit(seed: int) -> None:
    """`python -m tests.equivalence.free_runs --runs 30` has them all."""
    found = free_run(seed)
    assert found.difference == ""
    assert found.digests > 100
    assert not found.as_pipedream
    assert all(0 <= seen <= most for seen, most in zip(found.stale, found.bound, strict=True))
    assert found.stale[-1] == 0


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo", "grpc"])
@pytest.mark.parametrize(("model", "stages", "micro_batches"), [("token_mean", 3, 3), ("batchnorm", 2, 1)])
def test_verify_replays_over_every_transport(model: str, stages: int, micro_batches: int, transport: str) -> None:
    place = bench(model)
    found = place.verify(place.plan(FREE, stages, micro_batches, transport))
    assert found.equal, found.difference
    count = sum(-(-len(batch_rows(batch)) // 1) > 0 for batch in place.batches)
    assert found.letters >= 2 * stages * count
    assert (found.digests, found.odd_digests) == (stages, 0)


def batch_rows(batch: Any) -> Any:
    """The rows of a batch."""
    first = batch
    while not isinstance(first, torch.Tensor):
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    return first


def schedule_and_groups(named: Named) -> torch.optim.Optimizer:
    """Two groups, as many give."""
    rest = [parameter for name, parameter in named if "bias" in name]
    return torch.optim.AdamW(
        [{"params": [p for n, p in named if "bias" not in n], "weight_decay": 0.1}, {"params": rest}], lr=1e-2
    )


def test_clipping_averages_groups_and_a_schedule_are_replayed() -> None:
    place = bench("skip")
    plan = dataclasses.replace(place.plan(FREE, 3, 2, "shm"), clip=Clip.parse("stage:0.1"), ema=0.9)
    job = place.job(
        schedule_and_groups, scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    )
    found = place.verify(plan, job)
    assert found.equal, found.difference


@pytest.mark.parametrize("way", ["stash", "s", "order", "rng", "drop-update"])
def test_a_broken_run_differs_from_its_replay(way: str) -> None:
    place = bench("dropout_heavy")
    found: Verification = place.verify(place.plan(FREE, 3, 1, "shm"), tamper=way, steps=8)
    assert not found.equal
    assert "differs" in found.difference
    assert found.odd_digests > 0


# --- traces and windows


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bench, Any, Trained, Path]:
    """A run with a checkpoint after every tenth update, all of which are kept."""
    place = bench("batchnorm")
    plan, folder = place.plan(FREE, 3, 1, "shm"), tmp_path_factory.mktemp("checkpoints")
    with pytest.MonkeyPatch.context() as patch, every_checkpoint(patch, folder / "all"):
        session = session_of(place, plan, STEPS)
        trained = session.run(wrap=delays(0), saving=Saving(path=folder / "last", every=10))
    return place, plan, trained, folder / "all"


def session_of(place: Bench, plan: Any, steps: int, start: Any = None) -> Session:
    place.restore()
    return Session(place.job(OPTIMIZERS["adamw"]), place.captured, plan, 0, Length(steps=steps), start)


def replayed(place: Bench, plan: Any, trained: Trained, start: Any = None, window: int | None = None) -> Replayed:
    session = session_of(place, plan, STEPS, start)
    traces = [trained.actions[stage] for stage in range(plan.num_stages)]
    origin = reference_start_of(session, ReferenceStart.of(session.captured))
    return replayed_trace(session, origin, traces, window, lambda: None)


def test_a_trace_is_replayed_whole_and_ends_with_the_run_s_weights(recorded: Any) -> None:
    place, plan, trained, _ = recorded
    found = replayed(place, plan, trained)
    assert (told(found), found.letters) == ("", sum(map(len, letters(trained.actions))))
    assert found.digests >= 3 * 15  # of the checkpoints, every 256 letters, and of the end
    for name, weight in trained.snapshot.parameters.items():
        assert torch.equal(weight, found.result.parameters[name])


@pytest.mark.parametrize("updates", [10, 70, 140])
def test_a_window_from_a_checkpoint_gives_what_the_whole_gives(recorded: Any, updates: int) -> None:
    place, plan, trained, folder = recorded
    start = load(folder / str(updates))
    rest = replayed(place, plan, trained, start)
    assert told(rest) == ""
    assert rest.letters >= 3 * 2 * (STEPS - updates)
    assert rest.digests >= 3 * (STEPS - updates) // 10
    for name, weight in trained.snapshot.parameters.items():
        assert torch.equal(weight, rest.result.parameters[name])
    window = replayed(place, plan, trained, start, window=24)
    assert told(window) == ""
    assert window.letters <= 3 * (24 + 3)
    assert 3 <= window.digests < rest.digests + 1


def test_a_swapped_letter_is_told_by_its_stage_and_the_next_digest(recorded: Any) -> None:
    place, plan, trained, _ = recorded
    own = trained.actions[0]
    at = own.letters.index("FFB", 40) + 1  # another one is in flight
    swapped = dataclasses.replace(own, letters=own.letters[:at] + "BF" + own.letters[at + 2 :])
    found = replayed(place, plan, dataclasses.replace(trained, actions={**trained.actions, 0: swapped}))
    assert told(found).startswith("replay DIFFERS at letter ")
    known = {k: trained.actions[k].digests for k in range(3)}
    assert all(letter in known[stage] for stage, letter in found.differing)
    first = min(letter for stage, letter in found.differing if stage == 0)
    assert first > at
    assert len([letter for letter in known[0] if at < letter < first]) <= 1, "weights differ after the backward"


def test_a_letter_that_nothing_allows_is_told_where_it_stands(recorded: Any) -> None:
    place, plan, trained, _ = recorded
    own = trained.actions[2]
    wrong = dataclasses.replace(own, letters="FBB" + own.letters[3:])
    found = replayed(place, plan, dataclasses.replace(trained, actions={**trained.actions, 2: wrong}))
    assert (2, 2) in found.stuck
    assert "replay DIFFERS at letter" in told(found)


def test_letters_that_are_missing_at_the_end_are_told(recorded: Any) -> None:
    place, plan, trained, _ = recorded
    own = trained.actions[1]
    short = dataclasses.replace(own, letters=own.letters[:-2], digests={})
    found = replayed(place, plan, dataclasses.replace(trained, actions={**trained.actions, 1: short}))
    assert "what it needs was never computed" in told(found)


def test_a_checkpoint_of_another_moment_is_refused(recorded: Any) -> None:
    place, plan, trained, folder = recorded
    start = load(folder / "70")
    cut = {k: dataclasses.replace(own, letters=own.letters[:80]) for k, own in trained.actions.items()}
    with pytest.raises(UsageError, match="after update 70, stage 0"):
        replayed(place, plan, dataclasses.replace(trained, actions=cut), start)
    moved = {k: dataclasses.replace(own, letters="F" + own.letters) for k, own in trained.actions.items()}
    with pytest.raises(UsageError, match="forwards in flight"):
        replayed(place, plan, dataclasses.replace(trained, actions=moved), start)


def test_a_run_that_continues_in_mid_flight_makes_a_new_trace_that_is_proved(recorded: Any) -> None:
    place, plan, _, folder = recorded
    start = load(folder / "70")
    assert start.flight is not None
    assert start.flight.micro_batches > 0
    session = session_of(place, plan, 20, start)
    trained = session.run(wrap=delays(3))
    assert trained.actions[0].head.first == (70, 70)
    again = session_of(place, plan, 20, start)
    origin = reference_start_of(again, ReferenceStart.of(again.captured))
    found = replayed_trace(again, origin, [trained.actions[k] for k in range(3)], None, lambda: None)
    assert told(found) == ""
    for name, weight in trained.snapshot.parameters.items():
        assert torch.equal(weight, found.result.parameters[name])


def test_verify_from_a_checkpoint_in_mid_flight_replays_what_follows(recorded: Any) -> None:
    from roundelay.proof.run_vs_reference import verify_session

    place, plan, _, folder = recorded
    session = session_of(place, plan, 12, load(folder / "70"))
    found = verify_session(session, wrap=delays(1), first=ReferenceStart.of(place.captured))
    assert found.equal, found.difference
    assert (found.begins, found.steps) == (70, 12)


def test_a_stage_that_gets_no_gradient_runs_its_backward_at_once() -> None:
    """The first of three stages has frozen weights only: nothing comes back to it."""
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(5)])
    for layer in range(2):
        model[layer].requires_grad_(requires_grad=False)
    data = [{"x": torch.randn(6, 4), "y": torch.randn(6, 4)} for _ in range(6)]
    job = roundelay.Job(
        model=model,
        loss=lambda outputs, batch: torch.nn.functional.mse_loss(outputs, batch["y"]),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        inputs=lambda batch: ((batch["x"],), {}),
    )
    plan = roundelay.plan(job, workers=3, rule="ravnest", cuts="equal", transport="shm")
    assert not any(edge.gradient for edge in plan.edges if edge.source == 0)
    found = roundelay.verify(job, plan=plan, steps=6)
    assert found.equal, found.differences()
