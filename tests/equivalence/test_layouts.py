"""Cyclic data parallelism in its four forms: each computes what the one-process reference does, bit for bit."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from roundelay.errors import PlanError, UsageError
from roundelay.ir import rule
from roundelay.ir.clip import NO_CLIP, Clip
from roundelay.ir.loss_scale import NO_SCALE
from roundelay.ir.plan import Plan
from roundelay.ir.rule import Fresh, UpdateRule, rule_named
from roundelay.proof.tamper_ways import SUM_WAYS, WAYS
from roundelay.schedules import LAYOUTS
from roundelay.session.training import Length, Session, Trained
from tests.equivalence.cells import OPTIMIZERS, STEPS, VARIANTS, Bench, allowed, assert_same, bench
from tests.zoo import MODELS


def _own(name: str, fresh: Fresh) -> UpdateRule:
    return replace(rule_named("cdp-v1"), name=name, source="a test", fresh=fresh)


OWN = [
    _own("fresh-on-the-last-stage", lambda micro_batch, stage, stages: stage == stages and micro_batch >= 3),
    _own("checkerboard", lambda micro_batch, stage, stages: (micro_batch + stage) % 2 == 0),
]
RULES = ("cdp-v1", "cdp-v2", "fresh-on-the-last-stage")
SIZES = [(n, s) for n in (2, 3, 4, 5) for s in sorted({1, n, 2 if n == 3 else 3})]
LARGE = [(layout, n) for layout in ("single", "dp") for n in (6, 7, 8)]


@pytest.fixture(autouse=True)
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person's own rules, known during these tests only."""
    monkeypatch.setattr(rule, "_RULES", {**rule._RULES, **{own.name: own for own in OWN}})


def held(place: Bench, plan: Plan, optimizer: str = "momentum", **options: Any) -> None:
    found = place.verify(plan, place.job(OPTIMIZERS[optimizer]), **options)
    assert found.equal, found.difference


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("size", "stages"), SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_what_its_reference_does(
    layout: str, size: int, stages: int, name: str, optimizer: str
) -> None:
    place = bench("batchnorm" if optimizer == "adamw" else "mlp")
    held(place, place.in_layout(layout, name, size, stages), optimizer)


@pytest.mark.parametrize("name", ["cdp-v1", "cdp-v2"])
@pytest.mark.parametrize(("layout", "size"), LARGE)
def test_up_to_eight_micro_batches(layout: str, size: int, name: str) -> None:
    place = bench("mlp")
    held(place, place.in_layout(layout, name, size, 4))


@pytest.mark.parametrize("model", ["tied_head", "token_mean", "dropout_heavy", "frozen", "llama"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_of_other_kinds(layout: str, model: str) -> None:
    place = bench(model)
    held(place, place.in_layout(layout, "cdp-v2", 3, 2))


@pytest.mark.parametrize(
    ("layout", "transport"),
    [
        ("single", "shm"),
        ("dp", "shm"),
        ("mp", "shm"),
        ("zero", "shm"),
        ("dp", "gloo"),
        ("mp", "gloo"),
        ("zero", "gloo"),
    ],
)
def test_between_processes(layout: str, transport: str) -> None:
    place = bench("batchnorm")
    held(place, place.in_layout(layout, "cdp-v2", 3, 3, transport))


NEEDS_NORM = [{"clip": "global:0.05"}, {"clip": "previous:0.05"}, {"precision": "fp16", "loss_scale": "dynamic"}]


@pytest.mark.parametrize("other", NEEDS_NORM, ids=str)
@pytest.mark.parametrize(("layout", "name"), [("single", "gpipe"), ("single", "1f1b"), ("dp", "gpipe"), ("dp", "1f1b")])
def test_a_synchronous_form_may_need_the_norm_of_all_gradients(layout: str, name: str, other: dict[str, str]) -> None:
    place = bench("mlp")
    plan = replace(place.in_layout(layout, name, 3, 2), **other)  # type: ignore[arg-type]
    held(place, plan)
    assert differs(place, plan, replace(plan, clip=NO_CLIP, precision="fp32", loss_scale=NO_SCALE))


@pytest.mark.parametrize(("size", "stages", "transport"), [(2, 2, "memory"), (3, 2, "shm"), (4, 3, "memory")])
def test_replicas_that_read_older_weights_everywhere_clip_by_the_norm_of_all_gradients(
    size: int, stages: int, transport: str
) -> None:
    place = bench("batchnorm")
    plan = replace(place.in_layout("dp", "cdp-v1", size, stages, transport), clip=Clip.parse("global:0.05"))
    held(place, plan, "adamw")
    assert differs(place, plan, replace(plan, clip=NO_CLIP))


@pytest.mark.parametrize(("layout", "name"), [("dp", "cdp-v2"), ("single", "cdp-v1"), ("mp", "cdp-v1")])
def test_no_other_staggered_form_clips_by_that_norm(layout: str, name: str) -> None:
    place = bench("mlp")
    plan = replace(place.in_layout(layout, name, 3, 2), clip=Clip.parse("global:0.05"))
    with pytest.raises(PlanError, match=r"clip of the plan, with layout .*got global:0\.05"):
        held(place, plan)


def differs(place: Bench, plan: Plan, other: Plan) -> bool:
    """Whether two plans train to different weights."""
    ours, theirs = (run(place, one).snapshot.parameters for one in (plan, other))
    return not all(torch.equal(ours[name], theirs[name]) for name in ours)


@functools.cache
def trained(layout: str, name: str, model: str = "mlp") -> Trained:
    """Three updates in a layout of three micro-batches and stages, or in the pipeline."""
    place = bench(model)
    pipeline = layout == "pipeline"
    variant = VARIANTS[name]
    plan = place.plan(variant, 3, allowed(variant, 3, 3)) if pipeline else place.in_layout(layout, name, 3, 3)
    if pipeline:
        ends = [stage.segments for stage in place.in_layout("dp", name, 3, 3).stages]
        plan = replace(
            plan, stages=tuple(replace(stage, segments=own) for stage, own in zip(plan.stages, ends, strict=True))
        )
    return run(place, plan)


def run(place: Bench, plan: Plan) -> Trained:
    """Three updates from the first weights on."""
    place.restore()
    session = Session(place.job(OPTIMIZERS["adamw"]), place.captured, plan, 0, Length(steps=3))
    return session.run(notify=lambda event: None)


@pytest.mark.parametrize("name", ["cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("layout", ["single", "dp", "zero"])
def test_forms_that_sum_in_one_order_have_the_pipelines_bits(layout: str, name: str) -> None:
    assert_same(trained(layout, name), trained("pipeline", name))


@pytest.mark.parametrize("name", ["cdp-v1", "cdp-v2"])
def test_mp_sums_in_another_order_and_is_near(name: str) -> None:
    entry = MODELS["mlp"]
    batches = [_doubled(batch) for batch in entry.batches(0, STEPS)]
    place = Bench(entry, entry.build(0).double(), batches)
    ours, theirs = (run(place, place.in_layout(layout, name, 3, 2)).snapshot.parameters for layout in ("mp", "dp"))
    assert not all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(torch.allclose(ours[name], theirs[name], rtol=0.0, atol=1e-12) for name in ours)


def _doubled(value: Any) -> Any:
    """A batch with its numbers in double precision."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    return type(value)([_doubled(part) for part in value])


@pytest.mark.parametrize("layout", ["single", "zero"])
def test_what_the_timing_cannot_give_is_refused_with_the_first_place(layout: str) -> None:
    place = bench("mlp")
    with pytest.raises(PlanError, match="stage 0, forward of micro-batch"):
        place.in_layout(layout, "checkerboard", 3, 3)


@pytest.mark.parametrize("layout", ["dp", "mp"])
def test_forms_that_can_wait_run_any_rule(layout: str) -> None:
    place = bench("mlp")
    held(place, place.in_layout(layout, "checkerboard", 3, 3))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_worker_of_dp_and_mp_has_statistics_of_its_own(layout: str) -> None:
    buffers = trained(layout, "cdp-v2", "batchnorm").snapshot
    assert len(buffers.replica_buffers) == {"dp": 2, "mp": 2}.get(layout, 0)
    assert all(
        any(not torch.equal(own[name], buffers.buffers[name]) for name in own) for own in buffers.replica_buffers
    )


def test_short_batches_are_among_them() -> None:
    rows = [len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0]) for batch in bench("mlp").batches]
    assert len(rows) == STEPS
    assert min(rows) < max(SIZES)[0] < max(rows)


@pytest.mark.parametrize("way", [*WAYS, *SUM_WAYS])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_broken_run_is_noticed(layout: str, way: str) -> None:
    place = bench("dropout_heavy")
    plan = place.in_layout(layout, "cdp-v2", 3, 3)
    if layout == "single" and way == "hop":
        with pytest.raises(UsageError, match="hand on sums"):
            place.verify(plan, tamper=way)
    else:
        found = place.verify(plan, tamper=way)
        assert not found.equal
        assert found.stage >= 0


def test_a_sum_is_tampered_with_in_layouts_only() -> None:
    place = bench("mlp")
    for plan in (place.plan(VARIANTS["cdp-v2"], 2, 3), place.in_layout("dp", "cdp-v2", 2, 2)):
        with pytest.raises(UsageError, match="3 micro-batches"):
            place.verify(plan, tamper="sum-order")
