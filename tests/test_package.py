"""The package as it is built, installed and met: what the two distributions hold, and that what is installed runs.

The source distribution is built from a copy of the tree, the wheel from the unpacked source distribution, and the wheel
is installed beside, where no file of the tree is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

import roundelay

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", "requirements")
FILES = ("README.md", "LICENSE", "CHANGELOG.md", "Makefile", "MANIFEST.in", "pyproject.toml")
MADE = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.py[cod]")
NAME = f"roundelay-{roundelay.__version__}"

JOB = """
import torch, roundelay


def job(seed):
    data = [(torch.randn(4, 3), torch.randn(4, 2)) for _ in range(2)]
    return roundelay.Job(
        model=torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)),
        loss=lambda outputs, batch: torch.nn.functional.mse_loss(outputs, batch[1]),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )
"""


def python(folder: Path, *args: str, **env: str) -> str:
    """What an interpreter prints that knows nothing of this tree."""
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *args], cwd=folder, env=known | env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, folder: Path, out: Path) -> Path:
    """A distribution of the tree in a folder, made by the backend that ``pyproject.toml`` names."""
    python(folder, "-c", f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})")
    (made,) = out.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return made


@dataclass(frozen=True)
class Built:
    """The tree's files, those of the source distribution and of the wheel, and what the wheel says of itself."""

    tree: set[str]
    source: set[str]
    wheel: Path
    names: set[str]
    says: Message


def files(folder: Path) -> set[str]:
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built once for all tests."""
    folder = tmp_path_factory.mktemp("package")
    copy = folder / "copy"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=MADE)
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    tree = files(copy)
    with tarfile.open(build("sdist", copy, folder)) as archive:
        archive.extractall(folder, filter="data")
    source = files(folder / NAME)
    wheel = build("wheel", folder / NAME, folder)
    with ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        says = Parser().parsestr(archive.read(metadata).decode())
        return Built(tree, source, wheel, set(archive.namelist()), says)


def test_the_source_distribution_holds_the_whole_tree(built: Built) -> None:
    assert built.tree - built.source == set()
    beyond = {name for name in built.source - built.tree if ".egg-info/" not in name}
    assert beyond == {"PKG-INFO", "setup.cfg"}


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    package = {name.removeprefix("src/") for name in built.tree if name.startswith("src/")}
    about = {name for name in built.names if name.startswith(f"{NAME}.dist-info/")}
    assert "roundelay/py.typed" in package
    assert built.names - about == package
    assert f"{NAME}.dist-info/licenses/LICENSE" in about


def test_the_package_says_what_it_is(built: Built) -> None:
    says = built.says
    assert (says["Version"], says["License-Expression"]) == (roundelay.__version__, "Apache-2.0")
    assert says["Description-Content-Type"] == "text/markdown"
    assert says.get_payload() == (ROOT / "README.md").read_text(encoding="utf-8")
    kinds = says.get_all("Classifier", [])
    assert {"Operating System :: POSIX :: Linux", "Programming Language :: Python :: 3.11"} <= set(kinds)
    assert not [kind for kind in kinds if kind.startswith("License")], "the licence is an expression"
    assert says["Keywords"]
    assert says["Summary"]


def test_an_installed_wheel_tells_its_version_and_trains(built: Built, tmp_path: Path) -> None:
    place = tmp_path / "installed"
    quiet = ("-m", "pip", "-qq", "--disable-pip-version-check", "install", "--no-deps", "--no-index", "--target")
    python(tmp_path, *quiet, str(place), str(built.wheel))
    found = python(tmp_path, "-c", "import roundelay; print(roundelay.__file__)", PYTHONPATH=str(place))
    assert Path(found.strip()).is_relative_to(place)
    command = str(place / "bin" / "roundelay")
    told = python(tmp_path, command, "--version", PYTHONPATH=str(place))
    assert told.startswith(f"roundelay {roundelay.__version__} ")
    (tmp_path / "my_job.py").write_text(JOB)
    asked = ("train", "my_job.py", "--no-baseline", "--out", "run")
    told = python(tmp_path, command, *asked, PYTHONPATH=str(place), OMP_NUM_THREADS="1", ROUNDELAY_CACHE="none")
    assert "1f1b on " in told
    assert (tmp_path / "run" / "summary.json").is_file()
