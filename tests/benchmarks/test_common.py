"""A benchmark refuses a machine that others use, unless it is told not to; then its table says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import common
from benchmarks.common import Asked, Used, alternate, asked, report


def ask(patch: pytest.MonkeyPatch, others: float, *words: str) -> Asked:
    """A command line, on a machine that others use so much."""
    patch.setattr(common, "LOOK_S", 0.0)
    patch.setattr(Used, "others", lambda used: others)
    patch.setattr(sys, "argv", ["run.py", *words])
    return asked("A benchmark.")


def test_a_busy_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="others use 30% of it"):
        ask(monkeypatch, 0.3)
    assert ask(monkeypatch, 0.05).others == 0.05


@pytest.mark.parametrize(("others", "told"), [(0.3, True), (0.05, False)])
def test_a_table_of_a_busy_machine_says_so(
    others: float, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    what = ask(monkeypatch, others, "--anyway", "--short", "--out", str(tmp_path / "n.json"))
    report(what, "a table", {"ms": [1.0]})
    said = capsys.readouterr().out
    assert ("indicative only" in said) is told
    assert f"others used {others:.0%} of the cores at the start" in said
    assert "short form, 5 rounds" in said
    assert json.loads((tmp_path / "n.json").read_text())["ms"] == [1.0]


def test_too_few_rounds_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ask(monkeypatch, 0.0, "--repeats", "4")
    assert "at least 5" in capsys.readouterr().err


def test_work_of_others_is_seen() -> None:
    """The cores were busy for six seconds of ten, one of them ours."""
    now = Used.now()
    before = Used(now.total_s - 10.0, now.busy_s - 6.0, now.own_s - 1.0)
    assert before.others() == pytest.approx(0.5, abs=0.05)


def test_candidates_take_turns_and_the_first_round_is_dropped() -> None:
    order: list[str] = []

    def candidate(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = alternate({name: lambda name=name: candidate(name) for name in "abc"}, 2)  # type: ignore[misc]
    assert "".join(order) == "abcbcacab"
    assert found == {"a": [6.0, 8.0], "b": [4.0, 9.0], "c": [5.0, 7.0]}
