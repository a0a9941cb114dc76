"""The four commands do what they say: what they leave, what they print, what they return."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from roundelay.checkpoint.checkpoint import load
from roundelay.frontend.loss import LossCall
from roundelay.ir.plan import FORMAT, Plan
from roundelay.ir.rule import rules
from roundelay.observe.metrics_file import read_metrics
from roundelay.planning.job_file import job_maker
from roundelay.proof.tamper_ways import WAYS
from tests.cli.harness import MLP, Said, finish, here, job_file, one_screen, start

Capture = pytest.CaptureFixture[str]
ASYNC = ("--workers", 2, "--rule", "pipeoptim")
FAST = (*ASYNC, "--no-baseline")
SUMMARY = {"rule", "workers", "transport", "steps", "loss_first", "loss_last", "samples_per_second"}


def whole(folder: Path, updates: int) -> dict[str, object]:
    """Assert that a run folder is complete, and return its summary."""
    plan = Plan.parse((folder / "plan.toml").read_text())
    assert [line["update"] for line in read_metrics(folder / "metrics.jsonl")] == list(range(updates))
    spans = [e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {span["pid"] for span in spans} == set(range(plan.num_stages))
    loads = [span["args"]["batch"] for span in spans if span["cat"] == "load"]
    assert loads == list(range(loads[0], updates))
    assert load(folder / "checkpoint").parameters.keys() >= {"0.weight", "8.bias"}
    summary: dict[str, object] = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    return summary


def test_train_leaves_a_whole_run_folder_and_latest_points_at_it(capsys: Capture, workplace: Path) -> None:
    said = here(capsys, "train", MLP, *FAST, "--steps", 4)
    assert said.code == 0, said.err
    (run,) = [entry for entry in Path("runs").iterdir() if not entry.is_symlink()]
    assert (Path("runs") / "latest").resolve() == run.resolve()
    summary = whole(run, 4)
    assert (summary["rule"], summary["workers"], summary["transport"], summary["steps"]) == (
        "pipeoptim",
        2,
        "memory",
        4,
    )
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl")]
    assert [summary["loss_first"], summary["loss_last"]] == [losses[0], losses[-1]]
    assert float(str(summary["samples_per_second"])) > 0
    assert "4 updates" in said.out


@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_train_tells_where_the_time_and_the_memory_of_each_worker_went(
    capsys: Capture, workplace: Path, transport: str
) -> None:
    said = here(capsys, "train", MLP, *FAST, "--steps", 5, "--out", "run", "--verbose", "--transport", transport)
    assert said.code == 0, said.err
    summary = json.loads(Path("run/summary.json").read_text())
    assert len(summary["shares"]) == len(summary["memory"]) == 2
    for busy, row in zip(summary["busy"], summary["shares"], strict=True):
        assert row["forward"] + row["backward"] + row["update"] == pytest.approx(row["busy"])
        assert row["busy"] + row["data"] + row["bubble"] + row["wait"] == pytest.approx(1.0)
        assert busy == row["busy"] > 0
    assert summary["shares"][0]["data"] > 0 == summary["shares"][1]["data"]
    for row in summary["memory"]:
        predicted = dict(row["predicted"])
        assert predicted.pop("total") == sum(predicted.values())
        assert predicted["optimizer"] > 2 * predicted["weights"]  # Adam: two tensors, and a count
        assert row["peak_rss_bytes"] >= row["rss_at_start_bytes"] > row["private_bytes"] > predicted["weights"]
        assert row["process_shared"] == (transport == "memory")
    assert "bubble" in said.out
    assert "predicted" in said.out
    assert ("threads of one process" in said.told) == (transport == "memory")


def test_a_worker_of_a_model_in_a_file_holds_its_own_stage_and_no_more(workplace: Path) -> None:
    layers, width, mib = 8, 1024, 1 << 20
    text = (
        "import torch, roundelay\n"
        "def job(seed):\n"
        "    with roundelay.empty_weights():\n"
        f"        layers = [torch.nn.Linear({width}, {width}, bias=False) for _ in range({layers})]\n"
        "    model = torch.nn.Sequential(*layers)\n"
        "    return roundelay.Job(model=model, weights='model.safetensors', loss=lambda o, b: o.square().mean(),\n"
        f"        batches=lambda epoch: [{{'x': torch.ones(2, {width})}}] * 9, inputs=lambda b: ((b['x'],), {{}}),\n"
        "        optimizer=lambda named: torch.optim.SGD(named, lr=1e-3))\n"
    )
    Path("job.py").write_text(text)
    save_file({f"{i}.weight": torch.eye(width) for i in range(layers)}, "model.safetensors")
    asked = (
        "--workers",
        4,
        "--transport",
        "shm",
        "--rule",
        "1f1b",
        "--cuts",
        "linear_1,linear_3,linear_5",
        "--steps",
        6,
    )
    said = finish(
        start(workplace, "train", "job.py", *asked, "--baseline", "--out", "run", MALLOC_MMAP_THRESHOLD_=str(mib))
    )
    assert said.code == 0, said.err
    assert "Plain PyTorch is not measured" in said.told, "it would hold the whole model"
    for row in json.loads(Path("run/summary.json").read_text())["memory"]:
        assert row["predicted"]["weights"] == layers * width * width
        assert 0 < row["private_bytes"] - row["predicted"]["total"] < 3 * layers * width * width


def test_in_half_precision_the_loss_scale_and_skipped_updates_are_told(capsys: Capture, workplace: Path) -> None:
    asked = ("--rule", "1f1b", "--precision", "fp16", "--loss-scale", "dynamic:1073741824:2")
    said = here(capsys, "train", MLP, *FAST, *asked, "--steps", 5, "--out", "run")
    assert said.code == 0, said.err
    told = [line["loss_scale"] for line in read_metrics(Path("run/metrics.jsonl"))]
    assert told == [2.0 ** (30 - t) for t in range(5)]
    assert json.loads(Path("run/summary.json").read_text())["skipped_updates"] == [5, 5]
    assert "updates skipped, by stage" in said.out
    one_screen(here(capsys, "plan", MLP, "--loss-scale", "1024"), "loss_scale of the plan", "1024 with precision fp32")


def test_modules_to_be_run_again_are_told_and_a_plan_keeps_them(capsys: Capture, workplace: Path) -> None:
    asked = ("--backward", "stash", "--recompute", "2, [345]", "--cuts", "linear_1")
    text = here(capsys, "plan", MLP, *ASYNC, *asked, "-o", "plan.toml", "--json").json["plan"]
    assert Plan.parse(text).recompute == ("2", "[345]")
    assert "# recompute: 2, [345]; the backward runs these modules forward again, with its forward's weights" in text
    assert "# recompute: stage 1 runs " in text
    run = ("train", MLP, "--plan", "plan.toml", "--no-baseline", "--steps", 2)
    one_screen(here(capsys, *run, "--recompute", "2"), "--recompute with --plan", "got 2", "2,[345], as in the plan")
    assert here(capsys, *run, "--recompute", "2,[345]", "--out", "run").code == 0
    assert here(capsys, "report", "run").code == 0
    assert "<dt>recompute</dt><dd>2, [345]</dd>" in Path("run/report.html").read_text()
    compared = here(capsys, "compare", MLP, "--rules", "1f1b,pipedream,async", *asked[2:], "--steps", 1, "--out", "c")
    assert compared.code == 0, compared.err
    assert Plan.parse(Path("c/plans/1f1b.toml").read_text()).recompute == ("2", "[345]")


@pytest.mark.parametrize(("rule", "transport"), [("1f1b", "shm"), ("pipedream", "memory")])
def test_a_scale_that_is_too_large_for_ever_is_told_and_ends_the_run(
    capsys: Capture, workplace: Path, rule: str, transport: str
) -> None:
    asked = ("--rule", rule, "--precision", "fp16", "--loss-scale", 2**40, "--transport", transport, "--restarts", 2)
    asked = (*asked, "--micro-batches", 4 if rule == "1f1b" else 1)
    said = here(capsys, "train", MLP, *FAST, *asked, "--steps", 80, "--out", "run")
    one_screen(said, "the gradients of batch 63", "the 64 batches up to it", "--loss-scale dynamic")
    assert said.code == 1
    assert "Updates 0 to 7 are skipped" in said.told
    assert "Updates 0 to 31 are skipped" in said.told
    assert "Restart" not in said.told


def test_a_run_over_memory_restarts_and_goes_on_from_its_checkpoint(capsys: Capture, workplace: Path) -> None:
    once = (
        "failed = []\n"
        "def away_once(epoch):\n"
        "    for number, batch in enumerate(mlp.batches(epoch)):\n"
        "        if (epoch, number) == (1, 2) and not failed:\n"
        "            failed.append(True)\n"
        "            raise OSError('the disk was away')\n"
        "        yield batch\n"
    )
    job = job_file(workplace, "batches=away_once", once)
    asked = ("--transport", "memory", "--epochs", 2, "--rule", "pipeoptim")
    for number, (restarts, out) in enumerate(((1, "restarted"), (0, "failed"))):
        said = here(capsys, "train", job, *FAST, *asked, "--restarts", restarts, "--out", out)
        assert said.code == number, said.err
        assert "the disk was away" in said.told
        assert ("Restart 1: continuing after update" in said.told) == (restarts > 0)
    assert here(capsys, "train", MLP, *FAST, *asked, "--out", "whole").code == 0
    ends = [load(Path(out) / "checkpoint").parameters for out in ("restarted", "whole")]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    losses = [[line["loss"] for line in read_metrics(Path(out) / "metrics.jsonl")] for out in ("restarted", "whole")]
    assert losses[0] == losses[1]


def test_inputs_may_change_the_batch(capsys: Capture, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken out is there again next time, and what is put in comes to the loss; beside plain PyTorch, too."""
    monkeypatch.setattr("roundelay.proof.plain_baseline.BUDGET_S", 0.2)
    stored = "STORED = list(mlp.batches(0))\ndef put(b):\n    b['z'] = b['y']\n    return (b.pop('x'),), {}\n"
    ends = []
    for changes in (
        "batches=lambda e: STORED",
        "batches=lambda e: STORED, inputs=lambda b: ((b.pop('x'),), {})",
        "batches=lambda e: STORED, inputs=put, loss=lambda o, b: nn.functional.cross_entropy(o, b['z'])",
    ):
        job, out = job_file(workplace, changes, stored), f"run{len(ends)}"
        said = here(capsys, "train", job, *ASYNC, "--steps", 9, "--out", out, "--baseline")
        assert said.code == 0, said.err
        assert "could not be measured" not in said.told
        ends.append(load(Path(out) / "checkpoint").parameters)
    for other in ends[1:]:
        assert all(torch.equal(value, other[name]) for name, value in ends[0].items())


def test_evaluations_are_kept_with_their_update(capsys: Capture, workplace: Path) -> None:
    job = job_file(workplace, "evaluate=lambda model: {'weight': 2.5}")
    said = here(capsys, "train", job, *FAST, "--epochs", 2, "--out", "run")
    assert said.code == 0, said.err
    lines = read_metrics(Path("run/evaluations.jsonl"))
    assert [(line["update"], line["epoch"], line["metrics"]) for line in lines] == [
        (5, 0, {"weight": 2.5}),
        (11, 1, {"weight": 2.5}),
    ]
    times = [line["time"] for line in read_metrics(Path("run/metrics.jsonl"))]
    assert times == sorted(times)


def test_json_prints_exactly_one_object_and_out_chooses_the_folder(capsys: Capture, workplace: Path) -> None:
    said = here(capsys, "train", MLP, *FAST, "--epochs", 1, "--out", "elsewhere/mine", "--json")
    assert said.code == 0, said.err
    assert said.err == ""
    assert said.json == whole(Path("elsewhere/mine"), 6)
    assert not Path("runs").exists()


def test_a_plan_is_written_read_and_run_as_it_stands(capsys: Capture, workplace: Path) -> None:
    said = here(capsys, "plan", MLP, "--workers", 3, "--rule", "1f1b", "--transport", "gloo", "-o", "plan.toml")
    assert (said.code, said.out) == (0, ""), said.err
    text = Path("plan.toml").read_text()
    run = here(capsys, "train", MLP, "--plan", "plan.toml", "--no-baseline", "--steps", 2, "--out", "r", "--json")
    assert [run.json[key] for key in ("rule", "workers", "transport")] == ["1f1b", 3, "gloo"]
    assert Plan.parse(Path("r/plan.toml").read_text()) == Plan.parse(text)
    shown = here(capsys, "plan", MLP, *ASYNC, "--json").json
    assert (shown["workers"], shown["rule"]) == (2, "pipeoptim")
    assert Plan.parse(shown["plan"]).num_stages == 2
    assert Plan.parse(here(capsys, "plan", MLP, *ASYNC).out).num_stages == 2


def test_a_deadline_is_planned_and_may_be_another_when_a_run_goes_on(capsys: Capture, workplace: Path) -> None:
    """It changes nothing that is computed: the plan of the run that is continued stays, and what is in flight too."""
    options = ("--rule", "pipedream", "--steps", 4, "--cuts", "equal", "--deadline-s", 70)
    said = here(capsys, "train", MLP, *FAST, *options, "--checkpoint-every", 3, "--out", "one")
    assert said.code == 0, said.err
    before = Plan.parse(Path("one/plan.toml").read_text())
    assert before.deadline_s == 70
    said = here(
        capsys, "train", MLP, "--no-baseline", "--from", "one", "--steps", 2, "--deadline-s", 80, "--out", "two"
    )
    assert said.code == 0, said.err
    assert "dropped" not in said.err
    assert Plan.parse(Path("two/plan.toml").read_text()) == replace(before, deadline_s=80.0)
    said = here(capsys, "train", MLP, "--plan", "one/plan.toml", "--deadline-s", 80)
    one_screen(said, "--deadline-s with --plan", "70.0, as in the plan")


def test_an_option_when_a_run_goes_on_changes_what_it_says_and_nothing_else(capsys: Capture, workplace: Path) -> None:
    options = ("--rule", "pipedream", "--micro-batches", 2, "--steps", 4, "--clip", "stage:2", "--checkpoint-every", 3)
    said = here(capsys, "train", MLP, *FAST, *options, "--out", "one")
    assert said.code == 0, said.err
    before = Plan.parse(Path("one/plan.toml").read_text())
    cuts = [stage.segments for stage in before.stages]

    def after(*options: object) -> Plan:
        said = here(capsys, "train", MLP, "--no-baseline", "--from", "one", "--steps", 2, *options)
        assert said.code == 0, said.err
        return Plan.parse(Path("runs/latest/plan.toml").read_text())

    def changed(plan: Plan) -> set[str]:
        odd = {f.name for f in fields(Plan) if getattr(plan, f.name) != getattr(before, f.name)}
        return odd - {"read_s", *(["stages"] if [s.segments for s in plan.stages] == cuts else [])}

    plan = after("--clip", "stage:1")
    assert changed(plan) == {"clip"}
    plan = after("--micro-batches", 4)
    assert changed(plan) == {"micro_batches", "edges", "input_bytes"}
    plan = after("--rule", "1f1b")
    assert (plan.rule, str(plan.clip), plan.backward, changed(plan) & {"stages"}) == ("1f1b", "stage:2", "stash", set())
    plan = after("--workers", 3)
    assert (plan.rule, plan.num_stages, plan.micro_batches, str(plan.clip)) == ("pipedream", 3, 2, "stage:2")


def test_a_run_whose_plan_has_an_earlier_format_is_refused_with_the_remedy(capsys: Capture, workplace: Path) -> None:
    options = ("--rule", "pipedream", "--steps", 4, "--checkpoint-every", 3, "--out", "one")
    assert here(capsys, "train", MLP, *FAST, *options).code == 0
    plan = Path("one/plan.toml")
    plan.write_text(plan.read_text().replace(f"format = {FORMAT}", "format = 3"))
    said = here(capsys, "train", MLP, *FAST, "--from", "one", "--steps", 2, "--out", "two")
    one_screen(said, "format of the plan", "roundelay plan JOB.py")


def test_a_run_that_goes_on_waits_as_long_as_its_plan_says(
    capsys: Capture, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--rule", "pipedream", "--steps", 2, "--cuts", "equal", "--deadline-s", 70)
    assert here(capsys, "train", MLP, *FAST, *options, "--out", "one").code == 0
    monkeypatch.setattr("roundelay.cli.plan_from_options.DEADLINE_S", 0.2)
    late = job_file(workplace, "batches=lambda e: time.sleep(0.5) or mlp.batches(e)", "import time")
    assert here(capsys, "train", late, *FAST, "--from", "one", "--steps", 1).code == 0


@pytest.mark.parametrize("where", ["option", "plan"])
def test_a_loader_that_hangs_is_refused_on_one_screen(capsys: Capture, workplace: Path, where: str) -> None:
    here(capsys, "plan", MLP, *ASYNC, "--cuts", "equal", "-o", "plan.toml")
    plan = Plan.parse(Path("plan.toml").read_text())
    Path("plan.toml").write_text(replace(plan, deadline_s=0.5).text())
    hangs = "batches=lambda e: gone.wait(20) or mlp.batches(e)"
    job = job_file(workplace, hangs, "import threading\ngone = threading.Event()")
    given = ("--deadline-s", 0.5) if where == "option" else ("--plan", "plan.toml")
    said = here(capsys, "train", job, *FAST, *given)
    one_screen(said, "the data: batches(0)", "no batch from the loader for 0.5 s", "--deadline-s")
    assert not Path("runs").exists()


def test_a_plan_says_why_it_is_cut_where_it_is_and_cuts_overrides_that(capsys: Capture, workplace: Path) -> None:
    why = here(capsys, "plan", MLP, "--workers", 2).out
    for words in ("# cuts: measured on this machine", "ms of computing", "the slowest", "equal numbers", "--cuts"):
        assert words in why
    assert "# cuts: predicted" in here(capsys, "plan", MLP, *ASYNC, "--cuts", "roofline").out
    named = here(capsys, "plan", MLP, "--cuts", "linear, linear_1").out
    assert [stage.segments for stage in Plan.parse(named).stages] == [("linear",), ("linear_1",), ("linear_3",)]
    run = here(capsys, "train", MLP, *FAST, "--steps", 1, "--cuts", "equal", "--out", "r", "--json")
    assert run.code == 0, run.err
    assert "# cuts: as equal" in Path("r/plan.toml").read_text()


WRONG_CUTS = {
    "unknown": (("plan", MLP, "--cuts", "linaer_1"), ("'linaer_1'", "linear_1")),
    "beside a plan": (("train", MLP, "--plan", "plan.toml", "--cuts", "equal"), ("--cuts with --plan", "segments")),
    "another number": (("plan", MLP, "--cuts", "linear", "--workers", 3), ("2 stages", "3, one for each worker")),
}


@pytest.mark.parametrize("what", WRONG_CUTS)
def test_wrong_cuts_are_told_on_one_screen(capsys: Capture, workplace: Path, what: str) -> None:
    here(capsys, "plan", MLP, *ASYNC, "-o", "plan.toml")
    command, words = WRONG_CUTS[what]
    said = here(capsys, *command)
    assert said.code == 2
    one_screen(said, *words)


def test_simulate_shows_grid_programs_trace_and_json(capsys: Capture, workplace: Path) -> None:
    here(capsys, "plan", MLP, *ASYNC, "-o", "plan.toml")
    said = here(capsys, "simulate", "plan.toml", "--grid", "--programs", "--trace", "trace.json")
    assert said.code == 0, said.err
    assert "makespan" in said.out
    assert "stage 1 | " in said.out
    assert "B0'" in said.out
    assert said.out.count("program") >= 2 or said.out.count("worker 1") >= 2
    spans = [e for e in json.loads(Path("trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {span["cat"] for span in spans} - {"load"} == {"read", "forward", "backward", "update", "idle"}
    instructions = [span for span in spans if span["cat"] not in ("idle", "load")]
    assert all(span["args"]["batch"] == span["args"]["micro-batch"] for span in instructions)  # M = 1
    told = here(capsys, "simulate", "plan.toml", "--grid", "--programs", "--json", "--batches", 3).json
    assert told["grid"].startswith("stage 0 | F0")
    assert len(told["programs"]) == len(told["per_worker"]) == told["workers"] == 2
    assert told["makespan_s"] > 0
    assert [worker["in_flight_peak"] for worker in told["per_worker"]] == [2, 1]
    text = Path("plan.toml").read_text()
    Path("slow.toml").write_text(re.sub(r"(?m)^read_s = .*$", "read_s = 2.0", text))
    slower = here(capsys, "simulate", "slow.toml", "--batches", 3)
    slow = here(capsys, "simulate", "slow.toml", "--grid", "--trace", "slow.json", "--json", "--batches", 3).json
    assert slow["makespan_s"] > 6.0 > 2 * told["makespan_s"]
    assert slow["per_worker"][0]["data_share"] > 0.9
    assert re.search(r"worker 0 waits for data for (9\d|100)% of .* its reader loads for (9\d|100)%", slower.told)
    assert slow["grid"] == told["grid"]  # the schedule's own waiting, whatever the loader takes
    loads = [e for e in json.loads(Path("slow.json").read_text())["traceEvents"] if e.get("cat") == "load"]
    assert [(load["name"], load["dur"]) for load in loads] == [(f"load {t}", 2e6) for t in range(3)]
    alone = here(capsys, "simulate", "plan.toml", "--json").json
    assert alone["grid"] is None
    assert alone["programs"] is None


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
def test_verify_proves_a_run_and_tells_who_computed(capsys: Capture, transport: str) -> None:
    said = here(capsys, "verify", MLP, *ASYNC, "--steps", 5, "--transport", transport)
    assert said.code == 0, said.err
    # 8 parameters and 2 of the normalization, 3 buffers, 3 state tensors of each of the 10
    assert "captured = plain PyTorch (3 updates, 10 gradients, weights, buffers: bit-equal)" in said.out
    assert "run = reference: bit-equal: 43 tensors, 5 steps" in said.out
    assert "bytes received" in said.out
    told = here(capsys, "verify", MLP, *ASYNC, "--steps", 5, "--transport", transport, "--json").json
    assert told["equal"]
    assert (told["tensors"], told["steps"], told["losses"]) == (43, 5, 5)
    pids = {worker["pid"] for worker in told["workers"]} | {told["reference"]["pid"]}
    assert len(pids) == (1 if transport == "memory" else 3)
    assert len({worker["thread"] for worker in told["workers"]}) == 2
    assert all(worker["bytes_received"] > 0 for worker in told["workers"])
    assert told["reference"] == {"pid": os.getpid(), "bytes_received": 0}


@pytest.mark.parametrize("way", WAYS)
def test_a_tampered_run_is_told_by_its_stage(capsys: Capture, way: str) -> None:
    said = here(capsys, "verify", MLP, *ASYNC, "--cuts", "roofline", "--steps", 4, "--tamper", way)
    assert said.code == 1
    assert "DIFFERENT" in said.out
    assert "run = reference" not in said.out
    assert "stage 1:" in said.out  # the last one, which has weights and the dropout


def test_a_tampering_that_could_not_show_is_refused(capsys: Capture) -> None:
    said = here(capsys, "verify", MLP, *ASYNC, "--steps", 1, "--tamper", "drop-update")
    assert said.code == 2
    assert "--steps 2" in said.told


def test_an_unknown_way_to_tamper_is_refused_before_the_job_is_read(capsys: Capture, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise RuntimeError('read')")
    said = here(capsys, "verify", broken, "--tamper", "nonsense")
    assert said.code == 2
    assert "one of stash, s" in said.told


@pytest.mark.parametrize("command", ["train", "plan", "simulate", "verify"])
def test_help_of_each_command_has_an_example(capsys: Capture, command: str) -> None:
    said = here(capsys, command, "--help")
    assert said.code == 0
    assert f"Example: roundelay {command}" in said.told


def test_metrics_that_are_no_numbers_are_null_in_json(capsys: Capture, workplace: Path) -> None:
    job = job_file(workplace, "evaluate=lambda model: {'accuracy': float('nan')}")
    said = here(capsys, "train", job, *FAST, "--steps", 2, "--json")
    assert said.code == 0, said.err
    assert said.json["evaluation"] == {"accuracy": None}


def test_a_rule_of_the_job_file_plans_trains_and_verifies(
    capsys: Capture, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundelay.ir.rule._RULES", {rule.name: rule for rule in rules()})  # forgotten afterwards
    rule = """
import roundelay
roundelay.register_rule(roundelay.UpdateRule(
    name="mine", schedule="async-1f1b", predicts=False, stashes=False, modes=("recompute", "mixed"), source="here"))
"""
    job = job_file(workplace, "", rule)
    for mode in ("recompute", "mixed"):
        said = here(capsys, "verify", job, "--workers", 3, "--rule", "mine", "--backward", mode, "--steps", 6)
        assert said.code == 0, said.told
    assert here(capsys, "train", job, *FAST, "--rule", "mine", "--steps", 2, "--json").json["rule"] == "mine"
    assert here(capsys, "plan", job, "--rule", "mine", "--backward", "stash").code == 2


def test_a_loader_with_processes_of_its_own_leaves_none_behind(capsys: Capture, workplace: Path) -> None:
    data = """
import os, pathlib
from torch.utils.data import DataLoader, Dataset

class Noise(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        pathlib.Path(f"pid.{os.getpid()}").touch()
        x = torch.randn(6)
        return {"x": x, "y": (x[0] > 0).long()}
"""
    job = job_file(workplace, "batches=lambda epoch: DataLoader(Noise(), 8, shuffle=True, num_workers=1)", data)
    for transport in ("memory", "shm", "gloo"):
        said = here(capsys, "verify", job, *ASYNC, "--transport", transport, "--steps", 3)
        assert "bit-equal" in said.out, said.told
        loaders = [path.suffix[1:] for path in workplace.glob("pid.*")]
        assert loaders
        assert not [pid for pid in loaders if Path("/proc", pid).exists()], "the loader's processes still run"


def test_a_command_in_its_own_process_prints_json_and_nothing_else(workplace: Path) -> None:
    said: Said = finish(start(workplace, "train", MLP, *FAST, "--steps", 3, "--json"))
    assert (said.code, said.err) == (0, "")
    assert said.json["steps"] == 3


def test_plain_pytorch_stands_beside_the_run(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundelay.proof.plain_baseline.BUDGET_S", 0.2)
    run = ("train", MLP, *ASYNC, "--steps", 3)
    assert here(capsys, *run, "--json").json["plain_samples_per_second"] == {}
    assert here(capsys, *run, "--json", "--baseline").json["plain_samples_per_second"]["1"] > 0
    assert "x plain PyTorch, pipeoptim on 2 workers" in here(capsys, *run, "--baseline").out
    shown = here(capsys, *run, "--baseline", "--verbose")
    assert "plain PyTorch, 1 thread" in shown.out
    assert "this run:" in shown.out


def test_a_job_file_is_read_as_it_stands(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it was edited within a second and is as long as before; and nothing is left beside it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    job, before = job_file(workplace, "steps=8"), os.listdir()
    first = job_maker(job)(0).steps
    stamp = job.stat().st_mtime_ns
    job.write_text(job.read_text().replace("steps=8", "steps=6"))
    os.utime(job, ns=(stamp, stamp))
    assert (first, job_maker(job)(0).steps) == (8, 6)
    assert os.listdir() == before


def test_train_says_how_it_has_checked_and_refuses_a_job_that_trains_otherwise(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = "plain PyTorch (2 updates, 10 gradients, weights, buffers: bit-equal)"
    train = ("train", MLP, "--steps", 2, "--rule", "1f1b", "--micro-batches", 1, "--no-baseline")
    said = here(capsys, *train)
    assert f"Check full: captured = {plain}." in " ".join(said.err.split())
    assert "Check quick" in here(capsys, *train, "--check", "quick").err
    assert "Check" not in here(capsys, *train, "--check", "off").err
    assert here(capsys, *train, "--json").json["check"] == f"check full: captured = {plain}"
    refused = here(capsys, *train, "--check", "some")
    assert (refused.code, "full, quick, off" in refused.told) == (2, True)
    monkeypatch.setattr("roundelay.frontend.loss.LossCall.__call__", _twice(LossCall.__call__))
    for check in ((), ("--check", "full")):
        refused = here(capsys, *train, *check)
        assert refused.code == 2
        assert "the loss in update 0" in " ".join(refused.told.split())
    assert here(capsys, *train, "--check", "off").code == 0
    verified = here(capsys, "verify", MLP, "--steps", 3, "--rule", "1f1b", "--micro-batches", 1)
    assert verified.code == 1
    assert "captured DIFFERS from plain PyTorch: the loss in update 0" in " ".join(verified.out.split())
    assert "run = reference: bit-equal" in verified.out


def _twice(call: Callable[..., list[torch.Tensor]]) -> Callable[..., list[torch.Tensor]]:
    """The loss is counted twice."""

    def twice(*given: Any) -> list[torch.Tensor]:
        loss, *others = call(*given)
        return [2 * loss, *others]

    return twice
