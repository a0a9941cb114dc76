"""What a plan's time consists of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundelay.search.account import account
from tests.lower.plans import plan_of


def test_a_stage_computes_its_forwards_and_backwards_and_an_update_is_none() -> None:
    plan = plan_of("1f1b", 2, 3)
    stages = [
        replace(one, forward_s=0.01 * (k + 1), backward_s=0.02 * (k + 1), update_s=5.0)
        for k, one in enumerate(plan.stages)
    ]
    found = account(replace(plan, stages=tuple(stages)))
    assert [one.computes_s for one in found.stages] == pytest.approx([3 * 0.03, 3 * 0.06])
    assert sum(one.on_path_s for one in found.stages) == pytest.approx(found.terms["compute"])
    assert found.terms["update"] == pytest.approx(5.0)
