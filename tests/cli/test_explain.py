"""``roundelay explain``: terms that add up, and what another plan changes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from roundelay.finals import search_plan
from tests.cli.harness import MLP, here
from tests.page.test_explain_page import searched
from tests.planner.profiles import calibrated

Screen = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the tests' own: what one has measured the next has too."""
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path_factory.getbasetemp() / "profiles-of-searches"))
    monkeypatch.setattr(search_plan, "calibrate", calibrated)


@pytest.fixture
def files(capsys: Screen, tmp_path: Path) -> list[Path]:
    """Plans of one model: a pipeline, and two replicas that split their states."""
    choices = (("--workers", 2), ("--workers", 1, "--data-parallel", 2, "--zero", 1))
    paths = [tmp_path / f"{k}.toml" for k in range(2)]
    for path, own in zip(paths, choices, strict=True):
        said = here(capsys, "plan", MLP, *own, "--rule", "1f1b", "--cuts", "equal", "--devices", "cpu", "-o", path)
        assert said.code == 0, said.err
    return paths


def test_terms_add_up_to_the_batch_that_simulation_gives(capsys: Screen, files: list[Path]) -> None:
    for file in files:
        found = here(capsys, "explain", file, "--json").json
        simulated = here(capsys, "simulate", file, "--batches", 4, "--json").json
        assert sum(found["terms"].values()) == pytest.approx(found["batch_s"])
        assert found["batch_s"] == pytest.approx(simulated["makespan_s"] / 4)
        assert sum(one["on_path_s"] for one in found["stages"]) == pytest.approx(found["terms"]["compute"])
        assert found["busy"] == pytest.approx([one["busy_share"] for one in simulated["per_worker"]])
        assert len(found["memory"]) == 2
    assert "gradient sums" in found["terms"]


def test_another_plan_stands_beside_it_term_by_term(capsys: Screen, files: list[Path]) -> None:
    found = here(capsys, "explain", files[0], "--diff", files[1], "--json").json
    assert found["diff"].pop("name") == "1.toml"
    more = {term: seconds for term, seconds in found["diff"].pop("more").items() if seconds}
    assert sum(more.values()) == pytest.approx(found["diff"].pop("more_s"))
    assert found["diff"] == here(capsys, "explain", files[1], "--json").json
    said = here(capsys, "explain", files[0], "--diff", files[1])
    assert said.code == 0
    more = (found["diff"]["batch_s"] - found["batch_s"]) * 1e3
    assert f"{more:+.4g}" in said.told
    assert "memory of 1.toml" in said.told


def test_a_page_holds_the_object_that_is_printed(capsys: Screen, files: list[Path], tmp_path: Path) -> None:
    page, search = tmp_path / "a.html", tmp_path / "s.json"
    search.write_text(json.dumps(searched()))
    said = here(capsys, "explain", files[0], "--diff", files[1], "--html", page, "--search", search, "--json")
    text = page.read_text()
    (held,) = re.findall(r'id="explained">(.*?)</script>', text)
    assert json.loads(held) == said.json
    assert len(said.json["alternatives"]) == 3
    assert "The other plan is 1.toml: 1f1b on 2 replicas x ZeRO 1." in text
    assert f"<h1>0.toml: 1f1b on {said.json['arrangement']}</h1>" in text
    refused = here(capsys, "explain", files[0], "--html", tmp_path / "none" / "a.html")
    assert refused.code == 1
    assert "No such file or directory" in refused.told


def test_what_is_no_plan_is_refused(capsys: Screen, files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("rule = 1\n")
    assert here(capsys, "explain", tmp_path / "other.toml").code == 2
    assert here(capsys, "explain", files[0], "--diff", tmp_path / "none.toml").code == 2


def test_the_best_plan_that_has_what_is_asked_for_stands_beside(capsys: Screen, files: list[Path]) -> None:
    said = here(capsys, "explain", files[0], "--job", MLP, "--why-not", "zero=2", "--json")
    assert said.code == 0, said.err
    found = said.json
    assert "--zero 2" in found["why_not"]["name"]
    assert "--rule 1f1b" in found["why_not"]["name"]
    assert "ZeRO 2" in found["why_not"]["arrangement"]
    assert sum(found["why_not"]["terms"].values()) == pytest.approx(found["why_not"]["batch_s"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--job", MLP, "--why-not", "zer=2"), "Did you mean"),
        (("--job", MLP, "--why-not", "zero=two"), "--why-not zero got 'two'"),
        (("--job", MLP, "--why-not", "zero=7"), "zero"),
        (("--why-not", "zero=2"), "Give --job"),
        (("--job", MLP), "Give --why-not"),
        (("--search", "s.json"), "Give --html"),
        (("--search", "none.json", "--html", "x.html"), "plan --search --json"),
        (("--job", MLP, "--why-not", "zero=2", "--diff", "x.toml"), "Leave one of them out"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    capsys: Screen, files: list[Path], options: tuple[str, ...], told: str
) -> None:
    said = here(capsys, "explain", files[0], *options)
    assert said.code == 2, said.told
    assert told in said.told


def test_another_signature_is_priced_on_the_plan_s_mesh(capsys: Screen, tmp_path: Path) -> None:
    plan = tmp_path / "mesh.toml"
    assert here(capsys, "plan", MLP, "--workers", 1, "--tensor-parallel", 2, "--cuts", "equal", "-o", plan).code == 0
    name = next(
        line.split("=")[0].strip().strip('"') for line in plan.read_text().splitlines() if '"tensor", "S(1)"' in line
    )
    found = here(capsys, "explain", plan, "--job", MLP, "--why-not", f"{name}=B", "--json")
    assert found.code == 0, found.err
    whole, divided = (one["memory"][0]["weights"] for one in (found.json["why_not"], found.json))
    assert whole > divided


def test_another_model_is_not_taken_for_the_plan_s(capsys: Screen, files: list[Path], tmp_path: Path) -> None:
    text = files[0].read_text()
    other = tmp_path / "other.toml"
    line = next(line for line in text.splitlines() if line.startswith("model = "))
    other.write_text(text.replace(line, f'model = "{"0" * 24}"'))
    said = here(capsys, "explain", other, "--job", MLP, "--why-not", "zero=2")
    assert said.code == 2
    assert "another model than the plan's" in said.told
