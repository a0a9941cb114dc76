"""A run broken on purpose is never called equal, and the stage that was broken is named."""

from __future__ import annotations

import pytest
from torch import nn

from roundelay.errors import UsageError
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.planning.planning import fitted
from roundelay.proof.tamper_ways import WAYS
from tests.equivalence.cells import PAIRED, VARIANTS, Bench, Variant, allowed, bench
from tests.equivalence.eager import without_dropout
from tests.zoo import ZOO

D = 3
MODELS = list(ZOO)
DELAYED = ("pipedream-2bw", "cdp-v1")
"""Rules whose passes read the version before the newest whatever happens."""


def rotated(model: str) -> Variant:
    """Another variant for every model, of those that every way can break."""
    able = [variant for variant in VARIANTS.values() if rule_named(variant.rule).versions == "newest"]
    return able[MODELS.index(model) % len(able)]


def victim(place: Bench, plan: Plan, way: str) -> int:
    """The last stage at which a way to tamper can act."""
    graph = place.captured.graph
    able = []
    for spec in fitted(place.captured, plan).stages:
        ops = [op for part in spec.segments for op in graph.ops[part.start : part.stop]]
        draws = any(op.draws >= 0 for op in ops)
        trains = any(graph.parameters[name].trainable for name in spec.parameters)
        if draws if way == "rng" else trains:
            able.append(spec.stage)
    return able[-1]


def found_out(place: Bench, plan: Plan, way: str) -> None:
    """The tampered run is unequal, at the victim."""
    found = place.verify(plan, tamper=way)
    wanted = victim(place, plan, way)
    assert not found.equal
    assert found.stage == wanted, found.difference
    assert found.difference.startswith(f"stage {wanted}: ")


@pytest.mark.parametrize("model", MODELS)
def test_a_run_that_nobody_touched_is_equal(model: str) -> None:
    place = bench(model)
    found = place.verify(place.plan(rotated(model), D, 2))
    assert (found.equal, found.stage, found.difference) == (True, -1, "")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("model", MODELS)
def test_tampering_is_found_and_placed(model: str, way: str) -> None:
    place = bench(model)
    found_out(place, place.plan(rotated(model), D, 2), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", [VARIANTS[name] for name in PAIRED], ids=PAIRED)
def test_tampering_is_found_under_every_rule(variant: Variant, way: str) -> None:
    place = bench("skip")
    plan = place.plan(variant, D, allowed(variant, D, 1))
    if variant.rule in DELAYED and way in ("stash", "order"):  # the version before the last update is the right one
        with pytest.raises(UsageError, match="it changed no bit"):
            place.verify(plan, tamper=way)
    else:
        found_out(place, plan, way)


@pytest.mark.parametrize("way", WAYS)
def test_tampering_is_found_over_gloo(way: str) -> None:
    place = bench("tied_head")
    found_out(place, place.plan(rotated("tied_head"), D, 2, "gloo"), way)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_tampering_is_found_with_any_number_of_stages(way: str, num_stages: int) -> None:
    place = bench("mlp")
    found_out(place, place.plan(VARIANTS["pipedream"], num_stages, 1), way)


def test_random_numbers_that_are_not_there_cannot_be_tampered_with() -> None:
    entry = ZOO["mlp"]
    model = nn.Sequential(*(layer for layer in entry.build(0).children() if not isinstance(layer, nn.Dropout)))
    place = Bench(entry, model)
    with pytest.raises(UsageError, match="draws no random numbers"):
        place.verify(place.plan(VARIANTS["pipedream"], 2, 1), tamper="rng")


@pytest.mark.parametrize("model", ["mlp", "llama", "gru"])
def test_a_dropout_of_probability_zero_draws_nothing(model: str) -> None:
    """Else tampering with its numbers would change nothing, and the run be called equal."""
    place = Bench(ZOO[model], without_dropout(ZOO[model].build(0)))
    with pytest.raises(UsageError, match="draws no random numbers"):
        place.verify(place.plan(VARIANTS["pipedream"], 2, 1), tamper="rng")


def test_an_unknown_way_is_refused() -> None:
    place = bench("mlp")
    with pytest.raises(UsageError, match="one of " + ", ".join(WAYS)):
        place.verify(place.plan(VARIANTS["pipedream"], 2, 1), tamper="nonsense")
