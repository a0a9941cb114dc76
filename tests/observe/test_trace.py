"""Traces are what Perfetto reads: events nest in their process, arrows begin and end inside events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roundelay.ir.micro_batch import Load
from roundelay.observe import trace
from roundelay.observe.trace import Gap, Span, flows_of, write_trace


def span(worker: int, opcode: str, g: int, start: float, end: float, batch: int = 0) -> Span:
    """A span of version 2, distance 1, 64 bytes; channel 10·a+b is from worker a to worker b, its neighbour."""
    step = {"forward": 1, "backward": -1}.get(opcode)
    takes, gives = ((), ()) if step is None else ((10 * (worker - step) + worker,), (10 * worker + worker + step,))
    return Span(worker, opcode, g, batch, 2, 1, start, end, 64, worker, "", takes, gives)


def pipeline(stages: int, micro_batches: int) -> list[Span]:
    """Every micro-batch up and down the stages, then an update everywhere; a slot takes 10 ms."""
    spans = []
    for g in range(micro_batches):
        at = 1000.0 + g * 2 * stages * 0.01
        for k in range(stages):
            spans.append(span(k, "forward", g, at + k * 0.01, at + (k + 1) * 0.01))
            back = at + (2 * stages - 1 - k) * 0.01
            spans.append(span(k, "backward", g, back, back + 0.01))
    end = 1000.0 + micro_batches * 2 * stages * 0.01
    return spans + [span(k, "update", micro_batches - 1, end, end + 0.002, batch=7) for k in range(stages)]


def written(path: Path, spans: list[Span]) -> list[dict[str, Any]]:
    """The events of a trace, by a parser that takes nothing but JSON."""
    write_trace(path / "t.json", spans)
    text = (path / "t.json").read_text(encoding="utf-8")
    document = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert document.keys() == {"displayTimeUnit", "traceEvents"}
    assert document["displayTimeUnit"] == "ms"
    return list(document["traceEvents"])


def phase(events: list[dict[str, Any]], *phases: str) -> list[dict[str, Any]]:
    """Events of some phases."""
    return [event for event in events if event["ph"] in phases]


def test_each_worker_is_a_process_with_its_stage_in_its_name(tmp_path: Path) -> None:
    events = phase(written(tmp_path, pipeline(3, 1)), "M")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {k: f"worker {k} (stage {k})" for k in range(3)}
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert order == {0: 0, 1: 1, 2: 2}


def test_a_span_is_a_complete_event_in_microseconds_from_the_first(tmp_path: Path) -> None:
    spans = [span(1, "backward", 3, 1000.5, 1000.75), span(0, "forward", 12, 1000.0, 1000.000_001)]
    first, second = phase(written(tmp_path, spans), "X")
    assert first == {
        "ph": "X",
        "name": "B 3",
        "cat": "backward",
        "pid": 1,
        "tid": 0,
        "ts": 500_000.0,
        "dur": 250_000.0,
        "args": {"stage": 1, "micro-batch": 3, "batch": 0, "version": 2, "distance": 1, "bytes": 64},
    }
    assert (second["name"], second["ts"], second["dur"]) == ("F 12", 0.0, 1.0)


def test_a_process_tells_what_its_stage_computes(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.json", pipeline(2, 1), names={1: 'up to "head"'})
    events = phase(json.loads((tmp_path / "t.json").read_text())["traceEvents"], "M")
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["worker 0 (stage 0)", 'worker 1 (stage 1: up to "head")']


def test_an_update_tells_the_version_that_it_makes(tmp_path: Path) -> None:
    first, second = phase(written(tmp_path, [span(0, "update", 0, 0, 1), span(0, "forward", 0, 1, 2)]), "X")
    assert (first["args"]["version"], first["args"]["makes version"]) == (2, 3)
    assert "makes version" not in second["args"]


def test_gaps_are_events_between_the_spans_unless_nobody_could_see_them(tmp_path: Path) -> None:
    spans = [span(0, "forward", 0, 10.0, 11.0), span(0, "forward", 1, 13.0, 14.0)]
    gaps = [Gap(0, "bubble", 11.0, 12.5), Gap(0, "wait", 12.5, 13.0), Gap(0, "wait", 14.0, 14.000_004)]
    write_trace(tmp_path / "t.json", spans, gaps=gaps)
    events = phase(json.loads((tmp_path / "t.json").read_text())["traceEvents"], "X")
    idle = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in events if e["cat"] == "idle"]
    assert idle == [("bubble", 0, 1e6, 1.5e6), ("wait", 0, 2.5e6, 0.5e6)]


def test_what_is_loaded_meanwhile_has_a_lane_beside_its_worker_s_instructions(tmp_path: Path) -> None:
    loads = [Load(0, 3, 9.5, 10.25), Load(0, 4, 10.25, 12.0)]
    spans = [span(0, "forward", 0, 10.0, 11.0), span(1, "forward", 0, 11.0, 12.0)]
    write_trace(tmp_path / "t.json", spans, loads=loads)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {(0, 0): "instructions", (0, 1): "reader", (1, 0): "instructions"}
    found = [e for e in phase(events, "X") if e["cat"] == "load"]
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"], e["args"]) for e in found] == [
        ("load 3", 0, 1, 0.0, 0.75e6, {"batch": 3}),
        ("load 4", 0, 1, 0.75e6, 1.75e6, {"batch": 4}),
    ]
    assert next(e["ts"] for e in events if e.get("cat") == "forward") == 0.5e6  # time begins with the first load


def test_every_event_of_a_trace_is_a_line(tmp_path: Path) -> None:
    """So that a long one can be read line by line."""
    events = written(tmp_path, pipeline(2, 2))
    lines = (tmp_path / "t.json").read_text().splitlines()[1:-1]
    assert [json.loads(line.rstrip(",")) for line in lines] == events


def test_an_update_is_named_by_its_batch_and_any_other_by_its_micro_batch(tmp_path: Path) -> None:
    spans = [span(0, opcode, 5, 0.0, 1.0, batch=2) for opcode in ("read", "forward", "backward", "update")]
    events = phase(written(tmp_path, spans), "X")
    assert [event["name"] for event in events] == ["R 5", "F 5", "B 5", "U 2"]


def test_arrows_follow_activations_up_and_gradients_down(tmp_path: Path) -> None:
    events = written(tmp_path, pipeline(3, 2))
    starts = {event["id"]: event for event in phase(events, "s")}
    ends = {event["id"]: event for event in phase(events, "f")}
    assert starts.keys() == ends.keys()
    found = {(starts[i]["name"], starts[i]["pid"], ends[i]["pid"]) for i in starts}
    up = {(f"forward {g}", k, k + 1) for g in range(2) for k in range(2)}
    down = {(f"backward {g}", k + 1, k) for g in range(2) for k in range(2)}
    assert found == up | down
    assert len(starts) == len(found)
    assert all(ends[i]["name"] == starts[i]["name"] and ends[i]["cat"] == starts[i]["cat"] for i in starts)


def test_an_arrow_begins_and_ends_inside_its_spans_and_never_points_back(tmp_path: Path) -> None:
    events = written(tmp_path, pipeline(4, 3))
    starts = {event["id"]: event for event in phase(events, "s")}
    for end in phase(events, "f"):
        start = starts[end["id"]]
        assert end["bp"] == "e"
        assert start["ts"] <= end["ts"]
        for event, letter in ((start, start["name"][0].upper()), (end, start["name"][0].upper())):
            name = f"{letter} {start['name'].split()[1]}"
            (around,) = (x for x in phase(events, "X") if x["name"] == name and x["pid"] == event["pid"])
            assert around["ts"] < event["ts"] < around["ts"] + around["dur"]


def test_a_micro_batch_that_was_cut_off_has_no_arrow_into_nothing() -> None:
    assert flows_of([span(0, "forward", 1, 0, 1), span(1, "forward", 2, 1, 2), span(2, "forward", 1, 1, 2)]) == []


def test_an_empty_trace_is_a_trace(tmp_path: Path) -> None:
    assert written(tmp_path, []) == []


def test_a_trace_is_written_event_by_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays small however long the run: nothing holds all the text at once."""
    spans = pipeline(4, 500)
    longest = 0
    real = trace._events

    def watched(*args: Any) -> Any:
        nonlocal longest
        for event in real(*args):
            longest = max(longest, len(event))
            yield event

    monkeypatch.setattr(trace, "_events", watched)
    assert len(phase(written(tmp_path, spans), "X")) == len(spans)
    assert longest < 400
    assert (tmp_path / "t.json").stat().st_size > 500_000


def test_an_old_trace_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    before = written(tmp_path, pipeline(2, 1))

    def breaking() -> Any:
        yield Gap(0, "wait", 1000.0, 1001.0)
        raise ValueError("while writing")

    with pytest.raises(ValueError, match="while writing"):
        write_trace(tmp_path / "t.json", pipeline(2, 2), gaps=breaking())
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"] == before
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
