"""Runs tests on the stand-in, in a pytest of its own: torch looks for CUDA once, while it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.standin.build import CannotStandInError, library

ROOT = Path(__file__).parent.parent.parent
SHOWN = 20_000
"""Characters of a failed run that are shown."""

DEADLINE_S = 600


def passes(*arguments: str) -> None:
    """Run these tests and fail as they do; skip where there can be no stand-in.

    Args:
        arguments: of pytest.
    """
    try:
        library()
    except CannotStandInError as error:
        pytest.skip(f"no stand-in for a CUDA device: {error}")
    plugins = ("-p", "tests.standin.device", "-p", "no:logging", "-p", "no:cacheprovider")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "--tb=short", *arguments],
        cwd=ROOT,
        env=outside | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        pytest.fail((done.stdout + done.stderr)[-SHOWN:], pytrace=False)
