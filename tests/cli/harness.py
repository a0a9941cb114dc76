"""Run commands as a person does: in this process where that is enough, in one of its own where it matters."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from roundelay.cli.app import app, guarded
from tests.conftest import nothing_left_behind

ROOT = Path(__file__).resolve().parent.parent.parent
JOBS = Path(__file__).resolve().parent / "jobs"
MLP = str(JOBS / "mlp.py")
SCREEN_LINES = 25
PROGRAM = "from roundelay.cli import main; main()"


@dataclass(frozen=True, slots=True)
class Said:
    """What a command did: its exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one object on stdout."""
        lines = self.out.splitlines()
        assert len(lines) == 1, f"stdout holds {len(lines)} lines: {self.out[:500]}"
        found: dict[str, Any] = json.loads(lines[0], parse_constant=_strict)
        return found

    @property
    def told(self) -> str:
        """Both streams as running text: no frames, no line ends."""
        words = (self.out + " " + self.err).replace("│", " ").replace("╰", " ").replace("╭", " ").split()
        return " ".join(words)


def _strict(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def here(capsys: pytest.CaptureFixture[str], *args: object) -> Said:
    """Run a command in this process; nothing may be left running after it."""
    texts = [str(arg) for arg in args]
    capsys.readouterr()
    threads = torch.get_num_threads()
    with nothing_left_behind():
        code = guarded(functools.partial(app, texts), "--json" in texts)
    torch.set_num_threads(threads)
    captured = capsys.readouterr()
    return Said(code, captured.out, captured.err)


def environment(**more: str) -> dict[str, str]:
    """What a command of its own sees."""
    paths = [str(ROOT / "src"), str(JOBS), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"} | more


def start(folder: Path, *args: object, stderr: IO[str] | int = subprocess.PIPE, **env: str) -> subprocess.Popen[str]:
    """Start a command in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *map(str, args)],
        cwd=folder,
        env=environment(**env),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 60.0) -> Said:
    """Wait for a started command."""
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return Said(process.returncode, out or "", err or "")


def job_file(folder: Path, changes: str, before: str = "") -> Path:
    """A job file: the small network with some of its fields replaced.

    Args:
        folder: where to write it.
        changes: keyword arguments of `make`.
        before: lines in front of the job.
    """
    path = folder / "job.py"
    head = "import torch\nfrom torch import nn\nimport mlp\n"
    path.write_text(f"{head}\n{before}\n\ndef job(seed):\n    return mlp.make({changes})\n")
    return path


def one_screen(said: Said, *words: str) -> None:
    """Assert that an error is one readable screen that holds every word."""
    assert said.code != 0, said.out + said.err
    assert "Traceback" not in said.err, said.err
    assert len(said.err.splitlines()) <= SCREEN_LINES, said.err
    for part in ("got", "expected", "do"):
        assert any(line.replace("│", " ").split()[:1] == [part] for line in said.err.splitlines()), said.err
    squeezed = "".join(said.told.split())
    for word in words:
        assert "".join(word.split()) in squeezed, f"{word!r} is not told in:\n{said.err}"
