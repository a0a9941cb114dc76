"""The first look passes in its rehearsal, and each of its checks fails when the product is broken."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.first_look import runner, told
from benchmarks.gpu.first_look.__main__ import main
from benchmarks.gpu.first_look.checks import BY_NAME, CHECKS
from benchmarks.gpu.first_look.runner import judged
from benchmarks.gpu.first_look.watch import shares

pytestmark = pytest.mark.filterwarnings("ignore")

ONLY_ON_CUDA = ("out of memory", "gpt2 124M", "gpt2 compiled")
"""Skipped in a rehearsal; the code of the second and third is that of `gpt2 small`."""

FAULTS = {
    "versions": "ill",
    "tests/gpu": "unequal",
    "one worker = plain": "weights",
    "verify rules": "unequal",
    "verify nets": "raises",
    "verify options": "unequal",
    "verify zoo": "raises",
    "programs 1 of 3": "unequal",
    "programs 2 of 3": "unequal",
    "programs 3 of 3": "unequal",
    "twice": "weights",
    "wrong label": "mute",
    "ctrl-c": "deaf",
    "launching": "raises",
    "host reads": "reads",
    "memory over runs": "leaks",
    "gpt2 small": "slow",
    "linear layers": "slow",
    "layout single": "leaks",
    "overlap": "one worker",
    "checkpoint stall": "no checkpoint",
}


def look(tmp_path: Path, name: str, *words: str) -> tuple[int, dict[str, Any]]:
    """(exit code, the row) of one check's rehearsal."""
    code = main(["--devices", "cpu", "--only", f"^{name}$", "--out", str(tmp_path), *words])
    (row,) = json.loads((tmp_path / "first_look.json").read_text())["checks"]
    return code, row


@pytest.mark.parametrize("name", [check.name for check in CHECKS])
def test_it_holds_in_a_rehearsal(name: str, tmp_path: Path) -> None:
    code, row = look(tmp_path, name)
    expected = "skipped" if name in ONLY_ON_CUDA else "holds"
    assert (code, row["verdict"]) == (0, expected), row
    assert all(isinstance(figure["value"], int | float) and figure["unit"] for figure in row["figures"])
    assert not [case for case in row["cases"] if case["state"] in ("odd", "skipped")]


def test_every_check_has_a_fault() -> None:
    assert {check.name for check in CHECKS} == {*FAULTS, *ONLY_ON_CUDA}


@pytest.mark.parametrize(("name", "fault"), FAULTS.items(), ids=FAULTS.keys())
def test_it_fails_when_the_product_is_broken(name: str, fault: str, tmp_path: Path) -> None:
    code, row = look(tmp_path, name, "--plant", fault)
    assert (code, row["verdict"]) == (1, "FAILS")
    assert row["fails"] or any(case["state"] == "odd" for case in row["cases"])


def test_a_check_that_hangs_is_cut_off_and_keeps_what_it_told(tmp_path: Path) -> None:
    code, row = look(tmp_path, "verify rules", "--plant", "stuck", "--limit", "3")
    assert (code, row["verdict"], row["code"]) == (1, "FAILS", None)
    assert "cut off after 3 s in: 1f1b" in row["words"]
    assert "0 of 4 equal" in row["words"]


def test_checks_without_time_are_skipped(tmp_path: Path) -> None:
    code, row = look(tmp_path, "twice", "--minutes", "0.01")
    assert (code, row["verdict"], row["words"]) == (0, "skipped", "no time was left")


def test_without_a_device_everything_fails(tmp_path: Path) -> None:
    code = main(["--devices", "cuda", "--only", "^twice$", "--out", str(tmp_path)])
    assert code == 1
    assert "torch sees no CUDA device" in (tmp_path / "first_look.log").read_text()


def test_on_many_cores_those_that_measure_nothing_run_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MANY_CORES", 1)
    monkeypatch.setattr(runner, "CORES_EACH", 1)
    monkeypatch.setattr(runner, "MOST_AT_ONCE", 2)
    checks = [BY_NAME[name] for name in ("gpt2 compiled", "out of memory", "verify rules")]
    setting = runner.Setting("cpu", True, tmp_path, time.monotonic() + 100)
    found = {result.name: (result.verdict, result.code) for result in runner.run_all(setting, checks)}
    assert list(found)[-1] == "gpt2 compiled"  # measures, so alone and last
    assert found == {
        "out of memory": ("skipped", 0),
        "verify rules": ("holds", 0),
        "gpt2 compiled": ("skipped", 0),
    }


def test_checks_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "no such check"]) == 2
    assert main(["--list", "--only", "gpt2"]) == 0
    assert capsys.readouterr().out.split("\n")[:-1] == ["gpt2 small", "gpt2 124M", "gpt2 compiled"]


def test_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    def verdict(code: int | None, *, out_of_time: bool = False) -> str:
        return judged("one", 1.0, code, capsys.readouterr().out, out_of_time=out_of_time).verdict

    assert verdict(0) == "skipped"  # it has told nothing
    told.figure("speed", 1.0, "samples/s")
    assert verdict(0) == "figure"
    told.figure("speed", 1.0, "samples/s")
    told.holds("so it is")
    assert verdict(0) == "holds"
    told.holds("so it is")
    told.fails("so it is not")
    assert verdict(0) == "FAILS"
    told.holds("so it is")
    assert verdict(-11) == "FAILS"
    assert verdict(None) == "FAILS"
    told.holds("so it is")
    assert verdict(None, out_of_time=True) == "skipped"
    told.fails("so it is not")
    assert verdict(None, out_of_time=True) == "FAILS"
    told.cases(2)
    told.case("first", "skipped", "torchvision is not here")
    assert verdict(0) == "skipped"
    told.case("first", "equal")
    told.case("second", "odd", "DIFFERENT")
    assert verdict(0) == "FAILS"


def test_shares_of_time() -> None:
    spans = [(0.0, 4.0, 1), (1.0, 2.0, 1), (3.0, 5.0, 2), (9.0, 10.0, 2)]
    idle, one, several = shares(spans)
    assert (idle, one, several) == (0.4, 0.5, 0.1)
