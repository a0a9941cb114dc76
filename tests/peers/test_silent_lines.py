"""A line that is busy is not taken for one that is cut, and what others say does not reach the terminal raw."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundelay.cli.screen import _short
from roundelay.session.assignment import LEAST_SILENT_MS, MOST_SILENT_MS, silent_ms
from tests.lower.plans import edge_of, plan_of


@pytest.mark.parametrize(
    ("mbit_per_s", "expected"), [(1000, LEAST_SILENT_MS), (100, LEAST_SILENT_MS), (5, 10_106), (0.5, MOST_SILENT_MS)]
)
def test_a_ping_may_wait_behind_what_the_slowest_line_still_carries(mbit_per_s: float, expected: int) -> None:
    plan = replace(plan_of("ravnest", 3, 1), edges=(edge_of(0, 1), edge_of(1, 2)))
    lines = [replace(edge, latency_s=0.02, bytes_per_s=1e9) for edge in plan.edges]
    slow = replace(lines[0], bytes_per_s=mbit_per_s * 1e6 / 8)
    assert silent_ms(replace(plan, edges=(slow, *lines[1:]))) == expected


def test_control_characters_are_not_shown() -> None:
    assert _short("one\x1b[2J\x1b]0;title\x07\ntwo") == "one [2J ]0;title\ntwo"
