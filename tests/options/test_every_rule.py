"""Options under rules: a few pairs, so that every rule and every option is met; ``make options`` takes all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from roundelay.ir.plan import Plan
from roundelay.ir.rule import register_rule, rules
from tests.equivalence.cells import Bench
from tests.equivalence.deep import LINES, OWN
from tests.options import every_rule
from tests.options.every_rule import OPTIONS, outcome

PAIRS = [(line, list(OPTIONS)[(3 * i + i // 10) % len(OPTIONS)]) for i, line in enumerate(LINES)]


@pytest.fixture(autouse=True, scope="module")
def own_rules() -> Iterator[None]:
    """Rules of one's own, known while these tests last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("roundelay.ir.rule._RULES", {rule.name: rule for rule in rules()})
        for rule in OWN:
            register_rule(rule)
        yield


def test_every_option_is_met() -> None:
    assert {option for _, option in PAIRS} == set(OPTIONS)


@pytest.mark.parametrize(("line", "option"), PAIRS)
def test_an_option_acts_and_verifies(line: str, option: str) -> None:
    assert outcome(line, option) == ""


@pytest.mark.parametrize(
    ("option", "ignored"),
    [
        ("M", {"micro_batches": 3}),
        ("clip stage", {"clip": "none"}),
        ("clip previous", {"clip": "none"}),
        ("bf16", {"precision": "fp32"}),
        ("fp16", {"precision": "fp32", "loss_scale": "none"}),
        ("loss scale", {"loss_scale": "1024"}),
    ],
)
@pytest.mark.parametrize("line", ["pipedream", "zb-v"])
def test_an_option_that_run_and_reference_both_ignore_is_seen(
    line: str, option: str, ignored: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    every_rule.ran.cache_clear()
    real = Bench.verify

    def verify(place: Bench, plan: Plan, *rest: Any, **options: Any) -> Any:
        return real(place, replace(plan, **ignored), *rest, **options)

    monkeypatch.setattr(Bench, "verify", verify)
    assert outcome(line, option) == "the weights are those without it"
    every_rule.ran.cache_clear()
