"""A run in half precision goes on with the loss scales that it had: what is in flight carries, and what comes next."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from roundelay.checkpoint.checkpoint import Checkpoint, load
from roundelay.ir.clip import Clip
from roundelay.ir.loss_scale import LossScale
from roundelay.proof.reference_start import ReferenceStart
from roundelay.proof.run_vs_reference import verify_session
from roundelay.session.training import Length, Saving, Session, Trained
from tests.equivalence.cells import VARIANTS, bench
from tests.resume.cuts import Trip, differences, every_checkpoint
from tests.resume.test_pieces import each
from tests.resume.test_rules import CUTS, trip


def made(variant: str, sizes: tuple[int, int], scale: str) -> Trip:
    """A trip in half precision."""
    full = trip("batchnorm", VARIANTS[variant], sizes, "nesterov")
    plan = dataclasses.replace(
        full.plan, precision="fp16", loss_scale=LossScale.parse(scale), clip=Clip.parse("previous:0.05")
    )
    return dataclasses.replace(full, plan=plan)


def otherwise(whole: Trained, rest: Trained, start: Checkpoint) -> list[str]:
    """What a continued run has done otherwise, scales included."""
    after = {g: scale for g, scale in whole.micro_scales.items() if g >= start.position.micro_batches}
    odd = differences(whole, rest, start) + ["scales"] * (rest.micro_scales != after)
    return odd + ["what comes next"] * (rest.snapshot.loss_scale != whole.snapshot.loss_scale)


@pytest.mark.parametrize("scale", ["dynamic:268435456:1", "dynamic:16:1", "1024"])
@pytest.mark.parametrize(
    ("variant", "sizes"), [("pipeoptim improved mixed", (4, 1)), ("cdp-v2", (3, 4)), ("1f1b", (2, 3))]
)
def test_it_ends_with_the_same_bits_and_scales(
    variant: str, sizes: tuple[int, int], scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = made(variant, sizes, scale)
    with every_checkpoint(monkeypatch, tmp_path):
        whole = there.whole(Saving(path=tmp_path, every=1))
    assert len(set(whole.micro_scales.values())) > 1 or scale == "1024"
    for updates in CUTS:
        start = load(tmp_path / str(updates))
        assert otherwise(whole, there.rest(start), start) == [], f"behind update {updates}"


def forgotten(start: Checkpoint) -> Checkpoint:
    """Without the scale that comes next."""
    return dataclasses.replace(start, loss_scale=None)


def other_count(start: Checkpoint) -> Checkpoint:
    """With another number of finite batches behind it."""
    assert start.loss_scale is not None
    return dataclasses.replace(start, loss_scale=(start.loss_scale[0], start.loss_scale[1] + 1))


PIECES: dict[str, Any] = {
    "what comes next": forgotten,
    "its count": other_count,
    "what is in flight": each(lambda stage: dataclasses.replace(stage, scales={})),
}


@pytest.mark.parametrize("piece", PIECES)
def test_without_a_piece_of_it_the_run_is_another(piece: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = made("pipeoptim improved mixed", (4, 1), "dynamic:16:4")
    with every_checkpoint(monkeypatch, tmp_path):
        whole = there.whole(Saving(path=tmp_path, every=1))
    start = next(
        start
        for start in (load(tmp_path / str(updates)) for updates in range(3, 8))
        if start.loss_scale is not None and start.loss_scale[0] not in start.flight.stages[0, 0].scales.values()  # type: ignore[union-attr]
    )
    assert otherwise(whole, there.rest(start), start) == []
    assert otherwise(whole, there.rest(PIECES[piece](start)), start)


@pytest.mark.parametrize("variant", ["1f1b", "pipedream"])
def test_with_empty_stages_it_goes_on_with_the_scale_that_it_had(variant: str, tmp_path: Path) -> None:
    place = bench("mlp")
    chosen = place.plan(VARIANTS[variant], 3, 2)
    plan = dataclasses.replace(chosen, precision="fp16", loss_scale=LossScale.parse("dynamic:268435456:2"))
    place.restore()
    whole = Session(place.job(), place.captured, plan, 0, Length(steps=4)).run(
        notify=lambda event: None, saving=Saving(path=tmp_path / "kept")
    )
    start = load(tmp_path / "kept")
    assert start.flight is None
    assert start.loss_scale == whole.snapshot.loss_scale != (2.0**28, 0)
    place.restore()
    session = Session(place.job(), place.captured, plan, 0, Length(steps=5), start)
    found = verify_session(session, first=ReferenceStart.of(place.captured))
    assert found.equal, found.difference
    rest = Session(place.job(), place.captured, plan, 0, Length(steps=5), start).run(notify=lambda event: None)
    assert start.loss_scale is not None
    assert next(iter(rest.micro_scales.values())) == start.loss_scale[0]
