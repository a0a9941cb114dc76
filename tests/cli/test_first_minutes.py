"""What a person meets in the first minutes: the version, the bare command, a first job that is too small or wrong."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from subprocess import run

import pytest
import torch

import roundelay
from roundelay.cli.doctor_command import version_line
from tests.cli.harness import Said, environment, here, job_file, one_screen

Capture = pytest.CaptureFixture[str]
TINY = "model=nn.Linear(6, 3)"


def without_torch(*args: str) -> Said:
    """Run a command in a process of its own in which torch must not be loaded."""
    code = (
        "import sys; from roundelay.cli import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    done = run([sys.executable, "-c", code, *args], env=environment(), capture_output=True, text=True, timeout=60)
    return Said(done.returncode, done.stdout, done.stderr)


def test_the_version_is_told_without_torch() -> None:
    said = without_torch("--version")
    assert (said.code, said.err) == (0, "")
    installed = metadata.version("torch")  # from PyPI without the part behind the plus
    assert said.out == f"roundelay {roundelay.__version__} (torch {installed})\n"
    assert torch.__version__.startswith(installed)


def test_the_version_is_told_beside_a_command_too_and_where_torch_is_missing(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = here(capsys, "--version", "train")
    assert (said.code, said.out) == (0, version_line() + "\n")

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert version_line() == f"roundelay {roundelay.__version__} (torch is not installed)"


def test_the_bare_command_shows_the_help_and_is_no_error(capsys: Capture) -> None:
    bare, asked = here(capsys), here(capsys, "--help")
    assert (bare.code, bare.err, asked.code) == (0, "", 0)
    assert bare.told == asked.told
    for word in ("Usage", "train", "plan", "simulate", "verify", "report", "compare", "doctor", "--version"):
        assert word in bare.told


def test_a_model_of_one_operation_is_trained_by_one_worker_and_a_line_says_why(
    capsys: Capture, workplace: Path
) -> None:
    job = job_file(workplace, TINY)
    said = here(capsys, "train", job, "--no-baseline", "--steps", 2, "--out", "run")
    assert said.code == 0, said.err
    why = "1 worker, not 2: the model can be cut into 1 stage at most"
    assert f"{why}." in said.told
    assert "in 2 updates" in said.out
    assert "1f1b on 1 worker over memory" in said.out
    assert f"# {why}\n" in (workplace / "run" / "plan.toml").read_text()
    assert here(capsys, "verify", job, "--steps", 2).code == 0
    quiet = here(capsys, "train", job, "--no-baseline", "--steps", 2, "--json")
    assert (quiet.code, quiet.err, quiet.json["workers"]) == (0, "", 1)


SHORT = {
    "more workers than stages": ((), 4, ("for 4 workers", "cut into 3 stages at most", "Give --workers 3")),
    "two stages for each worker": (
        ("--rule", "zb-v"),
        2,
        ("a cut into 4 stages, for 2 workers", "3 stages at most", "2 for each worker by zb-v", "Give --workers 1"),
    ),
}


@pytest.mark.parametrize("case", SHORT)
def test_what_can_be_typed_instead_is_said_where_a_model_has_too_few_operations(
    capsys: Capture, workplace: Path, case: str
) -> None:
    rule, workers, words = SHORT[case]
    job = job_file(workplace, "model=nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))")
    said = here(capsys, "plan", job, "--workers", workers, *rule)
    one_screen(said, *words)
    asked = words[-1].removeprefix("Give ").split()
    assert here(capsys, "plan", job, *asked, *rule, "-o", "plan.toml").code == 0, "what was advised does not work"


def test_a_model_without_a_stage_for_half_a_worker_is_told_another_rule(capsys: Capture, workplace: Path) -> None:
    job = job_file(workplace, TINY)
    one_screen(here(capsys, "plan", job, "--rule", "zb-v"), "cut into 1 stage at most", "--rule 1f1b")
    assert here(capsys, "plan", job, "--rule", "1f1b").code == 0


def test_where_there_is_no_job_one_is_shown_that_is_a_job(capsys: Capture, workplace: Path) -> None:
    said = here(capsys, "train", "nowhere.py", "--json")
    lines = said.json["error"]["remedy"].splitlines()
    assert len(lines) <= 5
    assert all(len(line) <= 66 for line in lines), "it is broken on a screen of 80 columns"
    scope = {"roundelay": roundelay}
    exec("\n".join(lines[1:-1]), scope)
    assert isinstance(scope["job"](0), roundelay.Job)  # type: ignore[operator]


def test_code_of_the_person_that_raises_is_told_without_a_lesson(capsys: Capture, workplace: Path) -> None:
    (workplace / "bad.py").write_text("x = 1 / 0\n")
    said = here(capsys, "train", "bad.py", "--json")
    assert said.json["error"]["remedy"] == "Correct the file; ROUNDELAY_DEBUG=1 shows the traceback."
