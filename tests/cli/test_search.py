"""``roundelay plan --search``: as a person types it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import roundelay
from roundelay.errors import UsageError
from roundelay.finals import search_plan
from roundelay.finals.short_run import ShortRun
from roundelay.ir.plan import Plan
from roundelay.planner.machine_profile import MachineProfile
from roundelay.planner.plan_options import Choices
from roundelay.planner.price import batch_s
from roundelay.search.search import Found, Task, tried
from tests.cli.harness import MLP, here
from tests.planner.profiles import calibrated

TWO = ("plan", MLP, "--search", "--workers", 2, "--devices", "cpu")
Screen = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the tests' own: what one has measured the next has too."""
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path_factory.getbasetemp() / "profiles-of-searches"))
    monkeypatch.setattr(search_plan, "calibrate", calibrated)


@pytest.fixture
def shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_plan, "FINAL_S", 0.05)


def test_without_finals_the_predictions_decide_and_do_so_again(capsys: Screen, tmp_path: Path) -> None:
    said = here(capsys, *TWO, "--finals", 0, "--json", "-o", tmp_path / "plan.toml")
    assert said.code == 0, said.err
    found = said.json
    assert set(found) == {"plan", "space", "gap", "seconds", "chosen", "top", "baselines", "finals", "notices"}
    kept = Path(os.environ["ROUNDELAY_CACHE"]).rglob("*.toml")
    assert {MachineProfile.parse(file.read_text()).transport for file in kept} == {"memory", "shm"}
    assert set(found["seconds"]) == {"profile", "facts", "search", "finals", "plan"}
    assert found["finals"] == []
    assert found["chosen"] == found["top"][0]
    assert found["chosen"]["predicted_s"] <= min(one["predicted_s"] for one in found["baselines"].values() if one)
    plan = Plan.parse((tmp_path / "plan.toml").read_text())
    assert plan == Plan.parse(found["plan"])
    assert plan.num_workers <= 2
    assert plan.instruction_s == calibrated().instruction_s
    again = here(capsys, *TWO, "--finals", 0, "--json").json
    assert again["chosen"]["choices"] == found["chosen"]["choices"]


@pytest.mark.usefixtures("shorter")
def test_the_fastest_of_those_that_were_run_is_taken(
    capsys: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is made out to be much slower than it was."""
    slowed: list[Plan] = []

    def measured(short: ShortRun, plan: Plan, *_: float) -> float:
        found = run(short, plan)
        slowed.extend([plan] if not slowed else [])
        return 1e3 * found if plan == slowed[0] else found

    run = ShortRun.batch_s
    monkeypatch.setattr(ShortRun, "batch_s", measured)
    found = here(capsys, *TWO, "--finals", 2, "--json", "-o", tmp_path / "plan.toml").json
    finals = found["finals"]
    assert len(finals) >= 2
    assert [one["why"] for one in finals] == [""] * len(finals)
    assert [one["measured_s"] for one in finals] == sorted(one["measured_s"] for one in finals)
    assert found["chosen"]["choices"] in [one["choices"] for one in finals[:-1]]  # one of those that are as fast
    assert finals[-1]["choices"] == found["top"][0]["choices"]


@pytest.mark.usefixtures("shorter")
def test_a_person_sees_what_was_run_and_what_to_do_next(capsys: Screen, tmp_path: Path) -> None:
    said = here(capsys, *TWO, "--finals", 1, "--rule", "pipedream", "-o", tmp_path / "plan.toml")
    assert said.code == 0, said.err
    assert "predicted ms" in said.told
    assert "measured ms" in said.told
    assert f"roundelay train {MLP} --plan" in said.told
    assert Plan.parse((tmp_path / "plan.toml").read_text()).rule == "pipedream"


def test_what_was_found_before_ctrl_c_is_written(
    capsys: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ShortRun, "batch_s", interrupted)
    said = here(capsys, *TWO, "-o", tmp_path / "plan.toml")
    assert said.code == 130
    assert "the best plan so far" in said.told
    told = [line for line in said.err.splitlines() if line.endswith("...")]  # in a log a line for each thing
    assert len(told) == len(set(told)) > 3
    assert sum(line.startswith("Searching") for line in told) == 1
    written = batch_s(Plan.parse((tmp_path / "plan.toml").read_text()))
    top = here(capsys, *TWO, "--finals", 0, "--json").json["top"]
    assert written <= 1.5 * top[0]["predicted_s"]  # some of the facts are measured anew, on a machine that may be busy


def test_of_finals_that_are_as_fast_the_one_predicted_to_be_is_taken() -> None:
    def final(predicted_s: float, measured_s: float | None, batches: float = 1.0) -> search_plan.Final:
        plan: Any = SimpleNamespace(batches=batches, cost_s=batches * predicted_s)
        return search_plan.Final("", plan, measured_s)

    three = [final(2.0, 1.00), final(1.0, 1.04), final(0.5, 1.06), final(0.1, None)]
    assert search_plan._winner(three) is three[1].tried
    assert search_plan._winner([final(2.0, 1.0, batches=2.0), three[0]]) is three[0].tried
    assert search_plan._winner([final(0.1, None)]) is None


def test_finals_of_workers_that_are_not_here_are_refused_in_python_too(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text("[[workers]]\n[[workers]]\nspeed = 0.5\n")
    with pytest.raises(UsageError, match="whose workers are not here"):
        roundelay.search_plan(MLP, finals=2, cluster=str(tmp_path / "two.toml"))
    with pytest.raises(UsageError, match="numbers above 0"):
        roundelay.search_plan(MLP, finals=0, allow={"pipedream": 0.0})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--memory-limit", "1KiB"), "no plan that fits: the smallest holds"),
        (("--memory-limit", "1KiB"), "Smallest fix:"),
        (("--show", "graph"), "--search with --show"),
        (("--workers", "0"), "workers got 0"),
        (("--data-parallel", "3"), "workers of the plan: 3"),
        (("--rule", "1f2b"), "1f2b"),
    ],
)
def test_what_cannot_be_is_refused(capsys: Screen, options: tuple[str, ...], told: str) -> None:
    said = here(capsys, *TWO, "--finals", 0, *options)
    assert said.code == 2
    assert told in said.told


def test_from_python_the_same_is_found(capsys: Screen) -> None:
    told: list[str] = []
    found = roundelay.search_plan(MLP, workers=2, devices="cpu", finals=0, rule="1f1b", tell=told.append)
    own = here(capsys, *TWO, "--finals", 0, "--rule", "1f1b", "--json").json
    assert {name: str(v) for name, v in found.chosen.choices.given().items() if name in own["chosen"]["choices"]} == {
        name: str(v) for name, v in own["chosen"]["choices"].items()
    }
    assert found.planned.plan.stages[0].segments == Plan.parse(own["plan"]).stages[0].segments
    assert (found.found.points, found.finals) == (own["space"]["plans"], ())
    assert set(found.baselines) == set(own["baselines"])
    assert told
    with pytest.raises(TypeError, match="did you mean 'finals'"):
        roundelay.search_plan(MLP, final=2)
    with pytest.raises(roundelay.RoundelayError, match="workers"):
        roundelay.search_plan(MLP, workers="two")  # type: ignore[arg-type]
    for wrong in ({"workers": 0}, {"finals": -1}):
        with pytest.raises(roundelay.RoundelayError, match=next(iter(wrong))):
            roundelay.search_plan(MLP, **wrong)  # type: ignore[arg-type]


def test_sixteen_cores_are_shared_by_the_workers(
    capsys: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("ROUNDELAY_CORES", "16")
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path / "cache"))  # of such a machine
    job = tmp_path / "cut.py"  # without BatchNorm, so that batches may be cut
    text = "import runpy\nfrom torch import nn\n\n\ndef job(seed):\n    made = runpy.run_path("
    text += f"{MLP!r})\n    return made['make'](model=nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))\n"
    job.write_text(text)
    asked = ("plan", job, "--search", "--workers", 4, "--devices", "cpu", "--finals", 0, "--json")
    found = here(capsys, *asked, "--data-parallel", 4).json
    assert {worker.threads for worker in Plan.parse(found["plan"]).workers} == {4}
    free = here(capsys, *asked)
    assert free.code == 0, free.err
    plan = Plan.parse(free.json["plan"])
    assert plan.threads == 16 // plan.num_workers
    kept = [file.read_text() for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    assert len(kept) > 2
    assert all("threads = 4" in text for text in kept if "instruction_s" in text)


def test_finals_are_of_a_search(capsys: Screen) -> None:
    said = here(capsys, "plan", MLP, "--finals", 2)
    assert said.code == 2
    assert "--finals" in said.told


def test_what_is_given_may_need_what_is_searched(capsys: Screen, tmp_path: Path) -> None:
    said = here(capsys, *TWO, "--finals", 0, "--zero", 1, "--json")
    assert said.code == 0, said.err
    assert said.json["chosen"]["choices"]["zero"] == 1
    assert said.json["chosen"]["choices"]["data_parallel"] == 2
    signatures = tmp_path / "s.toml"
    assert (
        here(capsys, "plan", MLP, "--workers", 1, "--tensor-parallel", 2, "--cuts", "equal", "-o", signatures).code == 0
    )
    found = here(capsys, *TWO, "--finals", 0, "--signatures", signatures, "--json").json
    assert found["chosen"]["choices"]["signatures"] == str(signatures)
    assert {one["choices"]["transport"] for one in found["top"]} == {"memory", "shm"}


def test_averages_of_the_job_are_kept_by_a_search_that_is_ended(
    capsys: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(ShortRun, "batch_s", interrupted)
    job = tmp_path / "averaged.py"
    text = "import dataclasses, runpy\n\n\ndef job(seed):\n"
    job.write_text(
        text + f"    own = runpy.run_path({MLP!r})['job'](seed)\n    return dataclasses.replace(own, ema=0.9)\n"
    )
    said = here(capsys, "plan", job, *TWO[2:], "-o", tmp_path / "plan.toml")
    assert said.code == 130, said.err
    assert Plan.parse((tmp_path / "plan.toml").read_text()).ema == 0.9


def test_the_plan_is_cut_where_the_one_that_was_chosen_is(
    capsys: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where it would be cut anew."""
    own = Choices(workers=2, rule="1f1b", micro_batches=1, threads=1, transport="memory")

    def unevenly(task: Task, *_: Any, **__: Any) -> Found:
        first, last = task.facts.graph.cuts[0], len(task.facts.graph.ops) - 1
        cuts = [[task.facts.graph.ops[i].name] for i in (first, last)]
        chosen = tried(task, replace(own, cuts=cuts))
        slow = replace(
            chosen.priced.plan, stages=tuple([replace(s, update_s=0.125) for s in chosen.priced.plan.stages])
        )
        return Found((replace(chosen, choices=own, priced=replace(chosen.priced, plan=slow)),), {}, 1, 1, {}, 0.0)

    monkeypatch.setattr(search_plan, "search", unevenly)
    said = here(capsys, *TWO, "--finals", 0, "-o", tmp_path / "uneven.toml")
    assert said.code == 0, said.err
    assert here(capsys, "plan", MLP, "--workers", 2, "--cuts", "equal", "-o", tmp_path / "equal.toml").code == 0
    uneven, equal = (Plan.parse((tmp_path / name).read_text()).stages for name in ("uneven.toml", "equal.toml"))
    assert uneven[0].segments != equal[0].segments
    assert len(uneven[0].segments) == 1
    assert uneven[0].parameter_bytes < equal[0].parameter_bytes
    assert [stage.update_s for stage in uneven] == [0.125] * 2


def test_other_rules_are_chosen_where_they_are_allowed_and_worth_it(
    capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    search = ("plan", MLP, "--search", "--workers", 2, "--finals", 0, "--json")
    usual = here(capsys, *search).json
    cheap = here(capsys, *search, "--allow", "pipedream-2bw=0.01").json
    assert (usual["chosen"]["batches"], cheap["chosen"]["batches"]) == (1.0, 0.01)
    assert cheap["chosen"]["choices"]["rule"] == "pipedream-2bw"
    costs = [one["batches"] * one["predicted_s"] for one in cheap["top"]]
    assert costs == sorted(costs)
    assert 0.0 <= cheap["gap"] <= 1.0
    dear = here(capsys, *search, "--allow", "pipedream-2bw=1000").json
    assert dear["chosen"]["choices"]["rule"] != "pipedream-2bw"
    for wrong, said in (("pipedream-2bw", "as many batches"), ("pipedream=-1", "as many batches"), ("fast=2", "fast")):
        failed = here(capsys, *search, "--allow", wrong)
        assert failed.code == 2
        assert said in failed.err
    assert "--search" in here(capsys, "plan", MLP, "--allow", "pipedream=2").err
