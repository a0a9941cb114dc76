"""Every test of a command works in an empty folder and finds the job modules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.harness import JOBS


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder; `import mlp` works, and what commands add to sys.path is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(JOBS)
    return tmp_path
