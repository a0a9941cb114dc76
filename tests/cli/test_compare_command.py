"""`roundelay compare` as a person types it: its files, its table, going on, and what it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from roundelay.page.png import MATPLOTLIB
from tests.cli.harness import MLP, ROOT, finish, here, job_file, one_screen, start

Capture = pytest.CaptureFixture[str]

FILES = {
    "comparison.json", "curves.csv", "curves.html", "curves.png", "cuts.toml", "plans", "runs", "table.csv", "table.md",
}  # fmt: skip
ASKED = ("--rules", "1f1b,pipeoptim:paper:mixed,async", "--seeds", 2, "--steps", 3, "--workers", 2, "--cuts", "equal")


def test_a_comparison_leaves_tables_and_curves(capsys: Capture, workplace: Path) -> None:
    said = here(capsys, "compare", MLP, *ASKED, "--time-to", "loss=100", "--out", "cmp")
    assert said.code == 0, said.err
    assert {path.name for path in Path("cmp").iterdir()} == FILES
    assert len(list(Path("cmp/runs").iterdir())) == 6
    for word in ("What is learned", "How soon: loss ≤ 100", "2 of 2", "What it takes", "pipeoptim:paper:mixed M=1"):
        assert word in said.told
    assert Path("cmp/curves.png").read_bytes().startswith(b"\x89PNG")
    page = Path("cmp/curves.html").read_text()
    assert "pipeoptim:paper:mixed" in page
    assert "http" not in page.replace("http-equiv", "")
    again = here(capsys, "compare", MLP, *ASKED, "--time-to", "loss=100", "--out", "cmp")
    assert (again.code, again.out) == (0, said.out)  # the very same numbers: nothing was run again


def test_rules_that_are_refused_for_one_reason_are_told_in_one_line(capsys: Capture, workplace: Path) -> None:
    layout = ("--layout", "zero", "--micro-batches", 2, "--stages", 2)
    said = here(capsys, "compare", MLP, *ASKED[2:6], *layout, "--cuts", "equal", "--rules", "gpipe,cdp-v1,async")
    assert said.code == 0, said.err
    told = [line for line in said.out.splitlines() if "refused" in line]
    assert len(told) == 1
    assert told[0].startswith("gpipe, async: refused: rule of the plan, with layout zero; expected cdp-v1")
    assert [line.split()[0] for line in said.out.splitlines() if line.startswith(("cdp", "gpipe", "async"))] == [
        "cdp-v1",
        "cdp-v1",
        "gpipe,",
    ]


def test_as_json_it_is_one_object(capsys: Capture, workplace: Path) -> None:
    said = here(capsys, "compare", MLP, *ASKED, "--optimizers", "sgdm,adamw", "--lr", "adamw=1e-2", "--json")
    assert said.code == 0, said.err
    rows = said.json["rows"]
    assert [row["optimizer"] for row in rows] == ["sgdm@0.05"] * 3 + ["adamw@0.01"] * 3
    assert all(row["seeds"] == 2 for row in rows)
    assert all(Path(path).is_file() for path in said.json["files"])
    assert Path("compare/mlp/table.md") in map(Path, said.json["files"])


def test_the_example_of_digits_learns_under_every_rule_given(capsys: Capture, workplace: Path) -> None:
    example = ROOT / "examples" / "digits.py"
    said = here(capsys, "compare", example, "--rules", "1f1b,async", "--seeds", 1, "--epochs", 3, "--json",
        "--micro-batches", 1, "--optimizers", "adamw", "--lr", "adamw=3e-3", "--cuts", "equal",
    )  # fmt: skip
    assert said.code == 0, said.err
    assert all(row["accuracy, best, mean"] > 0.5 for row in said.json["rows"])


def test_a_job_file_that_has_changed_is_refused(capsys: Capture, workplace: Path) -> None:
    job = job_file(workplace, "")
    asked = (*ASKED[2:], "--rules", "1f1b", "--out", "cmp")
    assert here(capsys, "compare", job, *asked).code == 0
    job.write_text(job.read_text() + "# a word more\n")
    said = here(capsys, "compare", job, *asked)
    one_screen(said, "cmp", "job job.py", "Choose another folder")
    assert said.code == 2


def test_another_deadline_goes_on_and_a_loader_that_hangs_is_refused(capsys: Capture, workplace: Path) -> None:
    asked = (*ASKED[2:], "--rules", "1f1b", "--out", "cmp")
    first = here(capsys, "compare", MLP, *asked)
    again = here(capsys, "compare", MLP, *asked, "--deadline-s", 70)
    assert (again.code, again.out) == (0, first.out)
    hangs = job_file(
        workplace, "batches=lambda e: gone.wait(20) or mlp.batches(e)", "import threading\ngone = threading.Event()"
    )
    said = here(capsys, "compare", hangs, *asked[:-1], "other", "--deadline-s", 0.5)
    one_screen(said, "the data: batches(0)", "no batch from the loader for 0.5 s", "--deadline-s")


def test_over_processes_too(workplace: Path) -> None:
    """In a process of its own, with the live line: nothing may stand in the way of forking."""
    said = finish(start(workplace, "compare", MLP, *ASKED[2:], "--rules", "1f1b,async", "--transport", "shm"))
    assert said.code == 0, said.err
    assert "async M=1" in said.out


def test_without_matplotlib_only_the_picture_is_missing(
    capsys: Capture, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, MATPLOTLIB, None)
    said = here(capsys, "compare", MLP, *ASKED, "--out", "cmp")
    assert said.code == 0, said.err
    assert "pip install matplotlib" in said.told
    assert {path.name for path in Path("cmp").iterdir()} == FILES - {"curves.png"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rules", "1f1b,none-such"], ["none-such", "pipeoptim"]),
        (["--lr", "adam"], ["--lr", "NAME=VALUE"]),
        (["--time-to", "loss=low"], ["--time-to", "NAME=NUMBER"]),
        (["--better", "score=most"], ["--better", "high or low"]),
        (["--steps", "2", "--epochs", "2"], ["--steps and --epochs"]),
    ],
)
def test_bad_options_are_one_screen(capsys: Capture, workplace: Path, options: list[str], words: list[str]) -> None:
    said = here(capsys, "compare", MLP, *options)
    one_screen(said, *words)
    assert said.code == 2
    assert not list(workplace.iterdir())
