"""Read plan files."""

from __future__ import annotations

from pathlib import Path

from roundelay.errors import PlanError
from roundelay.ir.plan import Plan


def read_plan(path: Path, remedy: str = "Write one with `roundelay plan JOB.py -o plan.toml`.") -> Plan:
    """Read a plan from a file.

    Args:
        path: the file.
        remedy: what to do if it cannot be read.

    Raises:
        PlanError: it cannot be read, or is not a plan.
    """
    try:
        return Plan.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"plan file {path}",
            got=str(error),
            expected="a plan as `roundelay plan` writes it",
            remedy=remedy,
        ) from error
