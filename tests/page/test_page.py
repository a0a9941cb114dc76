"""The page of a run: whole, safe, small, and with a sentence where something is missing."""

from __future__ import annotations

import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from roundelay.errors import RoundelayError, UsageError
from roundelay.page.run_page import run_page
from roundelay.page.trace_window import read_window, window_length
from tests.page.runs import EVIL, append, begun, edit, finished, planned, simulated, spans_of

VOID = {"meta", "link", "br", "img"}
TERMS = "Predicted and measured"
HEADINGS = ["Loss", "Metrics", "Evaluations", "Throughput", "Where the time went", TERMS, "Schedule", "Memory"]


class Read(HTMLParser):
    """What a page holds, and whether its elements nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.heads: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Anything that may load something is noted."""
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Elements end in the order in which they were opened."""
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """An element that ends itself."""
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        """Text."""
        if self.open[-1:] == ["h2"]:
            self.heads.append(data)
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data)


def test_a_finished_run_has_every_section_and_figure(tmp_path: Path) -> None:
    text = run_page(finished(tmp_path).path)
    read = Read(text)
    assert read.heads == HEADINGS
    figures = {
        "loss": 2,
        "metrics": 2,
        "evaluations": 2,
        "throughput": 1,
        "shares": 1,
        "terms": 1,
        "schedule": 2,
        "memory": 1,
    }
    assert read.tags.count("svg") == 3 * sum(figures.values())  # three widths of each
    words = " ".join(read.words)
    for said in ("finished", "pipedream", "3 → 0.6122", "123", "1.50 ×", "10.5 s", "worker 2", "private"):
        assert said in words
    assert "not finished" not in words
    assert "forward of micro-batch" in text
    assert "1.5 kB sent" in text


def test_what_comes_from_outside_is_escaped_everywhere(tmp_path: Path) -> None:
    text = run_page(finished(tmp_path).path)
    assert EVIL not in text
    assert text.count("<script>") == 1
    assert "&lt;script&gt;alert(" in text


def test_a_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    text = run_page(finished(tmp_path).path)
    assert Read(text).links == ["data:,"]
    assert "default-src 'none'" in text
    for loads in ("http://", "https://", "@import", "url(", "fetch(", "XMLHttp", "import("):
        assert loads not in text


def test_a_run_that_has_not_ended_says_what_is_missing_and_how_to_get_it(tmp_path: Path) -> None:
    read = Read(run_page(begun(tmp_path, 12).path))
    words = " ".join(read.words)
    assert read.heads == [head for head in HEADINGS if head not in ("Evaluations", TERMS)]
    assert "not finished" in words
    assert "roundelay simulate plan.toml --trace" in words
    assert words.count("a run that has failed, or is still running, has none") == 2


def test_a_line_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    folder = begun(tmp_path, 3)
    append(folder.metrics, '{"update": 3, "lo')
    assert "updates</dt><dd>3</dd>" in run_page(folder.path)


def test_a_metric_beside_the_loss_is_a_curve_and_without_any_there_is_no_section(tmp_path: Path) -> None:
    folder = begun(tmp_path, 40)
    text = run_page(folder.path)
    (part,) = re.findall(r"<h2>Metrics</h2>.*?</section>", text)
    assert re.findall(r"<h3>(.*?)</h3>", part) == [f"right {escape(EVIL)}", "never"]
    drawn = re.findall(r'<path class="curve (thin|a)" data-name="(.*?)" d="(.*?)"', part)
    assert [(look, name) for look, name, _ in drawn[:2]] == [("thin", f"right {escape(EVIL)}"), ("a", "smoothed")]
    heights = [float(pair.split()[1]) for pair in re.split("[ML]", drawn[0][2])[1:]]
    assert len(heights) == 40
    assert heights == sorted(heights, reverse=True) != [heights[0]] * 40  # it rises, and an image's y goes down
    assert [path for _, name, path in drawn if name == "never"] == [""] * 3
    lines = [{**json.loads(line), "metrics": None} for line in folder.metrics.read_text().splitlines()]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "Metrics" not in Read(run_page(folder.path)).heads


def test_more_metrics_than_there_is_room_for_are_told(tmp_path: Path) -> None:
    folder = begun(tmp_path, 2)
    many = {f"metric {n}": 0.5 for n in range(9)}
    append(folder.metrics, json.dumps({"update": 2, "loss": 1.0, "metrics": many}) + "\n")
    assert "The first 6 of 11 are drawn." in run_page(folder.path)


def test_numbers_that_are_missing_or_null_are_gaps(tmp_path: Path) -> None:
    folder = begun(tmp_path, 3)
    append(folder.metrics, '{"update": 3, "loss": null}\n{"update": 4, "loss": 1.0, "metrics": {"right": null}}\n')
    Read(run_page(folder.path))


def test_terms_stand_beside_each_other_and_add_up(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    text = run_page(folder.path)
    for cells in (["compute", "500 ms", "625 ms", "+125 ms"], ["messages", "0 ms", "125 ms", "+125 ms"]):
        assert "".join(f"<td>{cell}</td>" for cell in cells[1:]) in text, cells
    assert "<td>750 ms</td><td>750 ms</td><td>+0 ms</td>" in text
    edit(folder.summary, terms={"predicted": 1})
    assert TERMS not in run_page(folder.path)


def test_a_summary_of_another_time_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    edit(folder.summary, shares=None, memory="much", plain_samples_per_second=None, wall_s="long")
    assert "Not there." in run_page(folder.path)
    odd = {"predicted": ["much"], "private_bytes": "x"}
    edit(folder.summary, shares=[{"busy": None}] * 3, memory=[odd] * 3, plain_samples_per_second={"1": "fast", "2": 0})
    Read(run_page(folder.path))


def test_clocks_that_differ_are_told(tmp_path: Path) -> None:
    folder = finished(tmp_path)
    row = {"forward": 0.2, "backward": 0.3, "update": 0.1, "data": 0.0, "bubble": None, "wait": None, "busy": 0.6}
    edit(folder.summary, shares=[row] * 3)
    text = run_page(folder.path)
    assert "clocks differ" in text
    assert "idle: 40%" in text


def test_a_long_run_is_a_small_page(tmp_path: Path) -> None:
    folder = finished(tmp_path, 30, plan=planned("1f1b", 8, 24))
    lines = [
        f'{{"update":{t},"epoch":0,"loss":{2 + t % 9},"samples_per_second":{t % 11 + 1},"time":{t}}}\n'
        for t in range(60_000)
    ]
    folder.metrics.write_text("".join(lines))
    text = run_page(folder.path)
    assert len(text.encode()) < 1_000_000
    assert all(len(path) < 14 * 1500 for path in re.findall(r' d="([^"]*)"', text))


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize(("rule", "workers"), [("gpipe", 1), ("1f1b", 2), ("pipeoptim", 4), ("pipedream", 40)])
def test_the_smallest_runs_have_a_page_too(tmp_path: Path, updates: int, rule: str, workers: int) -> None:
    Read(run_page(finished(tmp_path, updates, plan=planned(rule, workers, 1)).path))


def test_the_window_lies_in_the_middle_and_holds_every_worker(tmp_path: Path) -> None:
    folder = finished(tmp_path, 40)
    plan, window = planned(), read_window(folder.trace, 3, 2)
    assert window is not None
    end = max(span.end_s for span in spans_of(plan, 40))
    assert 0.25 * end < window.start_s < window.end_s < 0.75 * end
    forwards = {s.g for s in window.spans if s.worker == 0 and s.opcode == "forward" and s.start_s >= window.start_s}
    assert len(forwards) >= window_length(2)
    assert {span.worker for span in window.spans} == {gap.worker for gap in window.gaps} == {0, 1, 2}
    by_place = {(s.worker, s.opcode, s.g): s for s in spans_of(plan, 40)}
    for span in window.spans:
        real = by_place[span.worker, span.opcode, span.g]
        assert (span.version, span.distance, span.num_bytes) == (real.version, real.distance, real.num_bytes)
        assert (span.start_s, span.end_s) == pytest.approx((real.start_s, real.end_s), abs=1e-8)


def test_what_the_reader_loads_stands_above_the_workers(tmp_path: Path) -> None:
    folder, plan = finished(tmp_path, 40), planned()
    window = read_window(folder.trace, 3, 2)
    assert window is not None
    real = {load.batch: load for load in simulated(plan, 40).loads}
    assert len(window.loads) > 2
    for load in window.loads:
        assert (load.start_s, load.end_s) == pytest.approx(real[load.batch][2:], abs=1e-8)
        assert load.start_s < window.end_s
        assert load.end_s > window.start_s
    text = run_page(folder.path)
    assert text.count(">reader</text>") == 6  # as it ran and as predicted, at three widths
    assert "reader of worker 0: batch" in text
    (folder.trace).write_text("".join(x for x in folder.trace.read_text().splitlines(True) if '"load' not in x))
    assert run_page(folder.path).count(">reader</text>") == 3


def broken(folder: Path, what: str) -> None:
    """Damage a run's folder."""
    if what == "metrics":
        append(folder / "metrics.jsonl", "no json\n")
    elif what == "no update":
        append(folder / "metrics.jsonl", '{"loss": 1.0}\n')
    elif what == "no number":
        append(folder / "metrics.jsonl", '{"update": 40, "loss": 1.0, "samples_per_second": "fast"}\n')
    elif what == "empty":
        (folder / "metrics.jsonl").write_text("")
    elif what == "trace":
        (folder / "trace.json").write_text('{"traceEvents": []}')
    elif what == "event":
        text = (folder / "trace.json").read_text().replace('"args":{', '"other":{')
        (folder / "trace.json").write_text(text)
    elif what == "summary":
        (folder / "summary.json").write_text("[1, 2")
    elif what == "plan":
        (folder / "plan.toml").write_text("format = 1")
    elif what == "no plan":
        (folder / "plan.toml").unlink()
    elif what == "bytes":
        (folder / "summary.json").write_bytes(b"\xff\xfe")
    else:
        (folder / "evaluations.jsonl").write_text('{"update": 1, "metrics": 3}\n')


@pytest.mark.parametrize(
    "what",
    [
        "metrics",
        "no update",
        "no number",
        "empty",
        "trace",
        "event",
        "summary",
        "plan",
        "no plan",
        "bytes",
        "evaluations",
    ],
)
def test_a_damaged_folder_is_refused_with_a_remedy(tmp_path: Path, what: str) -> None:
    folder = finished(tmp_path)
    broken(folder.path, what)
    with pytest.raises(RoundelayError) as caught:
        run_page(folder.path)
    assert caught.value.remedy


def test_no_folder_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, got in (("nowhere", "no such folder"), ("file", "a file")):
        with pytest.raises(UsageError, match=got):
            run_page(tmp_path / name)
