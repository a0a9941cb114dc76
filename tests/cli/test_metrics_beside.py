"""Metrics beside the loss, on the command line: in the files of the run, in the summary, on the screen, as curves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from roundelay.observe.metrics_file import read_metrics
from tests.cli.harness import here, job_file
from tests.observe.event_files import points

LOSS = """
def loss(outputs, batch):
    right = (outputs.argmax(-1) == batch["y"]).float()
    return {"loss": mlp.loss(outputs, batch), "right [%]": 100 * right.mean(), "never": float("nan")}
"""


def test_a_run_tells_the_metrics_beside_the_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    path = job_file(tmp_path, "loss=loss", LOSS)
    common = ["train", path, "--steps", "4", "--out", "run", "--no-baseline", "--tensorboard"]
    assert here(capsys, *common).code == 0
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    made = [line["metrics"]["right [%]"] for line in lines]
    assert len(made) == 4
    assert all(0 <= value <= 100 for value in made)
    assert all(line["metrics"]["never"] is None for line in lines)
    curves = points(tmp_path / "run" / "tensorboard")
    assert curves["training/right [%]"] == [(n, pytest.approx(value)) for n, value in enumerate(made)]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics_first"]["right [%]"] == made[0]
    assert summary["metrics_last"] == {"right [%]": made[-1], "never": None}
    assert here(capsys, "report", "run").code == 0
    text = (tmp_path / "run" / "report.html").read_text()
    assert "<h3>right [%]</h3>" in text
    assert ">reader</text>" in text


def test_the_screen_shows_first_and_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job_file(tmp_path, "loss=loss", LOSS)
    said = here(capsys, "train", path, "--steps", "2", "--out", tmp_path / "run", "--no-baseline")
    first, last = (line["metrics"]["right [%]"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert f"right [%] {first:.4f} -> {last:.4f}, never" in said.told


def test_without_metrics_a_line_has_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = job_file(tmp_path, "")
    assert here(capsys, "train", path, "--steps", "1", "--out", tmp_path / "run", "--no-baseline").code == 0
    assert all("metrics" not in line for line in read_metrics(tmp_path / "run" / "metrics.jsonl"))
