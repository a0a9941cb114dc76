"""``roundelay table``: a paper's table or figure, counted from programs and runs, or computed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from roundelay.cli import options as o
from roundelay.cli.loading import load
from roundelay.cli.screen import doing, show_json, stdout, table
from roundelay.cli.text_file import write_text
from roundelay.errors import UsageError
from roundelay.page.scale import short
from roundelay.page.search_page import search_page

if TYPE_CHECKING:
    from roundelay.comparison.cyclic_table import Counted

TABLES = {"cdp": ("--workers", "--run"), "autoddl": ("--figure", "--html")}
"""By paper, the options that it has."""

RUN_UP_TO = 4
"""N up to which each form runs too, in one thread for each worker: DP with MP has N^2 of these."""

_COLUMNS = ["", "activations", "parameters", "v", "sent", "w", "steps", "devices"]
_NOTES = """
Each cell: counted (the paper's, where it is written otherwise). N stages, N micro-batches of B rows.
activations: most on one worker, in B Psi_A; on one device, backwards of a time step run before its forwards, so that
fewer are held than the paper counts within a step. parameters: most on one worker at one time, in Psi_P, each version
counted. v, w: all workers send 2(N-1) v Psi_P bytes of gradients (ZeRO: of states) and 2N w B Psi_A^int bytes between
stages. sent: v of a run, which sends a count of 8 bytes with each sum, and in ZeRO hands on all versions and sums of
gradients, while optimizer state stays with the worker that updates a stage, 1/N of it on each. steps: messages that
must follow one another between two time steps."""


def table_command(
    paper: Annotated[
        str, typer.Argument(help="Which: cdp (Cyclic Data Parallelism, Table 1) or autoddl (AutoDDL's figures).")
    ],
    workers: Annotated[
        int | None, typer.Option(help="cdp: N, stages and micro-batches of a batch. [default: 3]", min=2, max=64)
    ] = None,
    run: Annotated[
        bool | None,
        typer.Option(
            "--run/--no-run", help=f"cdp: train in each form and count what is sent. [default: if N <= {RUN_UP_TO}]"
        ),
    ] = None,
    figure: Annotated[int | None, typer.Option(help="autoddl: 3, 4, 7, 8 or 9. [default: 3]")] = None,
    html: Annotated[Path | None, typer.Option(help="autoddl: also write a page, with Figure 8's curves.")] = None,
    as_json: o.Json = False,
) -> None:
    """Compute a paper's table or figure, beside what the paper says."""
    if paper not in TABLES:
        raise UsageError("the table", got=repr(paper), expected=" or ".join(TABLES), remedy="Choose one of these.")
    given = {"--workers": workers, "--run": run, "--figure": figure, "--html": html}
    foreign = [name for name in given if given[name] is not None and name not in TABLES[paper]]
    if foreign:
        got, known = ", ".join(foreign), ", ".join(TABLES[paper])
        raise UsageError(f"options of the table {paper}", got=got, expected=known, remedy="Leave these out.")
    if paper == "cdp":
        _cyclic(3 if workers is None else workers, run, as_json)
    else:
        _autoddl(3 if figure is None else figure, html, as_json)


def _cyclic(workers: int, run: bool | None, as_json: bool) -> None:
    runs = workers <= RUN_UP_TO if run is None else run
    with doing(f"Counting the forms for N = {workers} ...", as_json):
        counted = list(load("comparison.cyclic_table").counted_table(workers, runs=runs))
    if as_json:
        show_json({"table": "cdp", "workers": workers, "rows": [_json(one) for one in counted]})
        return
    title = f"Cyclic Data Parallelism, Table 1, for N = {workers}"
    stdout.print(table(title, _COLUMNS, [_cells(one) for one in counted]))
    stdout.print(_NOTES)


def _autoddl(number: int, html: Path | None, as_json: bool) -> None:
    figures = load("comparison.autoddl_figures").FIGURES
    if number not in figures:
        known = ", ".join(map(str, figures))
        raise UsageError("AutoDDL's figure", got=str(number), expected=known, remedy="Choose one of these.")
    with doing(f"Computing Figure {number} ...", as_json):
        figure = figures[number]()
    columns = [name.replace("_", " ") for name in figure.columns]
    cells = [list(map(_text, row)) for row in figure.rows]
    if html is not None:
        write_text(html, search_page(figure.title, figure.notes, [columns, *cells], figure.charts))
    if as_json:
        show_json({"table": "autoddl", "figure": number, "rows": figure.records})
        return
    stdout.print(table(figure.title, columns, cells))
    stdout.print("", *figure.notes, sep="\n")


def _text(value: str | int | float | None) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return short(value) if isinstance(value, float) else value or "-"


def _cells(one: Counted) -> list[str]:
    row, costs = one.row, one.costs
    pairs = [
        (costs.activations, row.activations),
        (costs.parameters, row.parameters),
        (costs.gradients, row.gradients),
        (costs.messages, row.messages),
        (costs.steps, row.steps),
        (costs.devices, row.devices),
    ]
    cells = [f"{got}" if str(got) == published else f"{got} ({published})" for got, published in pairs]
    return [row.name, *cells[:3], "" if one.sent is None else f"{one.sent:.3f}", *cells[3:]]


def _json(one: Counted) -> dict[str, object]:
    costs, row = one.costs, one.row
    return {
        "form": row.name.strip(),
        "counted": {name: float(getattr(costs, name)) for name in costs.__slots__},
        "paper": {name: getattr(row, name) for name in costs.__slots__},
        "sent": one.sent,
    }
