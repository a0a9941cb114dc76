"""Seconds of batches by term of the critical path, as bars and as a table: of plans, or of a plan and its run."""

from __future__ import annotations

from collections.abc import Mapping

from roundelay.page import sections as s
from roundelay.page.bars import BarPart, Group, bars
from roundelay.page.comparison_page import line_styles
from roundelay.page.read_run import Run, numbers
from roundelay.page.scale import seconds

Terms = Mapping[str, float]
"""Seconds by term."""


def colours_of(columns: Mapping[str, Terms]) -> dict[str, str]:
    """A CSS class for each term."""
    names = dict.fromkeys(name for terms in columns.values() for name in terms)
    return {name: f"line{i}" for i, name in enumerate(names)}


def terms_chart(columns: Mapping[str, Terms], colours: Mapping[str, str], more: str = "") -> str:
    """Two batches or one, side by side.

    Args:
        columns: seconds of each term, by what is compared.
        colours: the CSS class of each term.
        more: head of a column with what the last one takes more than the first; empty: none.
    """
    groups = [
        Group(name, [[BarPart(t, colours[t], value) for t, value in own.items()]]) for name, own in columns.items()
    ]
    whole = {name: {**own, "a batch": sum(own.values())} for name, own in columns.items()}
    most = max(own["a batch"] for own in whole.values())
    svg = s.for_screens(lambda width: bars(groups, width, most, seconds, "seconds of a batch by term"), s.WIDE)
    rows = [["", *columns, *([more] if more else [])]]
    for term in (*colours, "a batch"):
        values = [own.get(term, 0.0) for own in whole.values()]
        rows.append([term, *map(seconds, values), *([_signed(values[-1] - values[0])] if more else [])])
    return s.legend(colours.items()) + svg + s.text_table(rows)


def predicted_and_measured(run: Run) -> tuple[str, str]:
    """A section with what a plan predicts beside what its run measured, and its style rules; empty if unknown."""
    found = run.summary.get("terms")
    columns = {name: numbers(terms) for name, terms in found.items()} if isinstance(found, dict) else {}
    colours = colours_of(columns)
    if not colours:
        return "", ""
    text = s.note(
        "Of a batch, along the critical path, without the first batches. Predicted: by the seconds in the plan, on a "
        "virtual clock. Measured: by what waited for what in the run."
    )
    chart = terms_chart(columns, colours, "more")
    return s.section("Predicted and measured", text + chart), line_styles(range(len(colours)))


def _signed(value: float) -> str:
    return f"{'−' if value < 0 else '+'}{seconds(abs(value))}"
