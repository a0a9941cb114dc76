"""Ignore each option in turn and see its test fail: ``python -m tests.options.table``, some minutes of one core.

For each line the source is copied and edited, and the test runs against the copy; before, against the source as it is,
where it must pass. Ends with 1 if a test passes though its option is ignored, or fails though it is not.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.options.breaks import BREAKS, Break, Edit

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "src" / "roundelay"
LIMIT_S = 600.0
PASSED, FAILED = 0, 1
"""Exit codes of pytest."""


def edited(text: str, edit: Edit) -> str:
    """A file's text behind an edit.

    Raises:
        ValueError: what it replaces does not stand there once.
    """
    if text.count(edit.old) != 1:
        raise ValueError(f"{edit.file}: {edit.old!r} stands there {text.count(edit.old)} times")
    return text.replace(edit.old, edit.new)


def run(test: Sequence[str], source: Path) -> tuple[int, str]:
    """Pytest's exit code, and the first test that failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-rfE", *test]
    path = os.pathsep.join([str(source), str(ROOT)])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    found = re.search(r"^(?:FAILED|ERROR) \S*::(.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return done.returncode, found[1] if found else "\n".join(done.stdout.splitlines()[-3:])


def ignored(one: Break) -> tuple[int, str]:
    """What comes of a test when its option is ignored."""
    with tempfile.TemporaryDirectory(prefix="ignored-") as folder:
        copy = Path(folder) / "src"
        shutil.copytree(PACKAGE, copy / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
        for edit in one.edits:
            file = copy / PACKAGE.name / edit.file
            file.write_text(edited(file.read_text(encoding="utf-8"), edit), encoding="utf-8")
        return run(one.test, copy)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute the table; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.options.table", description="Ignore each option in turn.")
    parser.add_argument("--only", metavar="TEXT", default="", help="options whose name has this in it")
    parser.add_argument("--ignored", action="store_true", help="leave out the runs on the source as it is")
    asked = parser.parse_args(arguments)
    chosen = [one for one in BREAKS if asked.only in one.option]
    console, began, wrong = Console(), time.perf_counter(), 0
    table = Table("option", "ignored: what fails", "as it is", box=SIMPLE_HEAD, padding=0)
    for number, one in enumerate(chosen, 1):
        right, told = (PASSED, "") if asked.ignored else run(one.test, PACKAGE.parent)
        broken, first = ignored(one)
        wrong += (right, broken) != (PASSED, FAILED)
        seen = escape(first) if broken == FAILED else f"[red]pytest ended with {broken}[/]: {escape(first)}"
        passes = "not run" if asked.ignored else "passes"
        table.add_row(one.option, seen, passes if right == PASSED else f"[red]ended with {right}[/]: {escape(told)}")
        console.print(f"{number}/{len(chosen)} {one.option}: {seen}", highlight=False)
    table.caption = f"{len(chosen)} options, {wrong} wrong; {time.perf_counter() - began:.0f} s"
    console.print(table)
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
