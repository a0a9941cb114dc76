"""PyTorch's samples of its operators: what global tensors give is what plain tensors give, or is refused by name.

Every commit takes another of these tests; ``make operators`` makes all checks. Each runs in a process of its own:
torch's samples come with changes to torch's settings.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GROUPS = 60
LIMIT_S = 300

BROKEN = """
import sys
from roundelay.global_tensor import operators
operators._plain = lambda local: local.contiguous() + 1
sys.argv = ["op_samples", "--only", "sigmoid", "--dtypes", "float64", "--workers", "2", "--samples", "1"]
from tests.op_samples.__main__ import main
sys.exit(main())
"""


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("group", range(GROUPS))
def test_operators_on_parts_give_what_the_plain_ones_give(group: int) -> None:
    found = run(
        "-m", "tests.op_samples", "--part", f"{group}/{GROUPS}", "--workers", str(2 + group % 2), "--samples", "2"
    )
    assert found.returncode == 0, found.stdout + found.stderr
    equal, refused = (sum(map(int, re.findall(rf"(\d+) {how}", found.stdout))) for how in ("equal", "refused"))
    assert equal > refused / 2, found.stdout


def test_a_wrong_operator_is_seen() -> None:
    found = run("-c", BROKEN)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "wrong: sigmoid" in found.stdout
