"""What a run leaves behind, where a worker has two stages: shares, traces, pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roundelay.cli.sim_output import simulation_json
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.channels import channels_of
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.observe.time_shares import gaps_of, shares_of
from roundelay.observe.trace import Span, flows_of, write_trace
from roundelay.page.run_page import predicted_window
from roundelay.page.timeline import describe
from roundelay.page.trace_window import read_window
from roundelay.simulator import simulate
from tests.lower.plans import plan_of

WORKERS, M = 3, 4


def plan() -> Plan:
    """Three workers, six stages."""
    return plan_of("zb-v", 2 * WORKERS, M, slots=2 * WORKERS)


def spans(made: Plan) -> list[Span]:
    """Of a simulated run of three batches."""
    return simulate(made, emit(read(made)), stream([M] * 3)).spans()


def test_with_messages_that_take_no_time_all_that_is_idle_is_bubble() -> None:
    """What a stage waits for, its own worker's other stage may have made."""
    made, ran = plan(), spans(plan())
    shares = shares_of(ran, gaps_of(ran, channels_of(read(made)), WORKERS), WORKERS)
    assert [share.wait for share in shares] == pytest.approx([0.0] * WORKERS)
    bubble = simulate(made, emit(read(made)), stream([M] * 3)).bubble
    assert bubble > 0.1
    assert sum(share.bubble or 0.0 for share in shares) / WORKERS == pytest.approx(bubble)


def test_every_message_between_neighbouring_stages_is_an_arrow_on_a_worker_too() -> None:
    flows = flows_of(spans(plan()))
    assert len(flows) == 2 * (2 * WORKERS - 1) * 3 * M
    turns = [(source, target) for source, target in flows if source.worker == target.worker]
    assert {(source.stage, target.stage) for source, target in turns} == {(2, 3), (3, 2)}
    assert all(abs(source.stage - target.stage) == 1 for source, target in flows)


def test_a_trace_names_both_stages_of_a_worker_and_is_read_again(tmp_path: Path) -> None:
    ran = spans(plan())
    write_trace(tmp_path / "trace.json", ran, names={0: "up to a, f"})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["worker 0 (stages 0 and 5: up to a, f)", "worker 1 (stages 1 and 4)", "worker 2 (stages 2 and 3)"]
    window = read_window(tmp_path / "trace.json", WORKERS, M)
    assert window is not None
    assert {(span.worker, span.stage) for span in window.spans} == {(0, 0), (0, 5), (1, 1), (1, 4), (2, 2), (2, 3)}
    starts = sorted(span.start_s for span in ran if span.opcode == "forward" and span.stage == 0)
    assert window.start_s == pytest.approx(starts[0])  # twelve forwards of stage 0: all of them


def test_a_page_draws_a_row_for_each_worker_and_says_which_stage() -> None:
    window = predicted_window(plan())
    assert window.num_workers == WORKERS
    words = {describe(span).splitlines()[0].split(":")[0] for span in window.spans}
    assert words == {"worker 0", "worker 0, stage 5", "worker 1", "worker 1, stage 4", "worker 2", "worker 2, stage 3"}


def test_a_simulation_is_told_by_worker() -> None:
    made = plan()
    shown = simulation_json(made, simulate(made, emit(read(made)), stream([M])))
    assert shown["workers"] == len(shown["per_worker"]) == WORKERS
    assert [row["parameter_bytes"] for row in shown["per_worker"]] == [200] * WORKERS
