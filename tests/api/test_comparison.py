"""`compare`: equal starts, resuming, refusals, runs that diverge, and the table that is made of it."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundelay
from roundelay.checkpoint.stored_files import is_checkpoint
from roundelay.comparison.comparison import Compared, RunFinished, RunResumed, RunStarted, optimizer_factory
from roundelay.comparison.comparison_charts import chart_of, mean_curve, write_comparison
from roundelay.comparison.comparison_table import Aims, curves_csv, markdown, rounded, spreadsheet, table
from roundelay.comparison.comparison_variants import variants
from roundelay.comparison.run_results import Point, RunResult
from roundelay.errors import UsageError
from roundelay.ir.clip import Clip
from roundelay.ir.rule import rules
from roundelay.page.run_page import run_page
from roundelay.session.events import Updated
from tests.api import jobs

RULES = ("1f1b", "pipeoptim:paper:mixed", "async")


def network() -> nn.Module:
    """Weights drawn as the generator stands; a dropout; pieces enough for four stages."""
    layers = (nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 12), nn.Dropout(0.2), nn.Linear(12, 12), nn.Linear(12, 3))
    return nn.Sequential(*layers)


def job(seed: int) -> roundelay.Job:
    """Rows shuffled and changed at random, a schedule; all chance comes from the seed that `compare` has set."""
    return jobs.make(network(), evaluate=lambda model: {"rows": 3.0 + seed})


def compared(folder: Path, make: Callable[[int], roundelay.Job] = job, **changes: Any) -> Compared:
    """Three rules, two seeds, four updates, on two workers."""
    usual: dict[str, Any] = {"rules": RULES, "seeds": 2, "steps": 4, "workers": 2, "micro_batches": 2, "cuts": "equal"}
    return roundelay.compare(make, out=folder, **(usual | changes))


def losses(outcome: RunResult) -> list[float]:
    return [point.value for point in outcome.curves["loss"]]


def test_a_seed_starts_every_rule_with_the_same_weights_and_data(tmp_path: Path) -> None:
    """To the bit: the first loss is computed before any rule has acted."""
    asked = ("gpipe", "pipedream-2bw", "pipedream-vertical", "spectrain", "lookahead", "async")
    made = compared(tmp_path / "c", rules=asked)
    first = {seed: {losses(outcome)[0] for outcome in made.results.values() if outcome.seed == seed} for seed in (0, 1)}
    assert [len(values) for values in first.values()] == [1, 1]
    assert first[0] != first[1]
    assert len({tuple(losses(outcome)) for outcome in made.results.values() if outcome.seed == 0}) > 4  # rules act


def test_all_stands_for_every_rule_that_is_known() -> None:
    assert [one.rule for one in variants(["all"])] == [rule.name for rule in rules()]


def test_every_rule_has_its_own_micro_batches(tmp_path: Path) -> None:
    made = compared(tmp_path / "c", rules=("gpipe", "cdp-v2", "pipedream"), micro_batches=None, steps=1, seeds=1)
    assert {rule: plan.micro_batches for rule, plan in made.plans.items()} == {"gpipe": 4, "cdp-v2": 2, "pipedream": 1}


def test_every_rule_has_the_stages_of_the_one_plan_that_was_cut(tmp_path: Path) -> None:
    """Other cuts in its place show whom a rule follows, now and when the comparison goes on."""
    made = compared(tmp_path / "c", rules=("1f1b",), seeds=1, steps=1)
    usual = made.plans["1f1b"].stages[0].segments
    other = roundelay.plan(job(0), workers=2, cuts="relu", rule="1f1b")
    assert other.stages[0].segments == ("relu",) != usual
    (tmp_path / "c" / "cuts.toml").write_text(other.text())
    after = compared(tmp_path / "c", rules=("1f1b", "gpipe", "async"), seeds=1, steps=1)
    assert {rule: plan.stages[0].segments for rule, plan in after.plans.items()} == {
        "1f1b": usual, "gpipe": ("relu",), "async": ("relu",),
    }  # fmt: skip


def test_a_rule_with_two_stages_on_a_worker_has_cuts_of_its_own_and_the_same_start(tmp_path: Path) -> None:
    """It is 1f1b on other stages, so the weights and data that it has are seen in every loss."""
    made = compared(tmp_path / "c", rules=("1f1b", "zb-v", "zb-v:recompute"), seeds=1)
    assert (made.refused, [plan.num_stages for plan in made.plans.values()]) == ({}, [2, 4, 4])
    assert made.plans["zb-v"].stages[1].segments == made.plans["zb-v:recompute"].stages[1].segments
    one, *pairs = (losses(made.results[f"job/{rule}", 0]) for rule in ("1f1b", "zb-v", "zb-v:recompute"))
    assert pairs == [one, one]
    lines = [{name: value for cell in row for name, value in cell.values} for row in table(made, Aims({}, {}))]
    whole = sum(stage.parameter_bytes for stage in made.plans["1f1b"].stages)
    assert [(line["M"], line["versions"], line["versions, bytes"]) for line in lines] == [(2, 1, whole)] * 3
    (tmp_path / "c" / "plans" / "zb-v.toml").unlink()
    shutil.rmtree(tmp_path / "c" / "runs" / "job--zb-v.seed0")
    other = roundelay.plan(job(0), workers=2, rule="zb-v", cuts="linear,relu,linear_1")
    assert other.stages[1].segments != made.plans["zb-v"].stages[1].segments
    (tmp_path / "c" / "cuts-2.toml").write_text(other.text())
    after = compared(tmp_path / "c", rules=("zb-v",), seeds=1)
    assert [stage.segments for stage in after.plans["zb-v"].stages] == [stage.segments for stage in other.stages]


@pytest.mark.parametrize(
    ("workers", "cuts", "why"), [(None, "relu", "the cuts: 2 stages; expected 4"), (4, "equal", "into 8 stages")]
)
def test_where_so_many_stages_cannot_be_had_the_others_go_on(
    tmp_path: Path, workers: int | None, cuts: str, why: str
) -> None:
    made = compared(tmp_path / "c", rules=("gpipe", "zb-v"), seeds=1, steps=1, workers=workers, cuts=cuts)
    assert list(made.plans) == ["gpipe"]
    assert why in made.refused["zb-v"]


def test_a_finished_run_is_not_done_again_and_a_removed_one_comes_out_the_same(tmp_path: Path) -> None:
    before = compared(tmp_path / "c")
    kept = {path: path.read_bytes() for path in (tmp_path / "c" / "runs").glob("*/*") if path.is_file()}
    gone = tmp_path / "c" / "runs" / "job--async.seed1"
    assert len({path.parent for path in kept} - {gone}) == 5
    shutil.rmtree(gone)
    begun: list[RunStarted] = []
    after = compared(
        tmp_path / "c", notify=lambda event: begun.append(event) if isinstance(event, RunStarted) else None
    )
    assert [(one.variant.rule, one.seed, one.number, one.total, one.finished_before) for one in begun] == [
        ("async", 1, 1, 1, 5)
    ]
    assert all(path.read_bytes() == text for path, text in kept.items() if path.parent != gone)
    again = after.results["job/async", 1]
    assert losses(again) == losses(before.results["job/async", 1])
    assert after.results["job/1f1b", 0] == before.results["job/1f1b", 0]


def test_runs_that_are_left_wait_as_long_as_is_asked_for_now(tmp_path: Path) -> None:
    asked = {"rules": ("1f1b",), "steps": 1}
    first = compared(tmp_path / "c", seeds=1, deadline_s=60.0, **asked)
    more = compared(tmp_path / "c", seeds=2, deadline_s=70.0, **asked)
    assert more.plans["1f1b"] == dataclasses.replace(first.plans["1f1b"], deadline_s=70.0)


def test_an_interrupt_leaves_what_is_finished(tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        if isinstance(event, RunStarted) and event.number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path / "c", notify=stop)
    assert len(list((tmp_path / "c" / "runs").glob("*/summary.json"))) == 2
    ended: list[RunFinished] = []
    compared(tmp_path / "c", notify=lambda event: ended.append(event) if isinstance(event, RunFinished) else None)
    assert len(ended) == 4


# --- a run that is interrupted

UNDER_WAY = Path("runs", "job--pipeoptim.seed0")
ONE_RUN: dict[str, Any] = {"rules": ("pipeoptim",), "seeds": 1, "epochs": 4, "steps": None, "micro_batches": 1}


def slowly(epoch: int) -> Iterator[Any]:
    """Five batches; a checkpoint of one epoch is written before the next one ends."""
    for batch in jobs.loader(epoch):
        time.sleep(0.03)
        yield batch


def weighed(seed: int) -> roundelay.Job:
    """Its metric is one of the weights."""
    size = lambda model: {"size": sum(float(p.abs().sum()) for p in model.parameters())}  # noqa: E731
    return jobs.make(network(), batches=slowly, evaluate=size)


def values(outcome: RunResult) -> dict[str, list[tuple[int, float]]]:
    return {name: [(point.updates, point.value) for point in points] for name, points in outcome.curves.items()}


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """A comparison of one run, which was ended within an epoch and had a checkpoint of an earlier one."""
    folder = tmp_path / "c"

    def stop(event: Any) -> None:
        if isinstance(event, Updated) and event.update >= 7:
            patience = time.monotonic() + 3.0  # a slow disk
            while time.monotonic() < patience:
                if is_checkpoint(folder / UNDER_WAY / "checkpoint"):
                    raise KeyboardInterrupt
                time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        compared(folder, weighed, notify=stop, **ONE_RUN)
    return folder


@pytest.mark.parametrize("evaluated", [True, False], ids=["", "before-the-evaluation"])
def test_a_run_that_is_interrupted_goes_on_behind_its_last_checkpoint(interrupted: Path, evaluated: bool) -> None:
    """To the bit, with every evaluation, though other updates were in flight, and times without the interruption."""
    (whole,) = compared(interrupted.parent / "whole", weighed, **ONE_RUN).results.values()
    if not evaluated:
        (interrupted / UNDER_WAY / "evaluations.jsonl").unlink(missing_ok=True)
    told: list[Any] = []
    (gone_on,) = compared(interrupted, weighed, notify=told.append, **ONE_RUN).results.values()
    (resumed,) = (event for event in told if isinstance(event, RunResumed))
    assert resumed.updates in (5, 10, 15)
    assert [event.update for event in told if isinstance(event, Updated)] == list(range(resumed.updates, 20))
    made, expected = values(gone_on), values(whole)
    assert made["loss"] == expected["loss"]
    assert made["size"] == [point for point in expected["size"] if evaluated or point[0] >= resumed.updates]
    seconds = [point.seconds for point in gone_on.curves["loss"]]
    assert seconds == sorted(seconds)
    assert 0.0 < gone_on.samples_per_second < 1.5 * 8 / 0.03  # thrice as much, were its seconds counted anew


@pytest.mark.parametrize("text", ["", "[]\n", '{"update": 0}\n', '{"update": 0, "loss": "low"}\n'])
def test_an_interrupted_run_that_is_damaged_is_refused_with_a_remedy(interrupted: Path, text: str) -> None:
    (interrupted / UNDER_WAY / "metrics.jsonl").write_text(text)
    with pytest.raises(UsageError, match=r"pipeoptim\.seed0.*metrics\.jsonl.*Remove this folder"):
        compared(interrupted, weighed, **ONE_RUN)


def test_a_run_that_is_interrupted_in_its_last_evaluation_is_evaluated_and_not_trained_again(tmp_path: Path) -> None:
    """The last checkpoint is there; the evaluation of its weights and the summary are not."""
    (whole,) = compared(tmp_path / "c", weighed, **ONE_RUN).results.values()
    run = tmp_path / "c" / UNDER_WAY
    (run / "summary.json").unlink()
    lines = (run / "evaluations.jsonl").read_text().splitlines(keepends=True)
    (run / "evaluations.jsonl").write_text("".join(lines[:-1]))
    told: list[Any] = []
    (finished,) = compared(tmp_path / "c", weighed, notify=told.append, **ONE_RUN).results.values()
    assert not any(isinstance(event, Updated) for event in told)
    assert finished == whole
    assert [json.loads(line)["epoch"] for line in (run / "evaluations.jsonl").read_text().splitlines()] == [0, 1, 2, 3]


def test_a_run_has_an_ordinary_folder(tmp_path: Path) -> None:
    """A report can be written of it, its weights can be loaded, and another training can go on from it."""
    made = compared(tmp_path / "c", rules=("1f1b",), seeds=1)
    run = tmp_path / "c" / "runs" / "job--1f1b.seed0"
    assert {path.name for path in run.iterdir()} == {
        "checkpoint", "evaluations.jsonl", "metrics.jsonl", "plan.toml", "summary.json", "trace.json",
    }  # fmt: skip
    page = run_page(run)
    assert "finished</span>" in page
    assert "As it ran, in the middle of the run" in page
    usual = json.loads((run / "summary.json").read_text())
    assert (usual["rule"], usual["steps"], usual["evaluation"]) == ("1f1b", 4, {"rows": 3.0})
    rest = roundelay.train(job(0), plan=made.plans["1f1b"], steps=1, resume=run, check="off")
    assert rest.updates[0].update == 4
    assert roundelay.load(network(), run) is not None


def test_more_rules_and_seeds_go_into_the_same_folder(tmp_path: Path) -> None:
    compared(tmp_path / "c", rules=("1f1b",), seeds=1)
    begun: list[RunStarted] = []
    compared(tmp_path / "c", notify=lambda event: begun.append(event) if isinstance(event, RunStarted) else None)
    assert len(begun) == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 5}, ["updates 4", "5"]),
        ({"workers": 3}, ["workers 2"]),
        ({"micro_batches": 1}, ["micro batches 2"]),
        ({"transport": "shm"}, ["transport none given", "shm"]),
        ({"source": "another file"}, ["job ", "another file"]),
        ({"cuts": "roofline"}, ["cuts equal", "roofline"]),
        ({"make": lambda seed: jobs.make(nn.Linear(6, 3))}, ["a comparison with model"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_folder_of_another_comparison_is_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    compared(tmp_path / "c", rules=("1f1b",), seeds=1)
    kept = sorted(tmp_path.rglob("*"))
    with pytest.raises(UsageError) as refusal:
        compared(tmp_path / "c", **({"rules": ("1f1b",), "seeds": 1} | changes))
    assert all(word in str(refusal.value) for word in words), refusal.value
    assert sorted(tmp_path.rglob("*")) == kept


def test_a_folder_with_something_else_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        compared(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_folder_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    """It had no run folders; what to do is said."""
    compared(tmp_path / "c", rules=("1f1b",), seeds=1, steps=1)
    note = tmp_path / "c" / "comparison.json"
    note.write_text(
        json.dumps({name: value for name, value in json.loads(note.read_text()).items() if name != "format"})
    )
    with pytest.raises(UsageError, match=r"another version of Roundelay.*another folder by --out"):
        compared(tmp_path / "c", rules=("1f1b",), seeds=1, steps=1)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"steps": 2}', '{"diverged": 7}'])
def test_a_damaged_result_is_told_with_its_remedy(tmp_path: Path, text: str) -> None:
    compared(tmp_path / "c", rules=("1f1b",), seeds=1, steps=1)
    (path,) = (tmp_path / "c" / "runs").glob("*/summary.json")
    path.write_text(text)
    with pytest.raises(UsageError, match="Remove this folder"):
        compared(tmp_path / "c", rules=("1f1b",), seeds=1, steps=1)


def test_a_run_by_another_plan_is_refused(tmp_path: Path) -> None:
    made = compared(tmp_path / "c", rules=("1f1b",), seeds=1, steps=1)
    (path,) = (tmp_path / "c" / "runs").glob("*/plan.toml")
    path.write_text(dataclasses.replace(made.plans["1f1b"], clip=Clip.parse("stage:1.0")).text())
    with pytest.raises(UsageError, match=r"another plan than .*1f1b\.toml.*Remove this folder"):
        compared(tmp_path / "c", rules=("1f1b",), seeds=1, steps=1)


def test_a_diverging_run_is_a_line_and_not_the_end(tmp_path: Path) -> None:
    """Batch 3 of seed 1 holds an infinity; and a learning rate beyond all measure diverges by itself."""

    def poisoned(seed: int) -> roundelay.Job:
        def batches(epoch: int) -> Iterator[jobs.Batch]:
            for i in range(6):
                yield torch.full((8, 6), torch.inf if (seed, i) == (1, 3) else 0.5), torch.arange(8) % 3

        return jobs.make(network(), batches=batches, scheduler=None)

    made = compared(tmp_path / "c", poisoned, steps=6, optimizers=("adam", "sgd"), rates={"sgd": 1e30})
    assert len(made.results) == 12
    for rule in RULES:
        clean, broken = made.results[f"adam@0.001/{rule}", 0], made.results[f"adam@0.001/{rule}", 1]
        assert (clean.diverged, len(losses(clean))) == (None, 6)
        assert (broken.diverged, len(losses(broken))) == (3, 3)
        assert made.results[f"sgd@1e+30/{rule}", 0].diverged is not None
    assert "diverged</span>" in run_page(tmp_path / "c" / "runs" / "adam=0.001--async.seed1")
    rows = table(made, Aims({}, {}))
    assert rows[0][-1].text == "diverged at update 3 (seed 1)"
    assert "diverged at update" in rows[-1][-1].text
    again = compared(tmp_path / "c", poisoned, steps=6, optimizers=("adam", "sgd"), rates={"sgd": 1e30})
    assert markdown(table(again, Aims({}, {}))) == markdown(rows)  # kept and read again


def test_a_rule_that_the_timing_refuses_is_a_line_and_not_the_end(tmp_path: Path) -> None:
    made = compared(tmp_path / "c", rules=("1f1b", "cdp-v1"), workers=4, micro_batches=1, seeds=1, steps=2)
    assert list(made.plans) == ["1f1b"]
    assert "cdp-v1" in made.refused["cdp-v1"]
    good, refused = table(made, Aims({"loss": 0.0}, {}))
    assert good[-1].text == ""
    assert refused[-1].text.startswith("refused: rule 'cdp-v1' on 4 stages, M=1")
    assert [cell.title for cell in good] == [cell.title for cell in refused]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"rules": ("nothing",)}, "nothing"),
        ({"rules": ("1f1b:paper:paper",)}, "paper:paper"),
        ({"rules": ("1f1b:",)}, "1f1b:"),
        ({"rules": ("1f1b", "1f1b")}, "twice"),
        ({"rules": ()}, "none"),
        ({"optimizers": ("sgdx",)}, "sgdx"),
        ({"rates": {"adam": 0.1}}, "adam"),
        ({"optimizers": ("adam",), "rates": {"adam": -1.0}}, "adam=-1.0"),
        ({"seeds": 0}, "at least 1"),
        ({"workers": 100}, "100"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(UsageError, match=word):
        compared(tmp_path / "c", **changes)
    assert not (tmp_path / "c").exists()


def test_a_rule_is_read_with_its_predictor_and_mode_in_any_order() -> None:
    (one,) = variants(["pipeoptim:mixed:paper"])
    assert (one.rule, one.predictor, one.backward, one.rule_text) == (
        "pipeoptim", "paper", "mixed", "pipeoptim:paper:mixed",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["sgd", "sgdm", "nesterov", "adam", "adamw"])
def test_an_optimizer_is_the_one_of_its_name(name: str) -> None:
    (one,) = variants(["1f1b"], [name], {name: 0.25})
    factory = optimizer_factory(one)
    assert factory is not None
    made = factory([("w", torch.nn.Parameter(torch.zeros(2)))])
    group = made.param_groups[0]
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(name, torch.optim.SGD)
    assert type(made) is kind
    assert group["lr"] == 0.25
    assert (group.get("momentum", 0), group.get("nesterov", False)) == {
        "sgdm": (0.9, False), "nesterov": (0.9, True),
    }.get(name, (0, False))  # fmt: skip


def by_hand() -> Compared:
    """Three runs of known numbers: the loss of seed s falls from 3 by 0.1 (s + 1) an update, one second each."""

    def result(seed: int, diverged: int | None = None) -> RunResult:
        loss = tuple(Point(u + 1, float(u), 3.0 - 0.1 * (seed + 1) * u) for u in range(20))
        score = (Point(10, 9.0, 0.5 + seed), Point(20, 19.0, 0.25 + seed))
        return RunResult(
            variant="job/async",
            seed=seed,
            curves={"loss": loss, "score": score},
            samples_per_second=100.0 * (seed + 1),
            diverged=diverged,
        )

    results = {("job/async", seed): result(seed, 20 if seed == 2 else None) for seed in range(3)}
    return Compared(variants=variants(["async"]), seeds=(0, 1, 2), plans={}, refused={}, results=results)


def test_the_table_s_numbers_are_those_worked_out_by_hand() -> None:
    """Running means of ten: the first is at update 10, 3 - 0.1 (s + 1) * 4.5, the last 3 - 0.1 (s + 1) * 14.5."""
    (row,) = table(by_hand(), Aims({"loss": 2.05, "score": 1.4}, {}))
    values = dict(pair for cell in row for pair in cell.values)
    last = [3 - 1.45, 3 - 2.9]
    assert values["loss, last, mean"] == pytest.approx(statistics.fmean(last))
    assert values["loss, last, spread"] == pytest.approx(statistics.stdev(last))
    assert values["score, last, mean"] == 0.75
    assert values["score, best, mean"] == 1.0
    assert values["samples/s, mean"] == 150.0
    # 3 - 0.1 (s + 1) (n - 5.5) <= 2.05 for n = 15, 11 (10.25), 9 (8.67: before the first mean, so 10)
    assert (values["updates to loss ≤ 2.05"], values["seconds to loss ≤ 2.05"], values["reached loss ≤ 2.05"]) == (
        11, 10.0, 3,
    )  # fmt: skip
    assert (values["updates to score ≥ 1.4"], values["reached score ≥ 1.4"], values["seeds"]) == (10, 2, 2)
    assert values["note"] == "diverged at update 20 (seed 2)"
    low = dict(pair for cell in table(by_hand(), Aims({}, {"score": "low"}))[0] for pair in cell.values)
    assert low["score, best, mean"] == 0.75


@pytest.mark.parametrize(
    ("mean", "spread", "text"),
    [
        (0.12563, 0.02718, "0.126 ± 0.027"),
        (1234.56, 388.4, "1,235 ± 388"),
        (12.345, 1.26, "12.3 ± 1.3"),
        (3.5, 0.0, "3.5 ± 0"),
        (0.5, 1.234e-9, "0.5 ± 1.234e-9"),
        (2.0, 12.0, "2 ± 12"),
    ],
)
def test_a_mean_is_rounded_to_what_its_spread_allows(mean: float, spread: float, text: str) -> None:
    assert rounded(mean, spread) == text


def test_a_curve_is_the_mean_over_the_seeds_that_did_not_diverge() -> None:
    """Seeds 0 and 1: at update 10 the means of ten are 3 - 0.45 and 3 - 0.9."""
    (point, *others) = mean_curve(by_hand().of(variants(["async"])[0]), "loss")
    assert (point.updates, point.seconds, len(others)) == (10, 9.0, 10)
    assert point.value == pytest.approx(3 - 0.675)
    assert [p.value for p in mean_curve(by_hand().of(variants(["async"])[0]), "score")] == [1.0, 0.75]


def test_a_metric_that_is_no_number_is_a_gap_and_not_the_end(tmp_path: Path) -> None:
    """Of three seeds one says nan and one infinity: no mean is made up for them."""

    def odd(seed: int) -> roundelay.Job:
        return jobs.make(network(), evaluate=lambda model: {"score": [1.0, math.nan, math.inf][seed]})

    for _ in ("made", "read again"):
        made = compared(tmp_path / "c", odd, rules=("1f1b",), seeds=3, steps=1)
        values = dict(pair for cell in table(made, Aims({"score": 0.5}, {}))[0] for pair in cell.values)
        assert math.isnan(values["score, last, mean"])
        assert (values["score, last, spread"], values["reached score ≥ 0.5"]) == (None, 1)
        assert write_comparison(made, tmp_path / "c", Aims({}, {})).missing is None


def test_a_metric_beside_the_loss_has_a_column_and_a_chart(tmp_path: Path) -> None:
    def right(seed: int) -> roundelay.Job:
        made = job(seed)

        def loss(outputs: torch.Tensor, batch: jobs.Batch) -> dict[str, torch.Tensor]:
            return {"loss": made.loss(outputs, batch), "right": (outputs.argmax(-1) == batch[1]).float().mean()}

        return dataclasses.replace(made, loss=loss)

    made = compared(tmp_path / "c", right, rules=("async",))
    chart = chart_of(made, "train.right")
    ((_, points),) = chart.over_updates
    of_seeds = [[p.value for p in outcome.curves["train.right"]] for outcome in made.results.values()]
    assert points == [(4.0, pytest.approx(statistics.fmean(map(statistics.fmean, of_seeds))))]
    assert not chart.dots
    written = write_comparison(made, tmp_path / "c", Aims({}, {}))
    assert "train.right, last" in [cell.title for cell in written.rows[0]]
    assert "<h2>train.right</h2>" in (tmp_path / "c" / "curves.html").read_text()


def test_a_metric_is_better_high_or_low_and_nothing_else() -> None:
    with pytest.raises(UsageError, match="high or low"):
        Aims({}, {"score": "more"})


def test_the_texts_can_be_read_by_others(tmp_path: Path) -> None:
    made = compared(tmp_path / "c")
    rows = table(made, Aims({"loss": 100.0}, {}))
    read = list(csv.DictReader(io.StringIO(spreadsheet(rows))))
    assert [line["rule"] for line in read] == list(RULES)
    assert {line["reached loss ≤ 100"] for line in read} == {"2"}
    assert float(read[0]["rows, last, mean"]) == 3.5
    lines = markdown(rows).splitlines()
    assert len(lines) == 2 + len(RULES)
    assert len({line.count("|") for line in lines}) == 1
    points = list(csv.DictReader(io.StringIO(curves_csv(made))))
    assert len(points) == 6 * (4 + 1)
    first = [point for point in points if (point["rule"], point["seed"], point["quantity"]) == ("async", "1", "loss")]
    assert [float(point["value"]) for point in first] == losses(made.results["job/async", 1])
    assert [point["updates"] for point in first] == ["1", "2", "3", "4"]


def test_a_comparison_s_settings_are_plain_json(tmp_path: Path) -> None:
    compared(tmp_path / "c", rules=("1f1b",), seeds=1, steps=1, source="a file")
    kept = json.loads((tmp_path / "c" / "comparison.json").read_text())
    assert (kept["job"], kept["workers"], kept["updates"]) == ("a file", 2, 1)
