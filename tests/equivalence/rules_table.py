"""The table of rules, computed: rule x predictor x backward mode x optimizer, D = 2, 4 and 8, M = 1 and M >= D.

Run as ``python -m tests.equivalence.rules_table``: minutes to an hour of one core; with ``--short``, one optimizer for
each line and size in turn, a fifth of that. It ends with 1 if anything is not as it should be. Of every cell:

- the run equals its reference, bit for bit; or, where the timing does not allow the rule, it is refused with the first
  stage and micro-batch;
- broken on purpose, in each of the ways in turn, it does not equal the reference, and the stage is named;
- its weights equal those of another cell if and only if, by the formulas of their rules, the passes of both read the
  same with the same optimizer: so rule, predictor, mode, optimizer, D and M each make the difference that they should.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from roundelay.errors import PlanError, UsageError
from roundelay.ir.plan import Plan
from roundelay.ir.rule import register_rule, rule_named
from roundelay.observe.digest import digest
from roundelay.planner.prove_plan import prove
from roundelay.proof.tamper_ways import WAYS
from tests.equivalence.cells import OPTIMIZERS, TRANSPORTS, Bench
from tests.equivalence.deep import DEEP, LINES, OWN, ROWS
from tests.equivalence.reads import Reads, acts, reads_of_run
from tests.equivalence.test_tamper import victim

SIZES = ((2, 1), (2, 2), (2, 3), (4, 1), (4, 4), (8, 1), (8, 8))
"""D and M."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One configuration."""

    line: str
    optimizer: str
    stages: int
    micro_batches: int
    transport: str = "memory"

    def __str__(self) -> str:
        return f"{self.line} | {self.optimizer} | D={self.stages} M={self.micro_batches} | {self.transport}"

    @property
    def steps(self) -> int:
        """Updates: five, or enough to leave the warm-up of eight stages behind."""
        return len(ROWS) if self.micro_batches == 1 else 5

    @property
    def counts(self) -> list[int]:
        """Micro-batches of every batch."""
        return [min(self.micro_batches, rows) for rows in ROWS[: self.steps]]

    @property
    def still(self) -> bool:
        """Whether a step of its optimizer without a gradient changes nothing."""
        return self.optimizer == "sgd"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a cell.

    Args:
        cell: the cell.
        refused: whether the timing does not allow it.
        way: in which it was broken; empty if that would change nothing that is read.
        reads: what its passes read.
        bits: of its weights at the end.
        wrong: what is not as it should be.
    """

    cell: Cell
    refused: bool = False
    way: str = ""
    reads: Reads = ()
    bits: str = ""
    wrong: tuple[str, ...] = ()


@dataclass(slots=True)
class Tally:
    """What has come of the cells so far."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """All that is not as it should be."""
        return [f"{o.cell}: {what}" for o in self.outcomes for what in o.wrong] + crossed(self.outcomes)


def bench() -> Bench:
    """The model, captured."""
    return Bench(DEEP, batches=DEEP.batches(0, len(ROWS)))


def cells(short: bool = False, transports: Sequence[str] = ("memory",)) -> list[Cell]:
    """The cells of the table in order."""
    every = [
        Cell(line, optimizer, *sizes, transport)
        for transport in transports
        for line, sizes, optimizer in itertools.product(LINES, SIZES, OPTIMIZERS)
    ]
    count = len(OPTIMIZERS)
    return [cell for i, cell in enumerate(every) if i // count % count == i % count] if short else every


def ways() -> Iterator[str]:
    """Ways to break a run, in turn; shifted from line to line, so that each size meets other pairs."""
    return (WAYS[(i + i // (len(SIZES) * len(OPTIMIZERS))) % len(WAYS)] for i in itertools.count())


def played(cell: Cell, place: Bench, way: str) -> Outcome:
    """Verify a cell, then break it in one way.

    Args:
        cell: the cell.
        place: :func:`bench`.
        way: one of :data:`WAYS`.
    """
    try:
        plan = place.plan(LINES[cell.line], cell.stages, cell.micro_batches, cell.transport)
        if rule_named(plan.rule).versions == "table" and cell.micro_batches < cell.stages - 1:
            return Outcome(cell, refused=True, wrong=_not_refused(plan))
        wrong, bits = _unequal(cell, place, plan)
        acting = acts(way, plan, cell.counts, victim(place, plan, way), still=cell.still)
        wrong += _unnoticed(cell, place, plan, way, acting)
        reads = reads_of_run(plan, cell.counts, still=cell.still)
        return Outcome(cell, way=way if acting else "", reads=reads, bits=bits, wrong=wrong)
    except Exception as error:  # a cell that raises is wrong, and the others go on
        return Outcome(cell, wrong=(f"{type(error).__name__}: {error}",))


def _not_refused(plan: Plan) -> tuple[str, ...]:
    """The first forward that asks for what is not there is that of micro-batch 2 M on stage 0."""
    place = f"stage 0, forward of micro-batch {2 * plan.micro_batches}"
    words = (f"{place}: got version 0, its newest", "expected version 1")
    try:
        prove(plan)
    except PlanError as error:
        return () if all(part in str(error) for part in words) else (f"refused otherwise: {error}",)
    return ("not refused",)


def _unequal(cell: Cell, place: Bench, plan: Plan) -> tuple[tuple[str, ...], str]:
    """What is wrong with the run as it is, and the bits that it ends with."""
    found = place.verify(plan, place.job(OPTIMIZERS[cell.optimizer]), steps=cell.steps)
    wrong = () if found.equal else (found.difference,)
    if (found.steps, found.losses) != (cell.steps, sum(cell.counts)):
        wrong += (f"{found.steps} updates of {found.losses} micro-batches",)
    return wrong, digest(dict(place.model.named_parameters()))


def _unnoticed(cell: Cell, place: Bench, plan: Plan, way: str, acting: bool) -> tuple[str, ...]:
    """What is wrong with the run that is broken: it is equal, or unequal at another stage."""
    stage = victim(place, plan, way)
    try:
        found = place.verify(plan, place.job(OPTIMIZERS[cell.optimizer]), steps=cell.steps, tamper=way)
    except UsageError as error:
        told = "changed no bit" in str(error)
        return () if told and not acting else (f"broken by {way}: {error}",)
    if not acting:
        return (f"broken by {way}: unequal, though nothing else is read",)
    return () if not found.equal and found.stage == stage else (f"broken by {way}: {found.difference or 'equal'}",)


def crossed(outcomes: Sequence[Outcome]) -> list[str]:
    """Pairs of cells whose weights are equal though they should not be, or the other way round."""
    by_key: dict[tuple[object, ...], Outcome] = {}
    by_bits: dict[str, Outcome] = {}
    wrong = []
    for one in (o for o in outcomes if o.bits):
        key = (one.cell.optimizer, one.cell.micro_batches, one.reads)
        alike, same = by_key.setdefault(key, one), by_bits.setdefault(one.bits, one)
        if alike.bits != one.bits:
            wrong.append(f"{alike.cell} and {one.cell}: the same reads, other weights")
        if (same.cell.optimizer, same.cell.micro_batches, same.reads) != key:
            wrong.append(f"{same.cell} and {one.cell}: the same weights, other reads")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute the table; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.equivalence.rules_table", description="The table of rules.")
    parser.add_argument("--short", action="store_true", help="one optimizer for each line and size, in turn")
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=["memory"], help="default: memory")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for rule in OWN:
        register_rule(rule)
    console, began = Console(), time.perf_counter()
    tally = _computed(cells(options.short, options.transport), console)
    _show(tally, time.perf_counter() - began, console)
    return 1 if tally.wrong else 0


def _computed(wanted: Sequence[Cell], console: Console) -> Tally:
    tally, place = Tally(), bench()
    texts = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total} cells"))
    with Progress(*texts, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("", total=len(wanted))
        for cell, way in zip(wanted, ways(), strict=False):
            progress.update(bar, description=f"{cell.line} D={cell.stages}")
            tally.outcomes.append(played(cell, place, way))
            progress.advance(bar)
            for what in tally.outcomes[-1].wrong:
                progress.console.print(f"[red]{cell}[/]: {what}", highlight=False)
    return tally


def _show(tally: Tally, seconds: float, console: Console) -> None:
    table = Table(title="cells as they should be", caption=_caption(tally, seconds), box=SIMPLE_HEAD, padding=0)
    table.add_column("rule, predictor, mode")
    for stages, micro_batches in SIZES:
        table.add_column(f"D={stages}\nM={micro_batches}", justify="right")
    for line in LINES:
        mine = [o for o in tally.outcomes if o.cell.line == line]
        groups = ([o for o in mine if (o.cell.stages, o.cell.micro_batches) == sizes] for sizes in SIZES)
        table.add_row(line, *map(_share, groups))
    console.print(table)
    for what in tally.wrong:
        console.print(f"[red]wrong[/] {what}", highlight=False)


def _share(group: Sequence[Outcome]) -> str:
    good = sum(not one.wrong for one in group)
    text = f"{good}/{len(group)}" if good == len(group) else f"[red]{good}/{len(group)}[/]"
    return f"{text} refused" if group and all(one.refused for one in group) else text


def _caption(tally: Tally, seconds: float) -> str:
    run = [one for one in tally.outcomes if one.bits]
    broken = ", ".join(f"{way} {sum(one.way == way for one in run)}" for way in WAYS)
    return (
        f"{len(run)} runs held against their references, with {len({one.bits for one in run})} different ends; "
        f"{sum(one.refused for one in tally.outcomes)} refused; runs broken, by {broken}; "
        f"{len(tally.wrong)} wrong; {seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
