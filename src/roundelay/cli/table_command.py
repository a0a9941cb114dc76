"""``roundelay table``: a table of a paper, counted from programs and runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from roundelay.cli import options as o
from roundelay.cli.loading import load
from roundelay.cli.screen import doing, show_json, stdout, table
from roundelay.errors import UsageError

if TYPE_CHECKING:
    from roundelay.comparison.cyclic_table import Counted

TABLES = ("cdp",)
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
    paper: Annotated[str, typer.Argument(help="Which: cdp (Cyclic Data Parallelism, Table 1).")],
    workers: Annotated[int, typer.Option(help="N, stages and micro-batches of a batch.", min=2, max=64)] = 3,
    run: Annotated[
        bool | None,
        typer.Option(
            "--run/--no-run", help=f"Train in each form and count what is sent. [default: if N <= {RUN_UP_TO}]"
        ),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Count a paper's table from programs, simulated, and from runs, beside the paper's formulas."""
    if paper not in TABLES:
        raise UsageError("the table", got=repr(paper), expected=" or ".join(TABLES), remedy="Choose one of these.")
    runs = workers <= RUN_UP_TO if run is None else run
    with doing(f"Counting the forms for N = {workers} ...", as_json):
        counted = list(load("comparison.cyclic_table").counted_table(workers, runs=runs))
    if as_json:
        show_json({"table": paper, "workers": workers, "rows": [_json(one) for one in counted]})
        return
    title = f"Cyclic Data Parallelism, Table 1, for N = {workers}"
    stdout.print(table(title, _COLUMNS, [_cells(one) for one in counted]))
    stdout.print(_NOTES)


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
