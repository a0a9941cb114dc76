"""Screen output: spinners, tables, and a panel for an error. Results go to stdout, the rest to stderr."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from roundelay.checkpoint.atomic_files import strict_json
from roundelay.errors import PeerLostError, PlanWarning, RoundelayError

if TYPE_CHECKING:  # torch would be imported with it, and `roundelay doctor` must work without
    from roundelay.runtime.loading.prefetch import OnWait

stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False)

_JSON_STREAM: ContextVar[TextIO] = ContextVar("json_stream")

_LINES, _CHARACTERS = 5, 400
"""Most lines and characters of one part of an error's panel."""


def show_json(value: Any) -> None:
    """Write one JSON object to stdout; a float that is not finite becomes ``null``."""
    stream = _JSON_STREAM.get(sys.stdout)
    stream.write(strict_json(value) + "\n")
    with suppress(OSError):  # Python tries again at its exit, and reports; until then a signal could lose everything
        stream.flush()


@contextmanager
def only_json() -> Iterator[None]:
    """Within the context, whatever user code prints goes to stderr; stdout is for :func:`show_json`."""
    token = _JSON_STREAM.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _JSON_STREAM.reset(token)


def show_error(error: RoundelayError, as_json: bool, traced: bool) -> None:
    """Print an error as a panel (subject, got, expected, remedy), or in one line which machine is lost.

    Args:
        error: the error.
        as_json: also write it to stdout as a JSON object.
        traced: then also print its traceback.
    """
    if as_json:
        parts = {"subject": error.subject, "got": error.got, "expected": error.expected, "remedy": error.remedy}
        show_json({"error": {"kind": type(error).__name__, **parts}})
    if isinstance(error, PeerLostError):
        show_lost(error.subject, error.got)
    else:
        _show_panel(error)
    if traced:
        stderr.print("".join(traceback.format_exception(error)), markup=False)


def show_lost(peer: str, cause: str) -> None:
    """Print in one line which machine of a run is lost, and why."""
    stderr.print(f"lost: {peer}: {cause}", markup=False, soft_wrap=True)


def _show_panel(error: RoundelayError) -> None:
    body = Table.grid(padding=(0, 2))
    body.add_column(justify="right", style="bold", no_wrap=True)
    body.add_column(overflow="fold")
    for label, text in (("got", error.got), ("expected", error.expected), ("do", error.remedy)):
        body.add_row(label, Text(_short(text)))
    stderr.print(Panel(Group(Text(_short(error.subject), style="bold"), body), border_style="red"))


def _short(text: str) -> str:
    """Shorten a text to a few lines: messages of user code have any length."""
    lines = ["".join(c if c.isprintable() else " " for c in line).rstrip() for line in text.strip().splitlines()]
    lines = [line for line in lines if line]
    cut = "\n".join(lines[:_LINES])
    return cut if len(cut) <= _CHARACTERS and len(lines) <= _LINES else cut[:_CHARACTERS].rstrip() + " ..."


def _leave_spinner() -> None:
    """In a forked child, undo the spinner's redirection of the streams: the child does not have its thread."""
    sys.stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    sys.stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_spinner)


@contextmanager
def doing(what: str, quiet: bool) -> Iterator[OnWait]:
    """Show a spinner within the context; yields a function to be called with what is waited for and for how long.

    Where stderr is no terminal, each thing that is waited for is printed once.
    """
    if quiet:
        yield lambda waited_for, seconds: None
        return
    printed: set[str] = set()
    with stderr.status(what) as status:

        def show_wait(waited_for: str, seconds: float) -> None:
            if stderr.is_terminal:
                status.update(escape(f"{what} {seconds:.0f} s for {waited_for}"))
            elif waited_for not in printed:
                printed.add(waited_for)
                stderr.print(f"{what} waiting for {waited_for}", markup=False)

        yield show_wait


def announce(what: str, quiet: bool) -> None:
    """Print a line, where a spinner's thread must not be alive because processes are forked."""
    if not quiet:
        stderr.print(what)


@contextmanager
def plan_warnings_as_lines() -> Iterator[None]:
    """Print each :class:`PlanWarning` of the block as a line, once, where Python would show the line that warned."""
    printed: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
        if not issubclass(category, PlanWarning):
            shown(message, category, *where, **more)
        elif str(message) not in printed:
            printed.add(str(message))
            stderr.print(f"warning: {message}.", markup=False)

    with warnings.catch_warnings():
        warnings.simplefilter("always", PlanWarning)
        shown, warnings.showwarning = warnings.showwarning, show
        yield


def table(title: str, columns: list[str], rows: list[list[str]]) -> Table:
    """A plain table."""
    text_table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        text_table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        text_table.add_row(*row)
    return text_table
