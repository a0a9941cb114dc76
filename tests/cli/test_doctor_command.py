"""`roundelay doctor` as a person runs it, on this machine, on pretended ones, and where torch cannot be loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from roundelay.cli.screen import stdout
from roundelay.doctor import HostFacts
from tests.cli.harness import ROOT, finish, here, one_screen, start
from tests.doctor.machines import WELL, spoiled

Capture = pytest.CaptureFixture[str]


def pretend(monkeypatch: pytest.MonkeyPatch, machine: HostFacts) -> None:
    """Have the command read another machine."""
    monkeypatch.setattr("roundelay.cli.doctor_command.read_machine", lambda commands_error: machine)


@pytest.mark.parametrize(
    ("machine", "code", "counts"),
    [
        (WELL, 0, "0 problems, 0 warnings"),
        (spoiled(compiler=None), 0, "0 problems, 1 warning"),
        (spoiled(fork_error="no", compiler=None, shm=None), 1, "1 problem, 2 warnings"),
    ],
    ids=["well", "a warning", "a problem"],
)
def test_only_a_problem_fails(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, machine: HostFacts, code: int, counts: str
) -> None:
    pretend(monkeypatch, machine)
    said = here(capsys, "doctor")
    assert said.code == code
    assert counts in said.out
    assert said.err == ""
    as_json = here(capsys, "doctor", "--json")
    assert as_json.code == code
    states = [check["state"] for check in as_json.json["checks"]]
    assert (as_json.json["problems"], as_json.json["warnings"]) == (states.count("problem"), states.count("warning"))
    assert f"{states.count('problem')} problem" in said.out


def test_the_table_and_the_json_agree(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, spoiled(fork_error="no", compiler=None))
    monkeypatch.setattr(stdout, "_width", 400)  # no word is broken
    told = "".join(here(capsys, "doctor").told.split())
    checks = here(capsys, "doctor", "--json").json["checks"]
    assert {"name": "processes", "state": "problem"}.items() <= checks[11].items()
    for check in checks:
        assert set(check) == {"name", "found", "state", "remedy"}
        assert f"{check['name']}{check['state']}".replace(" ", "") in told
        assert all(word in told for word in (check["found"] + check["remedy"]).split())


def test_this_machine_is_examined_with_the_settings_that_a_run_has(workplace: Path) -> None:
    said = finish(start(workplace, "doctor", "--json", ROUNDELAY_DEBUG="1"))
    assert said.code in (0, 1), said.err
    found = {check["name"]: check for check in said.json["checks"]}
    assert "ROUNDELAY_DEBUG=1: " in found["variables"]["found"]
    assert found["torch"]["state"] == "ok"
    assert list(workplace.iterdir()) == []


@pytest.fixture
def broken_torch(workplace: Path) -> str:
    """A PYTHONPATH on which torch cannot be loaded."""
    (workplace / "broken" / "torch").mkdir(parents=True)
    (workplace / "broken" / "torch" / "__init__.py").write_text("raise OSError('libtorch_cpu.so: no such file')\n")
    return os.pathsep.join([str(workplace / "broken"), str(ROOT / "src")])


def test_where_torch_cannot_be_loaded_the_doctor_works(workplace: Path, broken_torch: str) -> None:
    said = finish(start(workplace, "doctor", PYTHONPATH=broken_torch))
    assert said.code == 1
    assert said.err == ""
    assert "libtorch_cpu.so" in said.told
    as_json = finish(start(workplace, "doctor", "--json", PYTHONPATH=broken_torch)).json
    problems = {check["name"] for check in as_json["checks"] if check["state"] == "problem"}
    assert problems == {"torch", "roundelay"}


def test_where_torch_cannot_be_loaded_every_other_command_names_the_doctor(workplace: Path, broken_torch: str) -> None:
    said = finish(start(workplace, "train", "job.py", PYTHONPATH=broken_torch))
    one_screen(said, "libtorch_cpu.so: no such file", "roundelay doctor")
    assert said.code == 2
    as_json = finish(start(workplace, "train", "job.py", "--json", PYTHONPATH=broken_torch))
    assert "roundelay doctor" in as_json.json["error"]["remedy"]
    traced = finish(start(workplace, "train", "job.py", PYTHONPATH=broken_torch, ROUNDELAY_DEBUG="1"))
    assert "Traceback" in traced.err
