"""What a machine's profile says of a plan."""

from __future__ import annotations

from roundelay.planner.costs import with_costs
from tests.lower.plans import plan_of, replicated
from tests.planner.profiles import calibrated


def test_exchanges_take_the_profile_s_seconds_and_the_cpu_s_among_them() -> None:
    plan = with_costs(replicated(plan_of("1f1b", 2, 1), 2), calibrated())
    assert plan.instruction_s == calibrated().instruction_s
    for one in plan.exchanges:
        assert one.busy_s > calibrated().box_s
        assert one.seconds > 0
