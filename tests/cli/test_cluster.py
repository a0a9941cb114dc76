"""``roundelay plan --cluster FILE``: plans for unequal workers, as a person types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from roundelay.finals import search_plan
from roundelay.ir.plan import Plan
from tests.cli.harness import MLP, here
from tests.planner.profiles import calibrated

Screen = pytest.CaptureFixture[str]
CLUSTER = """
[[workers]]
speed = 0.2
[[workers]]
"""
ONE = ("--rule", "1f1b", "--micro-batches", 2, "--devices", "cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the tests' own: what one has measured the next has too."""
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path_factory.getbasetemp() / "profiles-of-clusters"))
    monkeypatch.setattr(search_plan, "calibrate", calibrated)


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def test_a_plan_is_made_for_the_workers_of_a_file(capsys: Screen, cluster: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    said = here(capsys, "plan", MLP, *ONE, "--cluster", cluster, "-o", file)
    assert said.code == 0, said.err
    plan = Plan.parse(file.read_text())
    assert [(worker.name, worker.speed) for worker in plan.workers] == [("w0", 0.2), ("w1", 1.0)]
    assert "w0 (speed 0.2): up to" in file.read_text()
    explained = here(capsys, "explain", file)
    assert "w0 (speed 0.2)" in explained.told
    assert [one["speed"] for one in here(capsys, "explain", file, "--json").json["workers"]] == [0.2, 1.0]
    trained = here(capsys, "train", MLP, "--plan", file, "--steps", 2, "--check", "off", "--out", tmp_path / "run")
    assert trained.code == 0, trained.err
    page = tmp_path / "page.html"
    assert here(capsys, "explain", file, "--html", page).code == 0
    assert "0.2, " in page.read_text() or ">0.2<" in page.read_text()


def test_a_search_is_for_the_workers_of_a_file_and_can_be_priced_again(
    capsys: Screen, cluster: Path, tmp_path: Path
) -> None:
    file = tmp_path / "plan.toml"
    asked = "plan", MLP, "--search", "--cluster", cluster, *ONE, "--transport", "shm", "--zero", 1
    said = here(capsys, *asked, "-o", file, "--json")
    assert said.code == 0, said.err
    assert said.json["finals"] == []
    assert said.json["chosen"]["choices"]["cluster"] == str(cluster)
    plan = Plan.parse(file.read_text())
    assert [(worker.name, worker.speed) for worker in plan.workers] == [("w0", 0.2), ("w1", 1.0)]
    other = here(capsys, "explain", file, "--job", MLP, "--why-not", "workers=2", "--json")
    assert other.code == 0, other.err
    assert sorted(one["speed"] for one in other.json["why_not"]["workers"]) == [0.2, 1.0]


@pytest.mark.parametrize(
    ("options", "text", "told"),
    [
        ((), "[[workers]]\nsped = 1", "unknown field `sped`"),
        ((), "", "no axis and no worker"),
        ((), None, "the cluster file"),
        (("--workers", 3), CLUSTER, "at most 2, as the cluster file has"),
        (("--search", "--finals", 2), CLUSTER, "--finals with --cluster"),
        (("--search",), CLUSTER + 'memory = "1KiB"', "Smallest fix:"),
        ((), 2 * '[[workers]]\nmemory = "1KiB"\n', "by the cluster file"),
        (("--search", "--space", "all"), CLUSTER, "no mesh"),
    ],
)
def test_what_cannot_be_is_refused(
    capsys: Screen, cluster: Path, options: tuple[object, ...], text: str | None, told: str
) -> None:
    cluster.unlink() if text is None else cluster.write_text(text.replace("speed = 0.2", 'memory = "1KiB"'))
    said = here(capsys, "plan", MLP, *(ONE if "all" not in options else ()), *options, "--cluster", cluster)
    assert said.code == 2, said.told
    assert told in said.told
    assert "Traceback" not in said.err


def test_a_plan_that_is_read_has_workers_of_its_own(capsys: Screen, cluster: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    assert here(capsys, "plan", MLP, *ONE, "--cluster", cluster, "-o", file).code == 0
    said = here(capsys, "train", MLP, "--plan", file, "--cluster", cluster, "--steps", 1)
    assert said.code == 2
    assert "workers of its own" in said.told
