"""The page and the picture of a comparison."""

from __future__ import annotations

import math
import re

from roundelay.page.comparison_page import COLOURS, DASHES, Chart, comparison_page, style_of
from roundelay.page.png import draw_png, load_matplotlib
from tests.page.runs import EVIL


def charts(lines: int, evil: str = "") -> list[Chart]:
    """Two quantities; one line has no points, and values that are no numbers are gaps."""
    points = {f"line {i}{evil}": [(float(u), 1.0 + i / (u + 1)) for u in range(30)] for i in range(lines)}
    points["empty"] = []
    points["gap"] = [(0.0, math.nan), (1.0, 2.0), (2.0, math.nan)]
    made = list(points.items())
    return [Chart(f"loss{evil}", made, made), Chart("score", made, made, dots=True)]


def test_every_line_has_a_look_of_its_own() -> None:
    count = len(COLOURS) * len(DASHES)
    assert len({style_of(i) for i in range(count)}) == count
    page = comparison_page("t", [], [["rule"], ["x"]], charts(15))
    looks = set(re.findall(r'class="curve (line\d+)"', page))
    assert looks == {f"line{i}" for i in range(17)}
    assert all(f".curve.{look} {{" in page for look in looks)


def test_what_comes_from_outside_is_escaped() -> None:
    page = comparison_page(EVIL, [EVIL], [[EVIL], [EVIL]], charts(2, EVIL))
    assert EVIL not in page
    assert page.count("<script>") == 1


def test_the_page_needs_nothing_but_itself() -> None:
    page = comparison_page("t", ["about"], [["rule"], ["x"]], charts(2))
    assert not re.search(r"https?://|<link(?! rel=\"icon\")|src=", page)
    assert "default-src 'none'" in page


def test_a_picture_is_drawn_whatever_the_names_and_values() -> None:
    """A dollar would begin a formula, an underscore hide a line."""
    made = draw_png(load_matplotlib(), "_$", [*charts(2, " $x_{$"), Chart("none", [], [])])
    assert made.startswith(b"\x89PNG")
    assert len(made) > 10_000
