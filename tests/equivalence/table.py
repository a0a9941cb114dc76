"""The table of equivalences, computed: every model of the zoo in every configuration, each verified bit for bit.

Run as ``python -m tests.equivalence.table``; ends with 1 if a cell fails, and names it. The whole table takes hours of
one core; ``--sample 500`` takes minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from tests.equivalence.cells import EVERY_TRANSPORT, FACTORS, TRANSPORTS, VARIANTS, Bench, Cell, run_cell
from tests.zoo import MODELS, ZOO


@dataclass(frozen=True, slots=True)
class Outcome:
    """One verified cell; no difference means that it is equal."""

    cell: Cell
    difference: str
    tensors: int
    seconds: float


@dataclass(slots=True)
class Tally:
    """What has come of the cells so far."""

    outcomes: list[Outcome] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[Outcome]:
        """Cells that are not equal."""
        return [outcome for outcome in self.outcomes if outcome.difference]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compute the table; the exit code."""
    options = _options(arguments)
    torch.set_num_threads(1)
    if options.raw:
        for outcome in outcomes([Cell(*json.loads(line)) for line in sys.stdin]):
            print(_to_line(outcome), flush=True)
        return 0
    wanted = cells(options.models, options.transport, options.sample, options.seed)
    console = Console()
    start = time.perf_counter()
    tally = _computed(wanted, options, console)
    _show(tally, wanted, time.perf_counter() - start, console)
    return 0 if not tally.broken and not tally.failures and len(tally.outcomes) == len(wanted) else 1


def cells(models: Sequence[str], transports: Sequence[str], sample: int | None, seed: int) -> list[Cell]:
    """The cells of the table in order, or a random choice of ``sample`` of them."""
    factors = FACTORS | {"model": models, "transport": transports}
    every = [Cell(*values) for values in itertools.product(*factors.values())]
    if sample is None or sample >= len(every):
        return every
    chosen = set(random.Random(seed).sample(every, sample))
    return [cell for cell in every if cell in chosen]


def outcomes(wanted: Sequence[Cell]) -> Iterator[Outcome]:
    """Verify cells in this process, with one capture per model."""
    for model, group in itertools.groupby(wanted, key=lambda cell: cell.model):
        place = Bench(MODELS[model])
        for cell in group:
            start = time.perf_counter()
            try:
                found = run_cell(cell, place)
                difference, tensors = found.difference or ("" if found.equal else "unequal"), found.tensors
            except Exception as error:  # a cell that raises is a cell that fails, and the others go on
                difference, tensors = f"{type(error).__name__}: {error}", 0
            yield Outcome(cell, difference, tensors, time.perf_counter() - start)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.equivalence.table", description="Compute the table.")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(ZOO), metavar="MODEL", help=", ".join(MODELS)
    )
    names = list(TRANSPORTS)
    parser.add_argument("--transport", nargs="+", choices=EVERY_TRANSPORT, default=names, help="default: all but grpc")
    parser.add_argument("--sample", type=_positive, metavar="N", help="only N cells, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="of the random choice")
    parser.add_argument("--jobs", type=_positive, default=1, metavar="N", help="models at a time, each in a process")
    parser.add_argument("--raw", action="store_true", help="cells as lines of JSON from stdin, outcomes to stdout")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _computed(wanted: Sequence[Cell], options: argparse.Namespace, console: Console) -> Tally:
    """All outcomes, with a line of progress for the models at work."""
    tally, lock = Tally(), threading.Lock()
    texts = [TextColumn("{task.completed}/{task.total} cells"), TextColumn("{task.fields[failures]} failures")]
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), BarColumn(), *texts, *times, console=console) as progress:
        bar = progress.add_task("capturing", total=len(wanted), failures=0)

        def take(outcome: Outcome) -> None:
            with lock:
                tally.outcomes.append(outcome)
                description = f"{outcome.cell.model} D={outcome.cell.stages}"
                progress.update(bar, advance=1, description=description, failures=len(tally.failures))
                if outcome.difference:
                    progress.console.print(f"[red]{outcome.cell}[/]: {outcome.difference}", highlight=False)

        if options.jobs == 1:
            for outcome in outcomes(wanted):
                take(outcome)
        else:
            _spread(wanted, options, take, tally)
    return tally


def _spread(wanted: Sequence[Cell], options: argparse.Namespace, take: Callable[[Outcome], None], tally: Tally) -> None:
    """One process per model, ``--jobs`` of them at a time."""

    def one(model: str) -> None:
        mine = [cell for cell in wanted if cell.model == model]
        command = [sys.executable, "-m", "tests.equivalence.table", "--raw"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with process.stdin as cells_in:
                cells_in.writelines(json.dumps(astuple(cell)) + "\n" for cell in mine)
            done = 0
            for done, line in enumerate(process.stdout, 1):  # noqa: B007  how many there were
                take(_from_line(line))
        if done < len(mine) or process.returncode:
            tally.broken.append(f"{model}: its process ended with {process.returncode} after {done} cells")

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, dict.fromkeys(cell.model for cell in wanted)))


def _to_line(outcome: Outcome) -> str:
    return json.dumps([astuple(outcome.cell), outcome.difference, outcome.tensors, outcome.seconds])


def _from_line(line: str) -> Outcome:
    cell, difference, tensors, seconds = json.loads(line)
    return Outcome(Cell(*cell), difference, tensors, seconds)


def _show(tally: Tally, wanted: Sequence[Cell], seconds: float, console: Console) -> None:
    """The summary: equal of all cells by model and rule, then the failures."""
    table = Table(title="equal cells of all", caption=_caption(tally, wanted, seconds), box=SIMPLE_HEAD, padding=0)
    titles = dict.fromkeys(map(_title, VARIANTS))
    for title in ("model", *titles, *(f"s/cell\n{transport}" for transport in TRANSPORTS)):
        table.add_column(title, justify="left" if title == "model" else "right")
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in tally.outcomes:
        groups[outcome.cell.model, _title(outcome.cell.variant)].append(outcome)
    for model in dict.fromkeys(cell.model for cell in wanted):
        mine = [outcome for outcome in tally.outcomes if outcome.cell.model == model]
        times = ([o.seconds for o in mine if o.cell.transport == transport] for transport in TRANSPORTS)
        means = (f"{sum(part) / len(part):.2f}" if part else "-" for part in times)
        table.add_row(model, *(_share(groups[model, title]) for title in titles), *means)
    console.print(table)
    for outcome in tally.failures:
        console.print(f"[red]failed[/] {outcome.cell}: {outcome.difference}", highlight=False)
    for line in tally.broken:
        console.print(f"[red]broken[/] {line}", highlight=False)


def _title(variant: str) -> str:
    """The column of a variant: predictors share one."""
    rule, *rest = variant.split()
    return "\n".join((rule, *rest[1:]))


def _share(group: Sequence[Outcome]) -> str:
    if not group:
        return "-"
    equal = sum(not outcome.difference for outcome in group)
    return f"{equal}/{len(group)}" if equal == len(group) else f"[red]{equal}/{len(group)}[/]"


def _caption(tally: Tally, wanted: Sequence[Cell], seconds: float) -> str:
    tensors = sum(outcome.tensors for outcome in tally.outcomes)
    equal = len(tally.outcomes) - len(tally.failures)
    return f"{equal} of {len(wanted)} cells equal: {tensors} tensors compared in {seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
