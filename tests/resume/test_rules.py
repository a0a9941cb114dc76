"""A run that goes on from any of its checkpoints ends as it would have ended, under every rule, mode and predictor."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

from roundelay.checkpoint import checkpoint as store
from roundelay.checkpoint.checkpoint import Manifest, load
from roundelay.errors import UsageError
from roundelay.ir.clip import Clip
from roundelay.ir.rule import UpdateRule, register_rule, rules
from roundelay.job import Job
from roundelay.planning.planning import capture, plan
from roundelay.proof.reference_start import ReferenceStart
from roundelay.proof.run_vs_reference import verify_session
from roundelay.session.events import Drained, Saved, Updated
from roundelay.session.resume import changed, load_checkpoint
from roundelay.session.training import Length, Saving, Session
from tests.equivalence.cells import OPTIMIZERS, STEPS, VARIANTS, Variant, allowed, bench
from tests.resume.cuts import Trip, differences, every_checkpoint

#: Two epochs of five batches, of which the third and the fifth are short.
EPOCHS = Length(epochs=2)
CUTS = (1, 4, 5, 7)
TWO = (CUTS[::2], CUTS[1::2])
#: Running statistics, dropout, a tied weight that travels, one that skips stages, a loss of (sum, count).
MODELS = ("batchnorm", "tied_head", "dropout_heavy", "buffer_reader", "token_mean", "skip")
SIZES = ((4, 1), (3, 4), (2, 1), (3, 1), (2, 3))
NAMES = tuple(OPTIMIZERS)

_ROUND = [
    (name, *choice)
    for name, choice in zip(
        VARIANTS,
        zip(itertools.cycle(MODELS), itertools.cycle(SIZES), itertools.cycle(NAMES), itertools.cycle(TWO)),
        strict=False,
    )
]


def trip(model: str, variant: Variant, sizes: tuple[int, int], optimizer: str, **more: Any) -> Trip:
    """A trip of a model of the zoo, its learning rate changing with every update."""
    place = bench(model)
    rates: dict[str, Any] = {"scheduler": lambda optimizer: LambdaLR(optimizer, lambda update: 0.9**update)}

    def job() -> Job:
        return place.job(OPTIMIZERS[optimizer], **(rates | more))

    chosen = place.plan(variant, sizes[0], allowed(variant, *sizes))
    return Trip(job, place.captured, chosen, EPOCHS, place.restore)


@pytest.mark.parametrize(("variant", "model", "sizes", "optimizer", "cuts"), _ROUND)
def test_it_ends_with_the_same_bits(
    variant: str,
    model: str,
    sizes: tuple[int, int],
    optimizer: str,
    cuts: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = trip(model, VARIANTS[variant], sizes, optimizer)
    with every_checkpoint(monkeypatch, tmp_path):
        whole = made.whole(Saving(path=tmp_path, every=1))
    for updates in cuts:
        start = load(tmp_path / str(updates))
        assert differences(whole, made.rest(start), start) == [], f"behind update {updates}"


@pytest.mark.parametrize("sizes", [(4, 1), (4, 2), (3, 4)])
@pytest.mark.parametrize("variant", ["pipeoptim improved mixed", "cdp-v2"])
def test_the_norms_that_clip_go_on(
    variant: str, sizes: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trip("batchnorm", VARIANTS[variant], sizes, "sgd")
    made = dataclasses.replace(made, plan=dataclasses.replace(made.plan, clip=Clip.parse("previous:0.01")))
    with every_checkpoint(monkeypatch, tmp_path):
        whole = made.whole(Saving(path=tmp_path, every=1))
    for updates in CUTS:
        start = load(tmp_path / str(updates))
        assert differences(whole, made.rest(start), start) == [], f"behind update {updates}"


@pytest.mark.parametrize("variant", ["pipedream", "pipeoptim improved mixed"])
def test_modules_that_backwards_run_again_go_on(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ``stash`` also one that the checkpoint's run has not run again."""
    made = trip("batchnorm", VARIANTS[variant], (4, 1), "sgd")
    again = dataclasses.replace(made, plan=dataclasses.replace(made.plan, recompute=("blocks.*",)))
    with every_checkpoint(monkeypatch, tmp_path):
        whole = (made if variant == "pipedream" else again).whole(Saving(path=tmp_path, every=1))
    for updates in CUTS:
        start = load(tmp_path / str(updates))
        assert differences(whole, again.rest(start), start) == [], f"behind update {updates}"


@pytest.mark.parametrize("variant", ["rehearse mixed", "rehearse recompute"])
def test_forwards_that_foresee_from_different_sums_read_their_own_weights_again(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trip("batchnorm", VARIANTS[variant], (4, 4), "sgd")
    with every_checkpoint(monkeypatch, tmp_path):
        whole = made.whole(Saving(path=tmp_path, every=1))
    for updates in CUTS:
        start = load(tmp_path / str(updates))
        assert differences(whole, made.rest(start), start) == [], f"behind update {updates}"


def test_a_run_that_goes_on_makes_checkpoints_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trip("batchnorm", VARIANTS["pipeoptim improved mixed"], (4, 1), "sgd")
    with every_checkpoint(monkeypatch, tmp_path):
        whole = made.whole(Saving(path=tmp_path, every=1))
    for first, second in ((2, 3), (2, 5), (4, 7)):  # some of what is in flight at the second has been at the first, too
        with every_checkpoint(monkeypatch, tmp_path / str(first)):
            made.rest(load(tmp_path / str(first)), saving=Saving(path=tmp_path, every=1))
        start = load(tmp_path / str(first) / str(second))
        assert differences(whole, made.rest(start), start) == []


@pytest.mark.parametrize("variant", ["pipeoptim improved recompute", "cdp-v2"])
def test_between_processes_and_from_one_transport_to_another(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trip("batchnorm", VARIANTS[variant], (3, 2), "adamw")
    sharing = dataclasses.replace(made, plan=dataclasses.replace(made.plan, transport="shm"))
    with every_checkpoint(monkeypatch, tmp_path):
        whole = sharing.whole(Saving(path=tmp_path, every=4))
    start = load(tmp_path / "4")
    for again in (made, sharing):
        assert differences(whole, again.rest(start), start) == []


def test_the_moment_of_a_checkpoint_is_counted_from_the_first_update_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trip("skip", VARIANTS["pipedream"], (3, 1), "sgd")
    with every_checkpoint(monkeypatch, tmp_path):
        made.whole(Saving(path=tmp_path, every=3))
    assert numbered(tmp_path) == [3, 5, 6, 9, 10]
    with every_checkpoint(monkeypatch, tmp_path / "rest"):
        made.rest(load(tmp_path / "5"), saving=Saving(path=tmp_path, every=4))
    assert numbered(tmp_path / "rest") == [8, 10]


def numbered(folder: Path) -> list[int]:
    """The checkpoints of which there are copies."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def test_a_row_of_ones_own_is_resumed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundelay.ir.rule._RULES", {rule.name: rule for rule in rules()})
    register_rule(
        UpdateRule(
            name="mine, resumed",
            schedule="async-1f1b",
            predicts=False,
            stashes=True,
            modes=("stash",),
            source="a test",
            versions="table",
            fresh=lambda i, j, d: j == d,
        )
    )
    made = trip("mlp", Variant("mine, resumed", "none", "stash"), (4, 3), "nesterov")
    with every_checkpoint(monkeypatch, tmp_path):
        whole = made.whole(Saving(path=tmp_path, every=1))
    for updates in CUTS:
        start = load(tmp_path / str(updates))
        assert differences(whole, made.rest(start), start) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"sizes": (2, 1)}, "workers from 4 to 2"),
        ({"sizes": (4, 3)}, "micro-batches from 1 to 3"),
        ({"variant": VARIANTS["pipedream"]}, "rule from pipeoptim to pipedream"),
        ({"variant": VARIANTS["pipeoptim paper mixed"]}, "predictor from improved to paper"),
    ],
)
def test_with_another_plan_the_stages_start_empty_and_it_is_told(
    change: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {
        "model": "batchnorm",
        "variant": VARIANTS["pipeoptim improved mixed"],
        "sizes": (4, 1),
        "optimizer": "adamw",
    }
    with every_checkpoint(monkeypatch, tmp_path):
        trip(**given).whole(Saving(path=tmp_path, every=1))
    start = load(tmp_path / "4")
    assert start.flight is not None
    assert start.flight.micro_batches == 3
    other = trip(**(given | change))
    events: list[Any] = []
    drained = other.rest(start, events)
    assert [event for event in events if isinstance(event, Drained)] == [events[0]]
    assert events[0].micro_batches == 3
    assert told in events[0].reason
    bare = dataclasses.replace(start, flight=None)  # what was made with an empty pipeline
    assert differences(drained, other.rest(bare), bare) == []
    session = Session(other.job(), other.captured, other.plan, 0, Length(steps=3), start)
    assert verify_session(session).equal


def test_of_a_flushing_rule_nothing_is_in_flight_and_nothing_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with every_checkpoint(monkeypatch, tmp_path):
        whole = trip("batchnorm", VARIANTS["1f1b"], (4, 3), "adamw").whole(Saving(path=tmp_path, every=1))
    start, events = load(tmp_path / "3"), list[Any]()
    rest = trip("batchnorm", VARIANTS["gpipe"], (2, 3), "adamw").rest(start, events)
    assert differences(whole, rest, start) == []
    assert not [event for event in events if isinstance(event, Drained)]


def test_another_transport_or_device_name_is_no_other_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trip("skip", VARIANTS["pipedream"], (3, 1), "sgd")
    with every_checkpoint(monkeypatch, tmp_path):
        made.whole(Saving(path=tmp_path, every=4))
    flight = load(tmp_path / "4").flight
    assert flight is not None
    assert changed(flight, flight.order) == ""
    assert changed(flight, flight.order | {"cuts": "a b c"}) == "the plan changed: other cuts"


@pytest.mark.parametrize("variant", ["pipeoptim improved mixed", "pipedream", "cdp-v2"])
def test_what_follows_a_checkpoint_is_proved_from_the_first_update_on(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trip("batchnorm", VARIANTS[variant], (4, 3), "adamw")
    with every_checkpoint(monkeypatch, tmp_path):
        made.whole(Saving(path=tmp_path, every=1))
    made.restore()
    first = ReferenceStart.of(made.captured)
    start = load_checkpoint(tmp_path / "4", made.captured)
    found = verify_session(Session(made.job(), made.captured, made.plan, 0, Length(steps=4), start), first=first)
    assert found.equal, found.difference
    assert (found.steps, found.losses) == (4, 8)  # rows of a batch make two parts, as BatchNorm asks for two in each
    broken = dataclasses.replace(start, flight=None)
    drained = Session(made.job(), made.captured, made.plan, 0, Length(steps=4), broken)
    assert verify_session(drained).equal, "it is another run, which its own reference proves"
    with pytest.raises(UsageError, match="last empty after update"):
        verify_session(Session(made.job(), made.captured, made.plan, 0, Length(steps=4), start))


def test_the_short_run_behind_a_checkpoint_may_end_within_what_was_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dataclasses.replace(trip("skip", VARIANTS["pipedream"], (4, 1), "sgd"), length=Length(steps=STEPS))
    with every_checkpoint(monkeypatch, tmp_path):
        whole = made.whole(Saving(path=tmp_path, every=1))
    start = load(tmp_path / str(STEPS - 1))
    assert start.flight is not None
    assert start.flight.micro_batches == 1, "the run's last"
    assert differences(whole, made.rest(start), start) == []


@pytest.mark.parametrize("length", [Length(steps=8), EPOCHS])
def test_an_interrupted_run_goes_on_to_its_own_end(
    length: Length, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dataclasses.replace(trip("skip", VARIANTS["pipedream"], (3, 1), "sgd"), length=length)
    with every_checkpoint(monkeypatch, tmp_path):
        whole = made.whole(Saving(path=tmp_path, every=1))
    for updates in (3, 5):
        start = load(tmp_path / str(updates))
        made.restore()
        rest = Session(made.job(), made.captured, made.plan, 0, Length(), start).run(notify=lambda event: None)
        assert differences(whole, rest, start) == []
    ended = load(tmp_path / str(len(whole.updates)))
    more = Session(made.job(), made.captured, made.plan, 0, Length(), ended)
    assert more.extent.epochs == ended.position.epoch + 1, "nothing is lacking: one epoch more"


def test_epochs_of_one_batch_hand_over_each_its_own_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trip("batchnorm", VARIANTS["pipedream"], (4, 1), "sgd", batches=lambda epoch: bench("batchnorm").batches[:1])
    made = dataclasses.replace(made, length=Length(epochs=6))
    with every_checkpoint(monkeypatch, tmp_path):
        whole = made.whole(Saving(path=tmp_path))
    seen = {epoch: load(tmp_path / str(epoch)) for epoch in range(1, 7)}
    counted = [name for name in seen[1].buffers if name.endswith("num_batches_tracked")]
    assert counted
    for epoch, start in seen.items():
        assert all(int(start.buffers[name]) == epoch for name in counted)
    assert differences(whole, made.rest(seen[2]), seen[2]) == []


def test_weights_that_are_not_contiguous_are_laid_out_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.ReLU(), nn.Conv2d(24, 8, 3))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 2)).to(memory_format=torch.channels_last)
    batches = [(torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last), torch.randn(4, 2)) for _ in range(5)]
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def job() -> Job:
        return Job(
            model=model,
            loss=lambda outputs, batch: functional.mse_loss(outputs, batch[1]),
            batches=lambda epoch: batches,
            optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        )

    captured = capture(job())
    chosen = plan(job(), workers=3, rule="pipedream", micro_batches=1, captured=captured, cuts="equal")
    made = Trip(job, captured, chosen, EPOCHS, lambda: void(model.load_state_dict(first)))
    with every_checkpoint(monkeypatch, tmp_path):
        whole = made.whole(Saving(path=tmp_path, every=1))
    for updates in CUTS:
        start = load(tmp_path / str(updates))
        assert differences(whole, made.rest(start), start) == []


def void(result: object) -> None:
    """Take a result and give none."""


def test_a_checkpoint_that_falls_due_while_one_is_being_written_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the training nor its memory waits for the disk; the run's end is saved in any case."""
    made = trip("skip", VARIANTS["pipedream"], (3, 1), "sgd")
    written: list[int] = []
    begun, released = threading.Event(), threading.Event()
    left_out: list[int] = []

    def slow(path: Path, manifest: Manifest) -> None:
        begun.set()
        assert released.wait(60)
        written.append(manifest.facts.position.updates)
        committing(path, manifest)

    def release(event: Any) -> None:
        if isinstance(event, Updated) and event.update == 9:
            assert begun.wait(60)
            released.set()
        if isinstance(event, Saved):
            left_out.append(event.left_out)

    committing = store.commit
    monkeypatch.setattr(store, "commit", slow)
    made.restore()
    session = Session(made.job(), made.captured, made.plan, 0, EPOCHS)
    session.run(notify=release, saving=Saving(path=tmp_path, every=1))
    assert written == [1, 10]
    assert sum(left_out) == 8
    assert load(tmp_path).position.updates == 10
