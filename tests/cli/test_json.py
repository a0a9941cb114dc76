"""``--json`` prints one object on stdout and nothing else there, whatever the person's code prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roundelay.observe.trace import Gap
from roundelay.session.run_summary import terms_of
from tests.cli.harness import MLP, here

MAIN = "from roundelay.cli import main; main()"


def test_what_the_persons_code_prints_goes_to_stderr(tmp_path: Path) -> None:
    job = tmp_path / "loud.py"
    job.write_text(Path(MLP).read_text() + "\nprint('hello from the job file')\n")
    command = [sys.executable, "-c", MAIN, "verify", str(job), "--steps", "2", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert json.loads(done.stdout)["equal"] is True
    assert "hello from the job file" in done.stderr


def test_the_summary_of_a_run_has_them(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    told = here(capsys, "train", MLP, "--workers", 1, "--data-parallel", 2, "--zero", 3, "--steps", 2, "--json").json
    assert told["digest_start"] != told["digest_end"]
    assert len(told["digest_end"]) == 16
    assert told["bytes_sent"] == told["bytes_priced"]
    for name in ("predicted", "measured"):
        assert {"compute", "update", "gathers"} <= told["terms"][name].keys(), name
    assert {"weights", "gradients", "states", "gathered", "peak_tensor_bytes", "predicted"} <= told["memory"][0].keys()


def test_terms_are_not_told_where_clocks_differ() -> None:
    nothing: Any = None
    assert terms_of(nothing, nothing, [nothing], [Gap(0, "idle", 0.0, 1.0)]) == {}
