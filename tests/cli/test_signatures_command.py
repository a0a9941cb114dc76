"""``roundelay plan --search --space all``: as a person types it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.cli.harness import MLP, here

Screen = pytest.CaptureFixture[str]
CLUSTER = """
flops_per_s = 1e12
[mesh]
data = { size = 2, latency_s = 1e-6, bytes_per_s = 1e10 }
tensor = { size = 2, latency_s = 1e-6, bytes_per_s = 1e11 }
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def test_signatures_of_every_operation_are_found_and_priced(capsys: Screen, cluster: Path) -> None:
    said = here(capsys, "plan", MLP, "--search", "--space", "all", "--cluster", cluster, "--json")
    assert said.code == 0, said.err
    found = said.json
    assert found["gap"] == 0.0
    assert found["batch_s"] == pytest.approx(sum(found["terms"].values()))
    assert int(found["space"]) > 1000
    assert found["parameters"]
    shown = here(capsys, "plan", MLP, "--search", "--space", "all", "--cluster", cluster)
    assert "gap 0.00%" in shown.told


def test_a_large_mesh_of_powers_of_two_is_cut_as_operations_want_it(capsys: Screen, cluster: Path) -> None:
    asked = "plan", MLP, "--search", "--space", "all", "--cluster", cluster
    cluster.write_text(CLUSTER.replace("data = { size = 2", "data = { size = 16"))
    shown = here(capsys, *asked)
    assert shown.code == 0, shown.err
    assert "axes cut as operations want it" in shown.told
    assert "whole axes" in shown.told
    found = here(capsys, *asked, "--json").json
    assert 0 <= found["gap"] < 0.1
    assert math.prod(found["mesh"].values()) == 32
    assert found["bound_s"] <= found["batch_s"]
    cluster.write_text(CLUSTER.replace("data = { size = 2", "data = { size = 6"))
    assert here(capsys, *asked, "--json").json["space_of"] == "whole axes"


def test_slower_links_take_longer(capsys: Screen, cluster: Path) -> None:
    """Where computing takes so long that it is divided."""
    asked = "plan", MLP, "--search", "--space", "all", "--cluster", cluster, "--json"
    cluster.write_text(CLUSTER.replace("1e12", "1e7"))
    fast = here(capsys, *asked).json
    cluster.write_text(cluster.read_text().replace("1e-6", "1e-4"))
    slow = here(capsys, *asked).json
    assert slow["batch_s"] > fast["batch_s"]
    assert fast["boxings"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the cluster file"),
        ("[mesh]", "no axis"),
        ("mesh = 3", "the cluster file"),
        (CLUSTER.replace("size = 2", "size = 1"), ">= 2"),
        (CLUSTER.replace("latency_s = 1e-6", "latency_s = nan"), "the cluster file"),
        (CLUSTER.replace("flops_per_s", "colour"), "unknown field `colour`"),
        (CLUSTER.replace("[mesh]", "[mesh"), "the cluster file"),
    ],
)
def test_a_cluster_file_that_makes_no_sense_is_refused(capsys: Screen, cluster: Path, text: str, told: str) -> None:
    cluster.write_text(text)
    said = here(capsys, "plan", MLP, "--search", "--space", "all", "--cluster", cluster)
    assert said.code == 2, said.told
    assert told in said.told


@pytest.mark.parametrize(
    "options",
    [
        ("--search", "--space", "all"),
        ("--search", "--cluster", "c.toml"),
        ("--space", "all", "--cluster", "c.toml"),
        ("--search", "--space", "some"),
        ("--search", "--space", "all", "--cluster", "c.toml", "--finals", "2"),
        ("--search", "--space", "all", "--cluster", "c.toml", "-o", "p.toml"),
        ("--search", "--space", "all", "--cluster", "none.toml"),
    ],
)
def test_options_that_do_not_go_together_are_refused(capsys: Screen, options: tuple[str, ...]) -> None:
    assert here(capsys, "plan", MLP, *options).code == 2


def test_choices_of_plans_that_run_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mesh = tmp_path / "mesh.toml"
    mesh.write_text("[mesh]\na = { size = 2, latency_s = 1e-6, bytes_per_s = 1e9 }\n")
    said = here(capsys, "plan", MLP, "--search", "--space", "all", "--cluster", mesh, "--zero", 3, "--workers", 4)
    assert said.code == 2
    assert "--workers with --space all" in said.told
