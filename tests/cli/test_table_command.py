"""`roundelay table` as a person types it: AutoDDL's figures, a page of them, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.harness import here, one_screen

Capture = pytest.CaptureFixture[str]


def test_a_figure_is_a_table_and_as_json_its_rows(capsys: Capture) -> None:
    said = here(capsys, "table", "autoddl")
    assert said.code == 0
    assert "64 4 (4,8,2) (4,4,4) 2 2.25 3.75" in said.told
    told = here(capsys, "table", "autoddl", "--figure", 3, "--json").json
    assert (told["table"], told["figure"], len(told["rows"])) == ("autoddl", 3, 5)
    assert told["rows"][0] == {
        "nodes": 64, "p0": 4, "qkv": "(4,8,2)", "projection": "(4,4,4)", "found": 2, "next_best": 2.25, "megatron": 3.75
    }  # fmt: skip


def test_what_a_model_does_not_have_is_null_in_json_and_a_dash_in_the_table(capsys: Capture) -> None:
    first = here(capsys, "table", "autoddl", "--figure", 9, "--json").json["rows"][0]
    assert (first["model"], first["summa_ms"]) == ("VGG-13", None)
    assert "VGG-13 16 0 117.4 - 9.514 9.149 3.834 10 " in here(capsys, "table", "autoddl", "--figure", 9).told


def test_figure_8_is_drawn(capsys: Capture, tmp_path: Path) -> None:
    assert here(capsys, "table", "autoddl", "--figure", 8, "--html", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert page.count('data-name="Metropolis Hastings, low"') == page.count('data-name="random"') == 6
    assert "evaluations / 68,574,961 strategies" in page


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("cdp", "--figure", 3), ("options of the table cdp", "got --figure", "expected --workers, --run")),
        (
            ("autoddl", "--workers", 3, "--no-run"),
            ("options of the table autoddl", "got --workers, --run", "expected --figure, --html"),
        ),
        (("autoddl", "--figure", 5), ("AutoDDL's figure", "got 5", "expected 3, 4, 7, 8, 9")),
        (("flexflow",), ("the table", "got 'flexflow'", "expected cdp or autoddl")),
    ],
)
def test_what_is_no_table_is_refused(capsys: Capture, args: tuple[object, ...], words: tuple[str, ...]) -> None:
    said = here(capsys, "table", *args)
    assert said.code == 2
    one_screen(said, *words)
