"""Options of ``roundelay host``: its help lists those that act, and all others are refused by name."""

from __future__ import annotations

import re

import pytest

from roundelay.planner.plan_options import descriptions, flag
from tests.cli.harness import MLP, here, one_screen

#: a choice, and a value that it may have
ACT = {
    "micro_batches": 2,
    "recompute": "all",
    "precision": "bf16",
    "loss_scale": 1024,
    "clip": "stage:1",
    "ema": 0.9,
    "deterministic": None,
    "cuts": "equal",
    "threads": 1,
    "deadline_s": 60,
    "memory_limit": "1GiB",
    "rule": "1f1b",
    "predictor": "paper",
    "backward": "stash",
}
REFUSED = {
    "workers": 2,
    "layout": "dp",
    "stages": 2,
    "data_parallel": 2,
    "tensor_parallel": 2,
    "signatures": "mesh.toml",
    "zero": 1,
    "hybrid": "2x2",
    "cluster": "cluster.toml",
    "compile": None,
    "transport": "shm",
    "devices": "cuda",
}


def typed(name: str, value: object) -> list[object]:
    return [flag(name)] if value is None else [flag(name), value]


def test_its_help_lists_the_choices_that_act(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    listed = set(re.findall(r"^│ [* ]+(--[a-z-]+)", here(capsys, "host", "--help").out, re.MULTILINE))
    assert listed & set(map(flag, descriptions())) == set(map(flag, ACT))
    assert descriptions().keys() == ACT.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_a_choice_that_means_nothing_here_is_refused_by_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, "host", MLP, "--peers", 2, *typed(name, REFUSED[name]))
    one_screen(said, f"{flag(name)} with `roundelay host`")


@pytest.mark.parametrize("name", ACT)
def test_a_choice_that_is_listed_is_not_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = here(capsys, "host", MLP, "--peers", 2, *typed(name, ACT[name]), "--listen", "nowhere")
    one_screen(said, "--listen", "'nowhere'")


@pytest.mark.parametrize("words", ["--layout", "launcher", "the job registers", "--workers"])
def test_its_help_says_nothing_of_what_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words not in here(capsys, "host", "--help").told


def test_the_number_of_machines_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    one_screen(here(capsys, "host", MLP), "Missing option '--peers'")
