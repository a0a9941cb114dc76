"""`roundelay report` draws a real run, and says in one screen what is wrong with its input."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.harness import MLP, here, one_screen

Capture = pytest.CaptureFixture[str]


def test_report_draws_a_run_into_its_folder_or_where_it_is_told(capsys: Capture, workplace: Path) -> None:
    assert here(capsys, "train", MLP, "--workers", 2, "--no-baseline", "--steps", 3, "--out", "run").code == 0
    said = here(capsys, "report", "run")
    assert (said.code, said.out) == (0, "")
    assert "run/report.html" in said.told
    text = Path("run/report.html").read_text()
    assert "As it ran" in text
    assert "finished" in text
    again = here(capsys, "report", "run", "-o", "mine.html", "--json")
    assert again.json == {"path": "mine.html", "bytes": len(text.encode())}
    assert Path("mine.html").read_text() == text


def test_report_of_what_is_no_run_is_one_screen(capsys: Capture, workplace: Path) -> None:
    one_screen(here(capsys, "report", "nowhere"), "nowhere", "no such folder")
    Path("empty").mkdir()
    one_screen(here(capsys, "report", "empty"), "no plan.toml")
    assert not Path("empty/report.html").exists()
