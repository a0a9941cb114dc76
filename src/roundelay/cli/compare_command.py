"""``roundelay compare``: the progress line, the tables at the end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from roundelay.cli.changed_by_job import PathResolver
from roundelay.cli.compare_options import CompareOptions
from roundelay.cli.screen import announce, plan_warnings_as_lines, show_json, stderr, stdout, table
from roundelay.comparison.comparison import (
    Compared,
    ComparisonEvent,
    Observe,
    RunFinished,
    RunResumed,
    RunStarted,
    compare,
)
from roundelay.comparison.comparison_charts import Written, write_comparison
from roundelay.comparison.comparison_table import COST, KEY, NOTE, QUALITY, Aims, Cell
from roundelay.comparison.comparison_variants import parse_numbers, parse_pairs, rule_of_cuts
from roundelay.errors import RunError
from roundelay.planner.plan_options import Choices
from roundelay.planning.check_here import check_here
from roundelay.planning.job_file import job_maker
from roundelay.session.events import Updated

_TITLES = {QUALITY: "What is learned", COST: "What it takes"}


def compare_command(job_file: Path, options: CompareOptions, choices: Choices, *, as_json: bool) -> None:
    """Train under several rules from the same weights, seed by seed; leave a table and learning curves.

    Args:
        job_file: defines the job.
        options: of the comparison.
        choices: for the plans of all rules.
        as_json: print one JSON object.
    """
    aims = Aims(parse_numbers(options.time_to or [], "--time-to"), parse_pairs(options.better or [], "--better"))
    folder, resolver = options.out or Path("compare") / job_file.stem, PathResolver()
    absolute = folder.absolute()  # job() is called once per seed, and may change the working folder
    source = _digest(job_file)
    check_here(replace(choices, rule=rule_of_cuts(choices.layout)))
    make = job_maker(job_file)
    announce("Capturing and planning ...", as_json)
    with _resumable(absolute), plan_warnings_as_lines(), _live(as_json) as notify:
        compared = compare(
            make,
            out=absolute,
            rules=options.rule_texts,
            seeds=options.seeds,
            optimizers=options.optimizer_names,
            rates=parse_numbers(options.rates or [], "--lr"),
            steps=options.steps,
            epochs=options.epochs,
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
