"""Update rules as data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from roundelay.errors import PlanError
from roundelay.ir import rule as module
from roundelay.ir.rule import DISTANCES, MODES, NO_PREDICTOR, UpdateRule, register_rule, rule_named, rules
from roundelay.schedules import SCHEDULES

ASYNC = UpdateRule(
    name="mine", schedule="async-1f1b", predicts=False, stashes=False, modes=("recompute", "mixed"), source="a test"
)


@pytest.fixture(autouse=True)
def own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(module, "_RULES", dict(module._RULES))


def test_the_built_in_rules_are_those_of_the_table() -> None:
    table = {
        rule.name: (rule.schedule, rule.predicts, rule.backward_reads(mode))
        for rule in rules()
        for mode in rule.modes[:1]
    }
    assert table == {
        "gpipe": ("gpipe", False, "forward"),  # stash is its default; W[t] either way
        "1f1b": ("1f1b", False, "forward"),
        "zb-h1": ("zb-h1", False, "forward"),
        "zb-v": ("zb-v", False, "forward"),
        "pipedream": ("async-1f1b", False, "forward"),
        "pipeoptim": ("async-1f1b", True, "forward"),  # stash is its default too
        "ravnest": ("free", False, "forward"),
        "pipedream-vertical": ("async-1f1b", False, "forward"),
        "pipedream-2bw": ("async-1f1b", False, "forward"),
        "cdp-v1": ("async-1f1b", False, "forward"),
        "cdp-v2": ("async-1f1b", False, "forward"),
        "async": ("async-1f1b", False, "live"),
        "spectrain": ("async-1f1b", True, "ahead"),
        "lookahead": ("async-1f1b", True, "ahead"),
        "rehearse": ("async-1f1b", True, "live"),
        "interleaved-1f1b": ("interleaved-1f1b", False, "forward"),
    }


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.name)
def test_every_built_in_rule_runs_on_a_schedule_that_exists_in_modes_that_exist(rule: UpdateRule) -> None:
    assert rule.schedule in SCHEDULES
    assert rule.modes
    assert set(rule.modes) <= set(MODES)
    assert rule_named(rule.name) is rule


@pytest.mark.parametrize(
    ("name", "mode", "reads"),
    [
        ("pipeoptim", "recompute", "live"),
        ("pipeoptim", "mixed", "live"),
        ("pipeoptim", "stash", "forward"),
        ("pipedream", "stash", "forward"),
        ("1f1b", "recompute", "live"),
        ("1f1b", "stash", "forward"),
    ],
)
def test_a_backward_reads_live_weights_unless_rule_or_mode_stash_them(name: str, mode: str, reads: str) -> None:
    assert rule_named(name).backward_reads(mode) == reads


def test_a_rule_that_stashes_reads_the_forward_s_weights_in_every_mode() -> None:
    stashing = replace(ASYNC, stashes=True)
    assert {stashing.backward_reads(mode) for mode in MODES} == {"forward"}


def test_predictors_bridge_the_updates_crossed_the_lag_or_one_more() -> None:
    assert DISTANCES == {"improved": "crossed", "paper": "lag", "released-code": "lag+1", "partial": "crossed"}
    assert NO_PREDICTOR not in DISTANCES


def test_a_registered_rule_is_found_and_comes_last() -> None:
    register_rule(ASYNC)
    assert rule_named("mine") is ASYNC
    assert rules()[-1] is ASYNC


def test_registering_the_same_rule_again_changes_nothing() -> None:
    register_rule(ASYNC)
    before = rules()
    register_rule(replace(ASYNC))
    assert rules() == before


def test_a_second_rule_of_a_name_is_refused_and_the_first_stays() -> None:
    with pytest.raises(PlanError, match="a second rule of this name"):
        register_rule(replace(ASYNC, name="gpipe"))
    assert rule_named("gpipe").schedule == "gpipe"


@pytest.mark.parametrize("modes", [(), ("stash", "guess")])
def test_a_rule_without_modes_or_with_unknown_ones_is_refused(modes: tuple[str, ...]) -> None:
    with pytest.raises(PlanError, match="backward modes"):
        register_rule(replace(ASYNC, modes=modes))  # type: ignore[arg-type]
    assert "mine" not in {rule.name for rule in rules()}


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"'gpip'.*gpipe, 1f1b, zb-h1, zb-v, pipedream, ravnest, pipedream-vertical"):
        rule_named("gpip")


@pytest.mark.parametrize("changes", [{"target": "next"}, {"modes": ("mixed", "stash")}])
def test_a_prediction_of_each_micro_batch_s_own_goes_with_neither_a_stash_nor_another_target(
    changes: dict[str, Any],
) -> None:
    mine = replace(rule_named("rehearse"), name="mine", **changes)
    with pytest.raises(PlanError, match="predictor partial with target"):
        register_rule(mine)
