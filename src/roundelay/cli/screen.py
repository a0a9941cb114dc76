"""What a person sees: progress, tables, and one screen for an error. Results go to stdout, the rest to stderr."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from roundelay import debug
from roundelay.errors import RoundelayError

stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False)


def show_json(value: Any) -> None:
    """One object on stdout, and nothing else."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")


def show_error(error: RoundelayError, as_json: bool) -> None:
    """One screen: subject, got, expected, remedy; the traceback only with ROUNDELAY_DEBUG."""
    if as_json:
        told = {"subject": error.subject, "got": error.got, "expected": error.expected, "remedy": error.remedy}
        show_json({"error": {"kind": type(error).__name__, **told}})
    body = Text()
    for word, text in (("got", error.got), ("expected", error.expected), ("do", error.remedy)):
        body.append(f"{word:>9}  ", style="bold")
        body.append(text + "\n")
    body.rstrip()
    stderr.print(Panel(body, title=Text(error.subject), title_align="left", border_style="red"))
    if debug.level() >= 1:
        stderr.print("".join(traceback.format_exception(error)), markup=False)


@contextmanager
def doing(what: str, quiet: bool) -> Iterator[None]:
    """A spinner while something takes its time."""
    if quiet:
        yield
        return
    with stderr.status(what):
        yield


def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    """A plain table."""
    made = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        made.add_row(*row)
    return made


def progress() -> Progress:
    """The live line of a training."""
    return Progress(
        SpinnerColumn(),
        TextColumn("update"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=stderr,
        transient=False,
    )


def amount(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return ""
