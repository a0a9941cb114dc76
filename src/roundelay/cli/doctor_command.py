"""``roundelay doctor``, and what is said where Roundelay's commands cannot be loaded. It needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from roundelay import __version__, env
from roundelay.cli.screen import show_error, show_json, stdout
from roundelay.doctor import Finding, examine, probe
from roundelay.errors import UsageError

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> None:
    """Examine this machine: what works, what would not, and the remedy. Exit code 1 if there is a problem."""
    raise typer.Exit(_told(examine(probe()), as_json))


def without_commands(error: Exception) -> int:
    """What is done when the commands cannot be loaded: ``doctor`` works, the others name it; the exit code.

    Args:
        error: why they cannot.
    """
    why, as_json = f"{type(error).__name__}: {error}", "--json" in sys.argv
    if sys.argv[1:2] == ["doctor"]:
        return _told(examine(probe(why)), as_json)
    told = UsageError(
        "loading Roundelay and torch",
        got=why,
        expected="an installation in which they can be loaded",
        remedy="Run `roundelay doctor`: it says what is missing.",
    )
    told.__cause__ = error
    show_error(told, as_json, _traced())
    return told.exit_code


def _traced() -> bool:
    try:
        return env.level() >= 1
    except UsageError:
        return False


def _told(findings: Sequence[Finding], as_json: bool) -> int:
    problems, warnings = (sum(one.state == state for one in findings) for state in ("problem", "warning"))
    if as_json:
        checks = [{n: getattr(one, n) for n in ("name", "found", "state", "remedy")} for one in findings]
        show_json({"problems": problems, "warnings": warnings, "checks": checks})
    else:
        stdout.print(_table(findings), soft_wrap=False)
        stdout.print(f"\n{_count(problems, 'problem')}, {_count(warnings, 'warning')}")
    return 1 if problems else 0


def _table(findings: Sequence[Finding]) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for title, wraps in (("", False), ("", False), ("found", True), ("remedy", True)):
        made.add_column(title, no_wrap=not wraps, overflow="fold")
    for one in findings:
        state = Text(one.state, style=_COLOURS[one.state])
        made.add_row(one.name, state, Text(one.found), Text(one.remedy))
    return made


def _count(number: int, word: str) -> str:
    return f"{number or 'no'} {word}{'' if number == 1 else 's'}"


def version_line() -> str:
    """Roundelay's version and that of the torch beside it."""
    try:
        beside = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        beside = "torch is not installed"
    return f"roundelay {__version__} ({beside})"


def show_version() -> None:
    """On stdout, as a line."""
    sys.stdout.write(version_line() + "\n")
