"""``roundelay doctor`` and ``--version``, which need no torch, and the error where the other commands need it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from roundelay import __version__, env
from roundelay.cli.loading import cannot_load, load
from roundelay.cli.screen import show_error, show_json, stdout
from roundelay.doctor import Finding, examine, read_machine
from roundelay.errors import UsageError, counted

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> None:
    """Examine this machine: what would fail on it, and the remedy. Exit code 1 if there is a problem."""
    raise typer.Exit(_print(examine(read_machine(_commands_error())), as_json))


def run_without_commands(error: Exception) -> int:
    """Run ``doctor`` where the commands cannot be imported; any other command prints an error that names it.

    Args:
        error: why they cannot be imported.

    Returns:
        The exit code.
    """
    usage_error, as_json = cannot_load(error), "--json" in sys.argv
    if sys.argv[1:2] == ["doctor"]:
        return _print(examine(read_machine(usage_error.got)), as_json)
    usage_error.__cause__ = error
    try:
        traceback = env.level() >= 1
    except UsageError:
        traceback = False
    show_error(usage_error, as_json, traceback)
    return usage_error.exit_code


def _commands_error() -> str:
    """Why the commands that need torch cannot be imported; empty if they can."""
    try:
        load("cli.train_command")
    except UsageError as error:
        return error.got
    return ""


def _print(findings: Sequence[Finding], as_json: bool) -> int:
    problems, warnings = (sum(finding.state == state for finding in findings) for state in ("problem", "warning"))
    if as_json:
        checks = [asdict(finding) for finding in findings]
        show_json({"problems": problems, "warnings": warnings, "checks": checks})
    else:
        stdout.print(_table(findings), soft_wrap=False)
        counts = ", ".join((counted(problems, "problem"), counted(warnings, "warning")))
        stdout.print(f"\n{counts}")
    return 1 if problems else 0


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, wraps in (("", False), ("", False), ("found", True), ("remedy", True)):
        table.add_column(title, no_wrap=not wraps, overflow="fold")
    for finding in findings:
        state = Text(finding.state, style=_COLOURS[finding.state])
        table.add_row(finding.name, state, Text(finding.found), Text(finding.remedy))
    return table


def version_line() -> str:
    """Roundelay's version and that of the installed torch."""
    try:
        torch = f"torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        torch = "torch is not installed"
    return f"roundelay {__version__} ({torch})"


def show_version() -> None:
    """Print the version line on stdout."""
    sys.stdout.write(version_line() + "\n")
