"""The page of a plan: it shows the numbers of the JSON object that it holds, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from html import escape, unescape
from pathlib import Path
from typing import Any

import pytest

from roundelay.cli.explained import alternatives, beside, explained
from roundelay.errors import UsageError
from roundelay.ir.plan import Plan
from roundelay.page.explain_page import explain_page
from roundelay.page.scale import seconds, size
from roundelay.search.account import account
from tests.lower.plans import edge_of, on_grid, plan_of
from tests.page.runs import EVIL, planned
from tests.page.test_page import Read

HEADINGS = ["Plan", "Stages on machines", "Costs", "Steady state", "Memory"]


def odd(plan: Plan) -> Plan:
    """The plan with times and sizes of which no two are alike."""
    edges = [replace(edge, forward_bytes=1510 + k, backward_bytes=2520 + k) for k, edge in enumerate(plan.edges)]
    stages = [
        replace(one, forward_s=0.0113 + k / 991, backward_s=0.0217 + k / 983, parameter_bytes=7310 + 100 * k)
        for k, one in enumerate(plan.stages)
    ]
    return replace(plan, edges=tuple(edges), stages=tuple(stages), bytes_per_s=1e7)


def found_of(plan: Plan) -> dict[str, Any]:
    return explained(plan, account(plan))


def page_of(plan: Plan, name: str = "a.toml", **beside_it: Any) -> str:
    own = account(plan)
    return explain_page(name, explained(plan, own) | beside_it, plan, own.simulation, own.path)


def embedded(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="explained">(.*?)</script>', page, re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


def leaves(value: Any) -> Iterator[Any]:
    """Every number and text of a JSON value."""
    if isinstance(value, Mapping):
        for part in value.values():
            yield from leaves(part)
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part)
    else:
        yield value


def shown(page: str) -> list[str]:
    """Every number that the page shows, with its unit: no axes, no timelines, no style."""
    body = page.partition("<body>")[2]
    body = re.sub(
        r'<script.*?</script>|<svg class="timeline".*?</svg>|<text class="tick".*?</text>', "", body, flags=re.S
    )
    text = unescape(re.sub(r"<[^>]+>", "\n", body))
    return re.findall(r"(?<![\w.])[\d.]*\d(?:e-?\d+)?(?:%| ms| s| B| kB| MB| GB|(?=,|\s))(?!\w)", text)


def test_every_number_is_one_of_the_json_object() -> None:
    plan, other = odd(planned()), found_of(odd(planned("gpipe")))
    found = found_of(plan)
    page = page_of(plan, diff=beside(found, "b.toml", other))
    numbers = [x for x in leaves(embedded(page)) if isinstance(x, int | float)]
    told = {text for x in numbers for text in (seconds(abs(x)), size(x), f"{x:.0%}", f"{x}")}
    assert len(shown(page)) > 120
    assert [text for text in shown(page) if text not in told] == []


def test_a_stage_s_box_tells_what_the_plan_has() -> None:
    plan = odd(planned())
    words = Read(page_of(plan)).words
    words = words[words.index("stage 1") :]
    own, edge, found = plan.stages[1], plan.edges[1], found_of(plan)["stages"][1]
    told = {
        "workers": "1",
        "device": "cpu",
        "up to": "end_1",
        "weights": size(own.parameter_bytes),
        "forward": seconds(own.forward_s),
        "backward": seconds(own.backward_s),
        "update": seconds(own.update_s),
        "computes": seconds(found["computes_s"]),
        "on the path": seconds(found["on_path_s"]),
        "share": f"{found['on_path_s'] / found_of(plan)['batch_s']:.0%}",
    }
    assert {name: words[words.index(name) + 1] for name in told} == told
    arrow = words.index(f"→ {size(edge.forward_bytes)}")
    assert words[arrow + 1] == f"← {size(edge.backward_bytes)}"


def test_the_json_object_is_the_one_that_is_printed() -> None:
    plan = planned()
    assert embedded(page_of(plan)) == json.loads(json.dumps(found_of(plan)))


def test_the_page_is_whole() -> None:
    read = Read(page_of(planned()))
    assert read.heads == HEADINGS
    assert read.links == ["data:,"]
    assert read.tags.count("li") > 3
    assert [word for word in read.words if word.startswith("stage ")] == ["stage 0", "stage 1", "stage 2"]


def timeline_of(page: str) -> str:
    """The widest one."""
    return page.partition('<svg class="timeline"')[2].partition("</svg>")[0]


def test_the_critical_path_is_marked_below_the_workers() -> None:
    plan = planned()
    own, found = timeline_of(page_of(plan)), found_of(plan)
    marks = re.findall(r'<rect class="line(\d+)" x="[\d.]+" y="(\d+)"[^>]*><title>(.*?): (.*?)</title>', own)
    terms = list(found["terms"])
    last = found["critical_path"][-3:]
    expected = [(p["term"], seconds(p["end_s"] - p["start_s"])) for p in last]
    assert [(term, time) for _, _, term, time in marks[-3:]] == expected
    assert all(terms[int(line)] == term for line, _, term, _ in marks)
    rows = {int(y) // 33 for _, y, _, _ in marks}
    assert rows == {0, 1, 2}
    assert all(p["worker"] == p["stage"] for p in found["critical_path"])


def test_narrow_screens_have_the_marks_of_their_part() -> None:
    drawn = re.findall(r'<svg class="timeline".*?</svg>', page_of(planned(micro_batches=8)), re.DOTALL)
    wide, middle, narrow = (one.count('<rect class="line') for one in drawn)
    assert wide > middle > narrow


def test_the_last_two_batches_are_drawn() -> None:
    own = timeline_of(page_of(planned(micro_batches=4)))
    forwards = {int(g) for g in re.findall(r"worker 0: forward of micro-batch (\d+)", own)}
    assert forwards == set(range(8, 16))


def test_an_edge_that_skips_a_stage_is_told_by_its_source() -> None:
    plan = plan_of("1f1b", 3, 2, skips=[replace(edge_of(0, 2), forward_bytes=700)])
    words = Read(page_of(plan)).words
    assert words[words.index("→ stage 2") + 1] == "700 B"
    assert words[words.index("← stage 2") + 1] == "0 B"


def test_another_plan_stands_beside_it() -> None:
    plan = planned()
    found, other = found_of(plan), found_of(planned("gpipe"))
    assert Read(page_of(plan, why_not=beside(found, "gpipe it", other))).words.count("other") == 5
    more = other["batch_s"] - found["batch_s"]
    page = page_of(plan, why_not=beside(found, "gpipe it", other))
    assert "The other plan is gpipe it: gpipe on 3 workers." in page
    assert f"<td>+{seconds(more)}</td>" in page
    assert beside(found, "x", other)["more"]["compute"] == other["terms"]["compute"] - found["terms"]["compute"]


def test_what_holders_exchange_is_told_with_its_seconds() -> None:
    plan = on_grid(planned(workers=1), 2, 1)
    (row,) = found_of(plan)["stages"][0]["exchanges"]
    assert (row["kind"], row["axis"], row["every"], row["count"]) == ("weight-gradient", "replicas", "batch", 1)
    words = Read(page_of(plan)).words
    told = words[words.index("weight gradient over replicas, 1 a batch") + 1]
    assert told == f"{size(row['bytes'])}, {seconds(row['seconds'])}"


def test_names_are_escaped() -> None:
    row = {"name": EVIL, "why": EVIL, "choices": {EVIL: EVIL}, "predicted_s": 1.0, "measured_s": 1.0, "memory_bytes": 1}
    own = account(planned())
    found = explained(planned(), own) | {"rule": EVIL, "arrangement": EVIL, "choices": {EVIL: EVIL}}
    found["workers"][0]["device"] = found["stages"][0]["up_to"] = EVIL
    found["stages"][0]["exchanges"] = [
        {"kind": EVIL, "axis": EVIL, "every": EVIL, "count": 1, "bytes": 1, "seconds": 1.0}
    ]
    found |= {"diff": beside(found, EVIL, found), "alternatives": [row, row]}
    page = explain_page(EVIL, found, planned(), own.simulation, own.path)
    assert EVIL not in page
    assert page.count(escape(EVIL)) > 15
    assert page.count("<script") == 2
    assert embedded(page)["diff"]["name"] == EVIL


def searched(**changes: Any) -> dict[str, Any]:
    one = {"choices": {"rule": "1f1b", "workers": 2}, "predicted_s": 0.5, "memory_bytes": None}
    slow = {"choices": {"rule": "1f1b", "workers": 1}, "predicted_s": 0.75, "memory_bytes": 4000}
    failed = {**slow, "name": "one process", "measured_s": None, "why": "no room"}
    finals = [failed, {**one, "name": "pipeline", "measured_s": 0.6, "why": ""}]
    slower = {"choices": {"rule": "1f1b", "workers": 3}, "predicted_s": 0.8, "memory_bytes": None}
    whole = {
        "plan": "",
        "chosen": one,
        "top": [one, slower, slow],
        "baselines": {"none": None, "one": slow},
        "finals": finals,
    }
    return whole | changes


def test_a_search_s_plans_are_listed_with_what_was_predicted_and_measured(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(searched()))
    page = page_of(planned(), alternatives=alternatives(tmp_path / "s.json"))
    assert Read(page).heads == [*HEADINGS, "Alternatives"]
    table = page.partition('<div class="plans">')[2].partition("</table>")[0]
    rows = [re.findall(r"<td>([^<]*)</td>", row) for row in table.split("<tr>")[2:]]
    assert rows == [
        ["chosen, pipeline", "500 ms", "600 ms", "-", ""],
        ["one process", "750 ms", "-", "4 kB", "workers 1, failed: no room"],
        ["best 2", "800 ms", "-", "-", "workers 3"],
    ]
    assert len(embedded(page)["alternatives"]) == 3


@pytest.mark.parametrize("text", [None, "{", "[]", json.dumps(searched(top=3))])
def test_what_is_no_search_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "s.json").write_text(text)
    with pytest.raises(UsageError, match="plan --search --json"):
        alternatives(tmp_path / "s.json")
