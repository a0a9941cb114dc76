"""The papers' benchmarks: what they print comes from runs, is found again, and says when an order does not hold."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import roundelay
from benchmarks import papers
from benchmarks.cdp import run as cdp
from benchmarks.papers import Case, Found, Line, optimizer
from benchmarks.pipeoptim import paper, reckoned
from benchmarks.pipeoptim import run as pipeoptim
from benchmarks.tasks import digits
from roundelay.comparison.run_results import Point, RunResult
from roundelay.errors import UsageError

SGDM = optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)


def perceptron(rows: int) -> roundelay.Job:
    torch.manual_seed(0)
    data = [tuple(part[:1].expand(rows, *part.shape[1:]) for part in digits.digits.pictures()[0])]
    return replace(digits.job(0, SGDM), batches=lambda epoch: data)


PERCEPTRON = reckoned.Model("perceptron", 2**18, perceptron)


def case(**changes: object) -> Case:
    made = Case(
        title="digits, SGDM",
        make=partial(digits.job, optimizer=SGDM),
        lines=(Line("PipeDream", "pipedream", 1), Line("PipeDream-2BW", "pipedream-2bw", 4)),
        epochs=1,
        paper={"PipeDream": "43.99"},
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def outcome(*values: float, diverged: int | None = None) -> RunResult:
    points = tuple(Point(10 * (n + 1), float(n), value) for n, value in enumerate(values))
    return RunResult(variant="x", seed=0, curves={"accuracy": points}, samples_per_second=1.0, diverged=diverged)


def test_lines_of_different_m_are_trained_and_found_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = papers.run(case(), 1, tmp_path)
    assert capsys.readouterr().err.count("run 1 of 1") == 2
    assert {path.parent.name for path in tmp_path.rglob("table.md")} == {"M1", "M4"}
    again = papers.run(case(), 1, tmp_path)
    assert capsys.readouterr().err == ""
    assert again.outcomes == found.outcomes
    row = papers.beside([found], ["PipeDream", "PipeDream-2BW"], papers.last).splitlines()[-1]
    assert "[43.99]" in row
    assert f"{found.mean('PipeDream-2BW', papers.last):.1f} |" in row
    other = optimizer(torch.optim.SGD, lr=0.04, momentum=0.9)  # is another comparison
    with pytest.raises(UsageError, match="another folder"):
        papers.run(case(make=partial(digits.job, optimizer=other)), 1, tmp_path)


def test_numbers_are_of_the_runs_that_did_not_diverge() -> None:
    runs = [outcome(0.5, 0.9, 0.8), outcome(0.1, 0.3, 0.4), outcome(0.2, diverged=3)]
    found = Found(case(), {"PipeDream": runs, "PipeDream-2BW": runs[2:]})
    assert found.mean("PipeDream", papers.last) == pytest.approx(60.0)
    assert found.mean("PipeDream", papers.best) == pytest.approx(65.0)
    assert found.text("PipeDream", papers.last) == "60.0 ± 28.3 (1 of 3 diverged)"
    assert found.text("PipeDream-2BW", papers.last) == "diverged"
    assert found.text("none", papers.last) == "–"
    assert papers.updates_to(runs[0], "accuracy", 0.6) == 20
    assert papers.updates_to(runs[1], "accuracy", 0.6) == float("inf")


@pytest.mark.parametrize(("two_bw", "holds"), [(0.85, "holds"), (0.93, "does not hold")])
def test_an_order_that_does_not_hold_is_said(two_bw: float, holds: str) -> None:
    values = {paper.GPIPE: 0.95, paper.PIPEDREAM: 0.8, paper.TWO_BW: two_bw, paper.SPECTRAIN: 0.92}
    values |= {paper.PIPEOPTIM: 0.93, "CDP-v2": 0.94}
    found = Found(case(), {title: [outcome(value)] for title, value in values.items()})
    said = pipeoptim.ordered(found, papers.last)
    assert f"}} {holds}; over PipeDream-2BW, by seed: PipeDream {80 - 100 * two_bw:+.1f}, SpecTrain" in said
    assert said.endswith("over PipeOptim: GPipe +2.0.")


def test_an_order_of_some_rules_is_not_said_to_hold() -> None:
    values = {paper.TWO_BW: 0.9, paper.PIPEOPTIM: 0.93}
    found = Found(case(), {title: [outcome(value)] for title, value in values.items()})
    said = pipeoptim.ordered(found, papers.last)
    assert said.endswith("is not asked of all rules; over PipeDream-2BW, by seed: PipeOptim +3.0.")
    assert "nothing to order" in pipeoptim.ordered(Found(case(), {}), papers.last)


def test_only_the_cases_and_rules_that_were_named_are_run() -> None:
    asked = papers.Asked([], 1, Path(), False, ["0.02"], ["gpipe", "cdp-v2"])
    (one,) = asked.wanted(pipeoptim.on_digits())
    assert "0.02" in one.title
    assert [line.rule for line in one.lines] == ["gpipe", "cdp-v2"]
    assert [len(one.lines) for one in papers.Asked([], 1, Path(), False).wanted([case(), case()])] == [2, 2]
    for wrong in (replace(asked, cases=["0.01", "0.03"]), replace(asked, rules=["gpipe", "0.03"])):
        with pytest.raises(UsageError, match=r"got 0\.03;"):
            wrong.wanted(pipeoptim.on_digits())


def test_a_gap_is_that_of_runs_with_the_same_seed() -> None:
    low = [replace(outcome(value), seed=seed) for seed, value in enumerate((0.1, 0.5, 0.2))]
    high = [replace(outcome(0.0, value), seed=seed) for seed, value in ((1, 0.6), (0, 0.4))]
    lost = replace(outcome(0.9, diverged=1), seed=2)
    found = Found(case(), {"low": low, "high": [*high, lost], "none": [lost]})
    assert found.gap("low", "high", papers.last) == "+20.0 ± 10.0"
    assert found.gap("low", "high", papers.average) == "-5.0 ± 15.0"
    assert found.gap("low", "none", papers.last) == "–"


def test_every_line_of_the_papers_is_a_rule_that_can_be_planned() -> None:
    assert [line.title for line in pipeoptim.LINES] == list(paper.TITLES)
    assert all(set(one.paper) <= set(paper.TITLES) for one in pipeoptim.trained())
    assert {line.micro_batches for one in (*cdp.cases(4, {}), *cdp.cases(8, {})) for line in one.lines} == {4, 8}
    for method in (*reckoned.KEPT.values(), *reckoned.RECOMPUTED.values()):
        assert reckoned.planned(PERCEPTRON, method, 2).micro_batches == method.micro_batches


@pytest.mark.parametrize("title", [paper.GPIPE, paper.PIPEDREAM, paper.PIPEOPTIM])
def test_the_largest_batch_fits_and_one_row_more_does_not(title: str) -> None:
    method = reckoned.RECOMPUTED[title]
    rows = reckoned.largest(PERCEPTRON, method)
    assert rows > 8
    fits, does_not = (max(reckoned.needed(PERCEPTRON, method, count)) for count in (rows, rows + 1))
    assert fits <= PERCEPTRON.budget < does_not


def test_weight_versions_of_table_2_are_within_the_paper_s_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reckoned, "MODELS", (PERCEPTRON,))
    rows = [line.split(" | ") for line in reckoned.table_ii(papers.Asked([], 1, Path(), True)).splitlines()[2:6]]
    held = {row[0].strip("| "): [int(word) for word in row[1].split()] for row in rows}
    assert held[paper.PIPEDREAM] == [4, 3, 2, 1]
    assert held[paper.TWO_BW] == [2, 2, 2, 2]
    assert held[paper.PIPEOPTIM] == [2, 2, 2, 1]


def test_asynchronous_methods_outrun_gpipe_by_about_its_bubble(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted = reckoned.timed

    def even(model: reckoned.Model, method: reckoned.Method, rows: int) -> roundelay.Plan:
        plan = predicted(model, method, rows)
        times = {"forward_s": 0.01, "backward_s": 0.02, "update_s": 0.0}
        return replace(plan, latency_s=0.0, stages=tuple(replace(stage, **times) for stage in plan.stages))

    monkeypatch.setattr(reckoned, "timed", even)
    found = [reckoned.rate(PERCEPTRON, reckoned.KEPT[title], 8) for title in (paper.GPIPE, paper.PIPEDREAM)]
    assert 1.6 < found[1] / found[0] < 2.0  # (M + D - 1) / M = 1.75, and messages that only a flush waits for


def test_a_busy_machine_changes_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = reckoned.planned

    def slowed(model: reckoned.Model, method: reckoned.Method, rows: int) -> roundelay.Plan:
        plan = measured(model, method, rows)
        times = {"forward_s": 1.0, "backward_s": 3.0, "update_s": 5.0}
        return replace(plan, stages=tuple(replace(stage, **times) for stage in plan.stages))

    method = reckoned.KEPT[paper.PIPEOPTIM]
    found = reckoned.rate(PERCEPTRON, method, 8)
    reckoned.timed.cache_clear()
    monkeypatch.setattr(reckoned, "planned", slowed)
    assert reckoned.rate(PERCEPTRON, method, 8) == found
    reckoned.timed.cache_clear()


def test_a_folder_is_known_again_by_another_process() -> None:
    found = {papers.digest(case.make) for case in (*cdp.cases(4, {}), *pipeoptim.trained())}
    told = "from benchmarks import papers; from benchmarks.cdp import run as c; "
    told += "from benchmarks.pipeoptim import run as p; "
    told += "print(*{papers.digest(case.make) for case in (*c.cases(4, {}), *p.trained())})"
    root = Path(__file__).parents[2]
    asked = [sys.executable, "-c", told]
    answer = subprocess.run(asked, cwd=root, check=True, capture_output=True, text=True, timeout=120)
    assert set(answer.stdout.split()) == found
