"""``--json`` prints one object on stdout and nothing else there, whatever the person's code prints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.cli.harness import MLP

MAIN = "from roundelay.cli import main; main()"


def test_what_the_persons_code_prints_goes_to_stderr(tmp_path: Path) -> None:
    job = tmp_path / "loud.py"
    job.write_text(Path(MLP).read_text() + "\nprint('hello from the job file')\n")
    command = [sys.executable, "-c", MAIN, "verify", str(job), "--steps", "2", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert json.loads(done.stdout)["equal"] is True
    assert "hello from the job file" in done.stderr
