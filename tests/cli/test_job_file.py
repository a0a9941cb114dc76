"""A job file as a module: by which name, with which arguments, and wherever it goes."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from roundelay.cli.changed_by_job import PathResolver
from roundelay.errors import JobError
from roundelay.planning.job_file import job_maker
from tests.cli.harness import finish, here, job_file, start

Capture = pytest.CaptureFixture[str]
SHORT = ("--workers", 2, "--rule", "1f1b", "--steps", 3, "--micro-batches", 1)

SENT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import roundelay


class Points(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, i):
        return torch.full((6,), i / 32), i % 3


def job(seed):
    loader = DataLoader(
        Points(), batch_size=8, num_workers=1, persistent_workers=True, multiprocessing_context="HOW"
    )
    return roundelay.Job(
        model=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
        loss=lambda outputs, batch: nn.functional.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: loader,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
"""


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a job file leaves in this process goes with the test."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in {"plainly_named", "beside", "job"} & (set(sys.modules) - before):
        del sys.modules[name]


@pytest.mark.parametrize(("how", "transport"), [("forkserver", "memory"), ("spawn", "shm")])
def test_a_data_set_of_the_job_file_is_found_by_processes_that_import_it(
    workplace: Path, how: str, transport: str
) -> None:
    job = workplace / "sent.py"
    job.write_text(SENT.replace("HOW", how))
    said = finish(start(workplace, "train", job, *SHORT, "--transport", transport, "--no-baseline", "--json"), 90.0)
    assert (said.code, said.err) == (0, "")  # nor does multiprocessing tell of anything that is left
    assert said.json["steps"] == 3


def test_where_they_cannot_it_is_told_why(workplace: Path) -> None:
    job = workplace / "sent.v2.py"
    job.write_text(SENT.replace("HOW", "spawn"))
    said = finish(start(workplace, "train", job, *SHORT, "--no-baseline"), 90.0)
    assert said.code == 1
    words = "the file's name must have no dot"
    assert "".join(words.split()) in "".join(said.told.split())


def test_a_job_file_is_a_module_of_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "plainly_named.py"
    path.write_text(SENT)
    job_maker(path)
    first = sys.modules["plainly_named"].Points
    assert pickle.loads(pickle.dumps(first)) is first
    job_maker(path)
    assert sys.modules["plainly_named"].Points is not first


@pytest.mark.parametrize("name", ["json", "sent.v2", "beside"])
def test_a_name_that_is_another_s_or_none_s_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "__init__.py").touch()  # which an import finds first
    path = tmp_path / f"{name}.py"
    path.write_text(SENT)
    job_maker(path)
    assert sys.modules[f"roundelay_job_{name}"].Points
    assert sys.modules["json"] is json
    assert "beside" not in sys.modules


PARSING = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--rate", type=float, REQUIRED)
given = parser.parse_args()
"""


def test_a_job_file_that_parses_arguments_sees_none_of_the_command_s(capsys: Capture, workplace: Path) -> None:
    before = list(sys.argv)
    job = job_file(workplace, "steps=given.steps", PARSING.replace("REQUIRED", "default=0.1"))
    said = finish(start(workplace, "train", job, *SHORT[:-4], "--no-baseline", "--json"))
    assert said.json["steps"] == 2
    assert here(capsys, "plan", job, *SHORT[:2], "-o", workplace / "plan.toml").code == 0
    assert sys.argv == before


def test_an_argument_that_it_needs_is_told(capsys: Capture, workplace: Path) -> None:
    job = job_file(workplace, "", PARSING.replace("REQUIRED", "required=True"))
    said = finish(start(workplace, "train", job, *SHORT, "--no-baseline"))
    assert said.code == 2
    words = "Give every argument of a parser a default, or use environment variables"
    assert "".join(words.split()) in "".join(said.told.split())
    assert "required: --rate" in said.err
    with pytest.raises(JobError, match="only its path"):
        job_maker(job)


def elsewhere(workplace: Path) -> str:
    """A folder that a job goes to, as text for its file."""
    (workplace / "elsewhere").mkdir()
    return repr(str(workplace / "elsewhere"))


def well(folder: Path, *args: object) -> None:
    """Run a command that ends well."""
    said = finish(start(folder, *args))
    assert said.code == 0, said.err


def test_paths_of_the_command_stay_though_the_job_file_goes_elsewhere(workplace: Path) -> None:
    job = job_file(workplace, "", f"import os\nos.chdir({elsewhere(workplace)})\n").name
    well(workplace, "plan", job, *SHORT[:4], "-o", "plan.toml")
    assert (workplace / "plan.toml").is_file()
    well(workplace, "train", job, "--plan", "plan.toml", "--steps", 2, "--no-baseline", "--out", "first")
    assert (workplace / "first" / "summary.json").is_file()
    well(workplace, "verify", job, "--plan", "plan.toml", "--from", "first", "--steps", 2)
    assert not list((workplace / "elsewhere").iterdir())


def test_so_it_is_when_it_goes_there_to_make_the_job(workplace: Path) -> None:
    job = job_file(workplace, f"steps=os.chdir({elsewhere(workplace)})", "import os\n").name
    well(workplace, "train", job, *SHORT, "--no-baseline")
    assert (workplace / "runs" / "latest" / "summary.json").is_file()
    well(workplace, "compare", job, "--rules", "1f1b", "--seeds", 1, "--workers", 2, "--steps", 2)
    assert (workplace / "compare" / "job" / "table.csv").is_file()
    assert not list((workplace / "elsewhere").iterdir())


def test_a_path_is_as_it_was_given_where_nobody_goes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    places = PathResolver()
    assert places.of(Path("a")) == Path("a")
    assert places.of(None) is None
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    assert places.of(Path("a")) == tmp_path / "a"
    assert places.of(Path("/a")) == Path("/a")
