"""The table of models that nobody prepared, computed: each under each rule on 2, 3 and 4 stages, verified bit for bit.

Run as ``python -m tests.models.table``; some minutes of one core, and an exit code of 1 if a cell is not equal. Twice:
with batches of one size, and with lengths (of images: sides) that differ from batch to batch, short batches among them
in either case.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tests.equivalence.cells import OPTIMIZERS, STEPS, TRANSPORTS, VARIANTS, Bench, bench
from tests.zoo import NETWORKS

LIBRARY = ("gpt2", "llama", "bert_classifier", "t5")
NAMES = (*LIBRARY, *NETWORKS)
STAGES = (2, 3, 4)
LINES = (
    ("1f1b", 4),
    ("pipedream", 1),
    ("pipedream", 4),
    ("pipeoptim improved stash", 1),
    ("pipeoptim improved recompute", 4),
    ("cdp-v2", 4),
)
"""Rules, and M: that of their papers, and one of four."""

EQUAL = "equal"


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration."""

    model: str
    variant: str
    micro_batches: int
    stages: int
    varying: bool
    transport: str = "memory"

    def __str__(self) -> str:
        lengths = "varying" if self.varying else "fixed"
        sizes = f"D={self.stages} M={self.micro_batches}"
        return " | ".join((self.model, self.variant, sizes, f"{lengths} lengths", self.transport))

    @property
    def optimizer(self) -> str:
        """AdamW, or momentum: both with each rule."""
        return ("adamw", "nesterov")[(NAMES.index(self.model) + self.stages) % 2]


def cells(models: Sequence[str] = NAMES, transports: Sequence[str] = ("memory",)) -> list[Cell]:
    """The cells of the table in order."""
    every = itertools.product(models, (False, True), LINES, STAGES, transports)
    return [Cell(model, *line, stages, varying, transport) for model, varying, line, stages, transport in every]


def outcome(cell: Cell, place: Bench) -> str:
    """:data:`EQUAL`, or what is wrong."""
    data = place.entry.batches(0, STEPS, short=True, varying=cell.varying)
    if cell.varying and len({tuple(_lengths(batch)) for batch in data}) < 2:
        return "the lengths do not vary"
    plan = place.plan(VARIANTS[cell.variant], cell.stages, cell.micro_batches, cell.transport)
    try:
        found = place.verify(plan, place.job(OPTIMIZERS[cell.optimizer], batches=lambda epoch: data))
    except Exception as error:  # a cell that raises is wrong, and the others go on
        return f"{type(error).__name__}: {error}"
    moved = any(not torch.equal(p, place.state[n]) for n, p in place.model.named_parameters())
    return found.difference or (EQUAL if found.steps == STEPS and moved else f"{found.steps} updates, moved: {moved}")


def _lengths(batch: object) -> list[torch.Size]:
    """Shapes without rows, of tensors that have more."""
    parts = batch.values() if isinstance(batch, dict) else batch
    return [part.shape[1:] for part in parts if part.ndim > 1]  # type: ignore[union-attr]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute the table; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.models.table", description="The table of models.")
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES), metavar="MODEL", help="some of them")
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=["memory"], help="default: memory")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console, began = Console(), time.perf_counter()
    done = _computed(cells(options.models, options.transport), console)
    wrong = [f"{cell}: {what}" for cell, what in done.items() if what != EQUAL]
    told = f"{sum(what == EQUAL for what in done.values())} cells equal, {len(wrong)} wrong"
    _show(done, f"{told}; {time.perf_counter() - began:.0f} s", console)
    for what in wrong:
        console.print(f"[red]wrong[/] {what}", highlight=False)
    return 1 if wrong else 0


def _computed(wanted: Sequence[Cell], console: Console) -> dict[Cell, str]:
    done: dict[Cell, str] = {}
    texts = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} cells"))
    with Progress(*texts, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("capturing", total=len(wanted))
        for cell in wanted:
            progress.update(bar, description=f"{cell.model} D={cell.stages}")
            done[cell] = outcome(cell, bench(cell.model))
            progress.advance(bar)
    return done


def _show(done: dict[Cell, str], caption: str, console: Console) -> None:
    title = "equal to the reference on D stages, of D = " + ", ".join(map(str, STAGES))
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=0)
    table.add_column("model")
    table.add_column("lengths")
    for variant, micro_batches in LINES:
        table.add_column("\n".join((*variant.split(), f"M={micro_batches}")))
    for model, varying in dict.fromkeys((cell.model, cell.varying) for cell in done):
        mine = {c: what for c, what in done.items() if (c.model, c.varying) == (model, varying)}
        lines = ([w for c, w in mine.items() if (c.variant, c.micro_batches) == line] for line in LINES)
        table.add_row(model, "vary" if varying else "fixed", *map(_told, lines))
    console.print(table)


def _told(group: Sequence[str]) -> str:
    if not group:
        return ""
    equal = sum(what == EQUAL for what in group)
    return f"{equal}/{len(group)}" if equal == len(group) else f"[red]{equal}/{len(group)}[/]"


if __name__ == "__main__":
    sys.exit(main())
