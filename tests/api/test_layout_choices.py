"""Choices of a layout: how many stages and workers it gets, what it inherits, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import roundelay
from roundelay.cli.app import app
from roundelay.errors import PlanError
from roundelay.ir.plan import Plan
from roundelay.lower.validate_plan import check_plan
from tests.equivalence.cells import Bench, bench

JOB = """
import torch
from torch import nn
import roundelay


def job(seed: int) -> roundelay.Job:
    layers = [part for _ in range(4) for part in (nn.Linear(8, 8), nn.Tanh())]
    data = [(torch.randn(12, 8), torch.randn(12, 8)) for _ in range(4)]
    return roundelay.Job(
        model=nn.Sequential(*layers),
        loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
    )
"""


def planned(place: Bench, **choices: Any) -> Plan:
    return roundelay.plan(place.job(), captured=place.captured, cuts="equal", rule="cdp-v2", **choices)


def test_a_layout_has_as_many_stages_as_asked_for() -> None:
    place = bench("mlp")
    assert planned(place, layout="dp", micro_batches=3, stages=2).num_stages == 2
    assert planned(place, layout="dp", micro_batches=3).num_stages == 3


@pytest.mark.parametrize(
    ("layout", "numbers", "workers"),
    [
        ("single", {"micro_batches": 3}, [1, 1, 1]),
        ("dp", {"micro_batches": 3}, [3, 3, 3]),
        ("dp", {"data_parallel": 3}, [3, 3, 3]),
        ("zero", {"data_parallel": 3, "micro_batches": 3}, [3, 3, 3]),
        ("mp", {"micro_batches": 3}, [3, 2, 1]),
        ("mp", {"micro_batches": 4, "stages": 2}, [4, 2]),
        ("mp", {"micro_batches": 2, "stages": 3}, [2, 2, 1]),
    ],
)
def test_a_layout_says_which_workers_hold_which_stages(
    layout: str, numbers: dict[str, int], workers: list[int]
) -> None:
    plan = planned(bench("mlp"), layout=layout, **numbers)
    assert [len(stage.workers) for stage in plan.stages] == workers
    assert plan.num_workers == (sum(workers) if layout == "mp" else max(workers))


@pytest.mark.parametrize(
    ("choices", "told"),
    [
        ({"layout": "ring"}, r"--layout: got 'ring'; expected one of pipeline, single, dp, mp, zero"),
        ({"layout": "dp", "workers": 2}, "--workers with layout dp"),
        ({"layout": "mp", "data_parallel": 2}, "--data-parallel with layout mp"),
        ({"layout": "dp", "data_parallel": 2, "micro_batches": 3}, "--micro-batches 3 and --data-parallel 2"),
        ({"layout": "single", "stages": 99}, "--stages: got 99"),
        ({"stages": 2}, "--stages with layout pipeline"),
        ({"layout": "dp", "clip": "previous:1"}, "clip of the plan, with layout dp"),
        ({"layout": "zero", "clip": "global:1"}, "clip of the plan"),
        ({"layout": "dp", "precision": "fp16"}, "loss_scale of the plan, with layout dp"),
        ({"layout": "dp", "micro_batches": 2, "zero": 1}, "--zero 1: got --layout dp"),
        ({"layout": "zero", "memory_limit": 1}, "memory of worker .* --layout: mp or zero"),
        ({"layout": ["dp"]}, r"layout: got \['dp'\]; expected a name"),
        ({"layout": "dp", "stages": "2"}, "stages: got '2'; expected a whole number"),
        ({"micro_batches": 2.0}, r"micro_batches: got 2\.0"),
        ({"layout": "dp", "stages": True}, "stages: got True"),
        ({"layout": "dp", "tensor_parallel": 2}, "mesh of the plan, with layout dp"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(choices: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        planned(bench("mlp"), **choices)


def masked(outputs: Any, batch: Any) -> Any:
    """A mean over some of the rows, which is not the mean of those of parts."""
    kept = batch[1] < 3
    return (nn.functional.cross_entropy(outputs, batch[1], reduction="none") * kept).sum() / kept.sum()


@pytest.mark.parametrize(
    ("layout", "rule"), [("dp", "cdp-v1"), ("dp", "1f1b"), ("single", "cdp-v2"), ("zero", "cdp-v1")]
)
def test_by_default_no_batch_is_cut_whose_loss_is_another_then(layout: str, rule: str) -> None:
    job = replace(bench("mlp").job(), loss=masked)
    with pytest.raises(PlanError, match=f"a layout with rule {rule} without a number of micro-batches"):
        roundelay.plan(job, cuts="equal", rule=rule, layout=layout)
    assert roundelay.plan(job, cuts="equal", rule=rule, layout=layout, micro_batches=2).batch_parts == 2


def test_stages_of_one_worker_send_nothing_that_cuts_would_avoid() -> None:
    """The largest values lie in the middle; operations take as long as their constants say."""
    wide = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4096), nn.Linear(4096, 4), nn.Linear(4, 4))
    job = roundelay.Job(
        model=wide,
        loss=lambda output, batch: nn.functional.mse_loss(output, batch[1]),
        batches=lambda epoch: [(torch.randn(64, 4), torch.randn(64, 4))],
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
    plans = [
        roundelay.plan(job, cuts="roofline", rule="cdp-v1", layout=layout, micro_batches=2, stages=2, transport="gloo")
        for layout in ("single", "mp")
    ]
    assert plans[0].stages[0].segments == ("linear_1",)
    assert plans[1].stages[0].segments in (("linear",), ("linear_2",))


@pytest.mark.parametrize(
    ("layout", "rule"), [("dp", "pipeoptim"), ("mp", "1f1b"), ("zero", "gpipe"), ("single", "zb-v")]
)
def test_a_rule_that_has_no_form_there_is_refused(layout: str, rule: str) -> None:
    place = bench("mlp")
    with pytest.raises(PlanError, match=f"rule of the plan, with layout {layout}"):
        roundelay.plan(place.job(), captured=place.captured, cuts="equal", rule=rule, layout=layout)


def test_a_plan_with_other_holders_is_refused() -> None:
    plan = planned(bench("mlp"), layout="mp", micro_batches=3)
    odd = replace(
        plan, stages=(plan.stages[0], replace(plan.stages[1], workers=plan.stages[0].workers), plan.stages[2])
    )
    with pytest.raises(PlanError, match=r"stages\[1\].workers of the plan.*2 names"):
        check_plan(odd)


@pytest.mark.parametrize("layout", ["single", "dp", "mp", "zero"])
def test_a_run_is_continued_by_its_own_layout_and_by_another(layout: str, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)

    def call(*args: object) -> str:
        done = CliRunner().invoke(app, [str(arg) for arg in args])
        assert done.exit_code == 0, done.output
        return done.output

    chosen = ("--rule", "cdp-v2", "--cuts", "equal", "--check", "off", "--no-baseline")
    call("train", job, "--layout", layout, "--micro-batches", 3, "--steps", 3, "--out", tmp_path / "one", *chosen)
    call("train", job, "--from", tmp_path / "one", "--steps", 2, "--out", tmp_path / "two", "--check", "off")
    kept, other = (Plan.parse((tmp_path / name / "plan.toml").read_text()) for name in ("one", "two"))
    assert other == kept
    changed = ("--layout", "dp" if layout != "dp" else "single", "--micro-batches", 2)
    call("train", job, "--from", tmp_path / "two", *changed, "--steps", 2, "--out", tmp_path / "three", *chosen)
    last = Plan.parse((tmp_path / "three" / "plan.toml").read_text())
    assert (last.layout, last.batch_parts, last.rule, last.num_stages) == (changed[1], 2, "cdp-v2", 2)
    alike = ("--from", tmp_path / "two", *changed[:2], "--rule", "cdp-v1", "--steps", 1, "--check", "off")
    call("train", job, *alike, "--out", tmp_path / "four")
    last = Plan.parse((tmp_path / "four" / "plan.toml").read_text())
    assert (last.layout, last.batch_parts, last.rule, last.num_stages) == (changed[1], 3, "cdp-v1", 3)


def test_the_table_is_counted_and_printed_beside_the_papers() -> None:
    done = CliRunner().invoke(app, ["table", "cdp", "--workers", "2", "--json"])
    assert done.exit_code == 0, done.output
    import json

    rows = {(row["form"], i): row for i, row in enumerate(json.loads(done.output)["rows"])}
    by_form = {form: row for (form, _), row in rows.items()}
    assert by_form["DP with MP"]["counted"]["devices"] == 4
    assert by_form["several devices, DP"]["sent"] == pytest.approx(1.0, abs=0.02)
    assert by_form["ZeRO-DP, cyclic, cdp-v2"]["sent"] > 1.0
    other = CliRunner().invoke(app, ["table", "ravnest"])
    assert other.exit_code != 0


def test_rules_are_compared_in_a_layout(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    chosen = (
        "--layout",
        "dp",
        "--micro-batches",
        "2",
        "--stages",
        "3",
        "--cuts",
        "equal",
        "--seeds",
        "1",
        "--steps",
        "2",
    )
    rules = ("--rules", "1f1b,cdp-v1,pipeoptim")
    done = CliRunner().invoke(app, ["compare", str(job), *rules, *chosen, "--out", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    plans = [Plan.parse(path.read_text()) for path in (tmp_path / "out").glob("**/*.toml")]
    assert {plan.layout for plan in plans} == {"dp"}
    assert {(plan.rule, plan.replicas, plan.num_stages) for plan in plans} == {("1f1b", 2, 3), ("cdp-v1", 2, 3)}
    assert "with layout dp" in done.output
    rows = (tmp_path / "out" / "table.md").read_text().splitlines()
    assert [row.split(" | ")[1] for row in rows if "| cdp-v1" in row][:1] == ["2"]
