"""What a person sees: progress, tables, and one screen for an error. Results go to stdout, the rest to stderr."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from typing import Any, TextIO

from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from roundelay.checkpoint.atomic_files import strict_json
from roundelay.errors import RoundelayError
from roundelay.runtime.prefetch import OnWait, ignore_wait

stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False)

_JSON_STREAM: ContextVar[TextIO] = ContextVar("json_stream")

_LINES, _LETTERS = 5, 400
"""Most lines and letters of one part of an error's screen."""


def show_json(value: Any) -> None:
    """One object on stdout, and nothing else; a float that is not finite becomes ``null``."""
    stream = _JSON_STREAM.get(sys.stdout)
    stream.write(strict_json(value) + "\n")
    with suppress(OSError):  # Python tries again as it ends, and tells; before that a signal could lose it all
        stream.flush()


@contextmanager
def only_json() -> Iterator[None]:
    """Whatever the person's code prints goes to stderr; stdout is for :func:`show_json`."""
    token = _JSON_STREAM.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _JSON_STREAM.reset(token)


def show_error(error: RoundelayError, as_json: bool, traced: bool) -> None:
    """One screen: subject, got, expected, remedy; and the whole traceback behind it if ``traced``."""
    if as_json:
        told = {"subject": error.subject, "got": error.got, "expected": error.expected, "remedy": error.remedy}
        show_json({"error": {"kind": type(error).__name__, **told}})
    body = Table.grid(padding=(0, 2))
    body.add_column(justify="right", style="bold", no_wrap=True)
    body.add_column(overflow="fold")
    for word, text in (("got", error.got), ("expected", error.expected), ("do", error.remedy)):
        body.add_row(word, Text(_short(text)))
    stderr.print(Panel(Group(Text(_short(error.subject), style="bold"), body), border_style="red"))
    if traced:
        stderr.print("".join(traceback.format_exception(error)), markup=False)


def _short(text: str) -> str:
    """At most a few lines: messages of other people's code have any length, and one screen must hold them."""
    lines = [line.rstrip() for line in text.strip().splitlines() if line.strip()]
    cut = "\n".join(lines[:_LINES])
    return cut if len(cut) <= _LETTERS and len(lines) <= _LINES else cut[:_LETTERS].rstrip() + " ..."


def _leave_spinner() -> None:
    """Have a forked child print past the spinner, which redirects the streams and whose thread the child lacks."""
    sys.stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    sys.stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_spinner)


@contextmanager
def doing(what: str, quiet: bool) -> Iterator[OnWait]:
    """A spinner while something takes its time; what it gives is to be told of long waits.

    Where nobody looks (a file), a line says once what is waited for.
    """
    if quiet:
        yield ignore_wait
        return
    told: set[str] = set()
    with stderr.status(what) as status:

        def tell(waited_for: str, seconds: float) -> None:
            if stderr.is_terminal:
                status.update(escape(f"{what} {seconds:.0f} s for {waited_for}"))
            elif waited_for not in told:
                told.add(waited_for)
                stderr.print(f"{what} waiting for {waited_for}", markup=False)

        yield tell


def announce(what: str, quiet: bool) -> None:
    """A line before something that forks: a spinner's thread must not be alive then."""
    if not quiet:
        stderr.print(what)


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
