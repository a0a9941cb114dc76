"""``roundelay explain``: terms that add up, and what another plan changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.harness import MLP, here

Screen = pytest.CaptureFixture[str]


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
    assert found["diff"] == here(capsys, "explain", files[1], "--json").json
    said = here(capsys, "explain", files[0], "--diff", files[1])
    assert said.code == 0
    more = (found["diff"]["batch_s"] - found["batch_s"]) * 1e3
    assert f"{more:+.4g}" in said.told
    assert "memory of 1.toml" in said.told


def test_what_is_no_plan_is_refused(capsys: Screen, files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("rule = 1\n")
    assert here(capsys, "explain", tmp_path / "other.toml").code == 2
    assert here(capsys, "explain", files[0], "--diff", tmp_path / "none.toml").code == 2
