"""``roundelay compare``: its options, the progress line, the tables at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from roundelay.api.comparison import Compared, ComparisonEvent, Observe, RunFinished, RunResumed, RunStarted, compare
from roundelay.api.comparison_charts import Written, write_comparison
from roundelay.api.comparison_table import COST, KEY, NOTE, QUALITY, Aims, Cell
from roundelay.api.comparison_variants import OPTIMIZERS, parse_numbers, parse_pairs
from roundelay.api.events import Updated
from roundelay.cli import options as o
from roundelay.cli.job_file import PathResolver, job_maker
from roundelay.cli.screen import announce, show_json, stderr, stdout, table
from roundelay.errors import RunError

_TITLES = {QUALITY: "What is learned", COST: "What it takes"}

Rules = Annotated[
    str,
    typer.Option(help="Rules separated by commas, each RULE[:PREDICTOR][:MODE]; `all` for every known rule."),
]
Optimizers = Annotated[
    str | None,
    typer.Option(
        help=f"Any of {', '.join(OPTIMIZERS)}, in place of the job's own optimizer and its parameter groups; the "
        "scheduler is kept. [default: the job's]"
    ),
]
Rates = Annotated[list[str] | None, typer.Option("--lr", help="Learning rate of an optimizer: adamw=1e-3.")]
TimeTo = Annotated[
    list[str] | None, typer.Option(help="Show updates and time until a metric reaches a value: loss=0.5.")
]
Better = Annotated[
    list[str] | None,
    typer.Option(help="Whether high or low values of a metric are better: score=low. [default: by its name]"),
]
Steps = Annotated[int | None, typer.Option(help="Updates of every run. [default: the job's own number; one epoch]")]
Epochs = Annotated[int | None, typer.Option(help="Epochs of every run, instead of --steps.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the comparison; finished runs in it are not repeated. [default: compare/JOB]"),
]


@o.expand_options
def compare_command(
    job_file: o.JobFile,
    *,
    rules: Rules = "all",
    seeds: Annotated[int, typer.Option(help="Seeds 0, 1, ...: weights, data and random numbers.", min=1)] = 5,
    optimizers: Optimizers = None,
    rates: Rates = None,
    time_to: TimeTo = None,
    better: Better = None,
    choices: o.CommonChoices,
    steps: Steps = None,
    epochs: Epochs = None,
    out: Out = None,
    as_json: o.Json = False,
) -> None:
    """Train under several rules from the same weights, seed by seed; leave a table and learning curves."""
    o.exclusive(steps, epochs)
    o.refuse_launcher("compare")
    aims = Aims(parse_numbers(time_to or [], "--time-to"), parse_pairs(better or [], "--better"))
    learning_rates = parse_numbers(rates or [], "--lr")
    folder, resolver = out or Path("compare") / job_file.stem, PathResolver()
    absolute = folder.absolute()  # job() is called once per seed, and may change the working folder
    source = _digest(job_file)
    make = job_maker(job_file)
    announce("Capturing and planning ...", as_json)
    with _resumable(absolute), _live(as_json) as notify:
        compared = compare(
            make,
            out=absolute,
            rules=_split(rules),
            seeds=seeds,
            optimizers=_split(optimizers or ""),
            rates=learning_rates,
            steps=steps,
            epochs=epochs,
            source=source,
            notify=notify,
            **choices.given(),
        )
    folder = resolver.of(folder)
    written = write_comparison(compared, folder, aims)
    if as_json:
        show_json(_json(written))
    else:
        _show(compared, written, folder)


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _digest(job_file: Path) -> str:
    """Name and digest of the job file; not of what it imports."""
    return f"{job_file.name} {hashlib.sha256(job_file.read_bytes()).hexdigest()[:16]}"


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """When a comparison ends early, print how many finished runs are kept."""
    try:
        yield
    except (KeyboardInterrupt, RunError):
        kept = len(list(folder.glob("runs/*/summary.json")))
        if kept:
            stderr.print(
                f"Finished runs are kept in {folder}: {kept}. The same command continues with the others.", markup=False
            )
        raise


@contextmanager
def _live(quiet: bool) -> Iterator[Observe]:
    """A function that shows the events of a comparison as a progress line."""
    line = _ProgressLine()
    try:
        yield (lambda event: None) if quiet else line.note
    finally:
        if line.bar.live.is_started:
            line.bar.stop()


class _ProgressLine:
    """Shows which run of how many is in progress, and the remaining time."""

    def __init__(self) -> None:
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("run"),
            MofNCompleteColumn(),
            BarColumn(bar_width=12),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=stderr,
        )
        self._task = self.bar.add_task("...", total=None)
        self._run: RunStarted | None = None

    def note(self, event: ComparisonEvent) -> None:
        """Show an event."""
        if isinstance(event, RunStarted):
            if event.number == 1 and event.finished_before:
                stderr.print(f"{event.finished_before} runs are finished already; {event.total} are left.")
            self._run = event
        elif isinstance(event, RunResumed) and self._run is not None:
            run = f"{self._run.variant.name} seed {self._run.seed}"
            stderr.print(f"{run} was interrupted; it continues after update {event.updates}.", markup=False)
        elif isinstance(event, Updated) and self._run is not None:
            self._update(self._run, event)
        elif isinstance(event, RunFinished) and self._run is not None:
            self.bar.update(self._task, completed=self._run.number)
            self.bar.stop()  # its thread must not be alive when the next run forks its workers

    def _update(self, run: RunStarted, event: Updated) -> None:
        self.bar.start()  # only now: its thread must not be alive while workers are forked
        done = run.number - 1 + ((event.update + 1) / run.updates if run.updates else 0.0)
        status = f"{run.variant.name} seed {run.seed}  update {event.update + 1}  loss {event.loss:.4f}"
        self.bar.update(self._task, total=run.total, completed=done, description=status)


def _json(written: Written) -> dict[str, Any]:
    return {
        "rows": [{name: value for cell in row for name, value in cell.values} for row in written.rows],
        "files": [str(path) for path in written.paths],
        "missing": written.missing,
    }


def _show(compared: Compared, written: Written, folder: Path) -> None:
    """Print one table per group of columns, to fit the width of a screen, then why rules were refused or diverged."""
    of_note: dict[str, list[str]] = {}
    for row in written.rows:
        of_note.setdefault(row[-1].text, []).append(_name(row))
    rows_of = zip(compared.variants, written.rows, strict=True)
    shown = [row for variant, row in rows_of if variant.rule_text not in compared.refused]
    for group in dict.fromkeys(cell.group for row in shown[:1] for cell in row if cell.group not in (KEY, NOTE)):
        columns = ["", *(_short(cell) for cell in written.rows[0] if cell.group == group)]
        rows = [[_name(row), *(c.text for c in row if c.group == group)] for row in shown]
        group_table = table(_TITLES.get(group, f"How soon: {group}"), columns, rows)
        group_table.columns[0].no_wrap = True
        stdout.print(group_table)
        stdout.print()
    for note, names in of_note.items():
        if note:
            stdout.print(f"{', '.join(names)}: {note}", markup=False)
    if written.missing is not None:
        stderr.print(written.missing, markup=False)
    stderr.print(f"Table and curves: {folder} ({', '.join(path.name for path in written.paths)})", markup=False)


def _short(cell: Cell) -> str:
    """The column's title, without the target, which is in the title of the table."""
    return cell.title.removesuffix(cell.group).strip().removesuffix(" to")


def _name(row: Sequence[Cell]) -> str:
    """The row's name: the optimizer, if several are compared, the rule and M."""
    *names, micro_batches = (cell.text for cell in row if cell.group == KEY)
    return "/".join(names) + (f" M={micro_batches}" if micro_batches else "")
