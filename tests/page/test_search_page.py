"""The page of searches."""

from __future__ import annotations

import re

from roundelay.page.search_page import SearchChart, Spread, search_page
from tests.page.runs import EVIL


def chart(name: str) -> SearchChart:
    lines = [[(float(x), y / (x + 1)) for x in range(5)] for y in (1.0, 2.0, 3.0)]
    return SearchChart(name, name, name, [Spread(f"{name} {k}", *lines) for k in range(2)])


def test_a_median_is_solid_and_the_ends_of_its_interval_are_dashed_in_its_colour() -> None:
    page = search_page("t", ["about"], [["search"], ["x"]], [chart("one"), chart("two")])
    looks = dict(re.findall(r"\.curve\.(line\d+) \{ (.*?) \}", page))
    drawn = dict(re.findall(r'class="curve (line\d+)" data-name="([^"]*)"', page))
    assert drawn == {"line0": "two 0", "line1": "two 1", "line12": "two 0, high", "line13": "two 1, high"}
    for solid, dashed in (("line0", "line12"), ("line1", "line13")):
        assert looks[solid].endswith("stroke-dasharray: none;")
        assert looks[dashed] == looks[solid].replace("none", "6 3")


def test_a_table_may_stand_alone() -> None:
    page = search_page("t", ["about"], [["search"], ["x"]])
    assert "<svg" not in page
    assert "<td>x</td>" in page


def test_what_comes_from_outside_is_escaped() -> None:
    page = search_page(EVIL, [EVIL], [[EVIL], [EVIL]], [chart(EVIL)])
    assert EVIL not in page
    assert page.count("<script>") == 1
