"""``roundelay compare``: its options, the live line, the table at the end."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from roundelay.api.comparison import Begun, Ended, Resumed, compare
from roundelay.api.comparison_charts import Written, write_comparison
from roundelay.api.comparison_table import COST, KEY, NOTE, QUALITY, Aims, Cell
from roundelay.api.comparison_variants import OPTIMIZERS, numbers, pairs
from roundelay.api.events import Event, Updated
from roundelay.cli import options as o
from roundelay.cli.job_file import PathResolver, job_maker
from roundelay.cli.screen import announce, show_json, stderr, stdout, table
from roundelay.errors import RunError
from roundelay.page.scale import seconds as duration

_TITLES = {QUALITY: "What is learned", COST: "What it takes"}

Rules = Annotated[
    str,
    typer.Option(
        help="Rules with commas between them, each RULE[:PREDICTOR][:MODE]; `all` for every one that is known."
    ),
]
Optimizers = Annotated[
    str | None,
    typer.Option(
        help=f"Any of {', '.join(OPTIMIZERS)}, in place of the job's own and its parameter groups; the scheduler "
        "stays. [default: the job's]"
    ),
]
Rates = Annotated[list[str] | None, typer.Option("--lr", help="Learning rate of an optimizer: adamw=1e-3.")]
TimeTo = Annotated[
    list[str] | None, typer.Option(help="OnWait updates and time until a metric reaches a value: loss=0.5.")
]
Better = Annotated[
    list[str] | None, typer.Option(help="Whether more is better in a metric whose name does not say so: score=low.")
]
Steps = Annotated[int | None, typer.Option(help="Updates of every run. [default: the job's own number; one epoch]")]
Epochs = Annotated[int | None, typer.Option(help="Epochs of every run, instead of --steps.")]
Out = Annotated[
    Path | None, typer.Option(help="The comparison's folder; what is finished there is kept. [default: compare/JOB]")
]


def compare_command(
    job_file: o.JobFile,
    rules: Rules = "all",
    seeds: Annotated[int, typer.Option(help="Seeds 0, 1, ...: weights, data and random numbers.", min=1)] = 5,
    optimizers: Optimizers = None,
    rates: Rates = None,
    time_to: TimeTo = None,
    better: Better = None,
    workers: o.Workers = None,
    micro_batches: o.MicroBatches = None,
    recompute: o.Recompute = None,
    compiled: o.Compile = None,
    precision: o.Precision = None,
    loss_scale: o.LossScale = None,
    clip: o.Clip = None,
    transport: o.Transport = None,
    cuts: o.Cuts = None,
    devices: o.Devices = None,
    deadline_s: o.Deadline = None,
    steps: Steps = None,
    epochs: Epochs = None,
    out: Out = None,
    as_json: o.Json = False,
) -> None:
    """Train under several rules from the same weights, seed by seed; leave a table and learning curves."""
    o.exclusive(steps, epochs)
    o.refuse_launcher("compare")
    aims = Aims(numbers(time_to or [], "--time-to"), pairs(better or [], "--better"))
    folder = out or Path("compare") / job_file.stem
    asked = {
        "rules": _listed(rules),
        "seeds": seeds,
        "optimizers": _listed(optimizers or ""),
        "rates": numbers(rates or [], "--lr"),
        "workers": workers,
        "cuts": cuts,
        "steps": steps,
        "epochs": epochs,
        "micro_batches": micro_batches,
        "recompute": recompute,
        "compile": compiled,
        "precision": precision,
        "loss_scale": loss_scale,
        "clip": clip,
        "transport": transport,
        "devices": devices,
        "deadline_s": deadline_s,
    }
    places, source = PathResolver(), _digest(job_file)
    lasting = folder.absolute()  # jobs are made in it, one for each seed, and each may go elsewhere
    make = job_maker(job_file)
    announce("Capturing and planning ...", as_json)
    with _resumable(lasting), _live(as_json) as notify:
        compared = compare(make, out=lasting, source=source, notify=notify, **asked)  # type: ignore[arg-type]
    folder = places.of(folder)
    written = write_comparison(compared, folder, aims)
    if as_json:
        show_json(_json(written))
    else:
        _show(written, folder)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _digest(job_file: Path) -> str:
    """Of the job file's content; not of what it imports."""
    return f"{job_file.name} {hashlib.sha256(job_file.read_bytes()).hexdigest()[:16]}"


@contextmanager
def _resumable(folder: Path) -> Iterator[None]:
    """Say, when a comparison ends early, that nothing finished is lost."""
    try:
        yield
    except (KeyboardInterrupt, RunError):
        kept = len(list((folder / "runs").glob("*.json"))) if (folder / "runs").is_dir() else 0
        if kept:
            stderr.print(f"Finished runs stay in {folder}: {kept}. The same command goes on behind them.", markup=False)
        raise


@contextmanager
def _live(quiet: bool) -> Iterator[Callable[[Begun | Resumed | Ended | Event], None]]:
    """The live line of a comparison, as what is to be notified."""
    line = _Line()
    try:
        yield (lambda event: None) if quiet else line.note
    finally:
        if line.bar.live.is_started:
            line.bar.stop()


class _Line:
    """Which run of how many, and how long it will take."""

    def __init__(self) -> None:
        self.bar = Progress(
            SpinnerColumn(),
            TextColumn("run"),
            MofNCompleteColumn(),
            BarColumn(bar_width=12),
            TextColumn("{task.description}", markup=False),
            console=stderr,
        )
        self._began = time.perf_counter()
        self._run: Begun | None = None

    def note(self, event: Begun | Resumed | Ended | Event) -> None:
        """Show what an event tells."""
        if isinstance(event, Begun):
            self._begin(event)
        elif isinstance(event, Resumed) and self._run is not None:
            where = f"{self._run.variant.name} seed {self._run.seed}"
            stderr.print(f"{where} was interrupted; it goes on after update {event.updates}.", markup=False)
        elif isinstance(event, Updated):
            self._update(event)
        elif isinstance(event, Ended):
            self.bar.advance(self.bar.task_ids[0])
            self.bar.stop()  # the next run may fork its workers: no thread of the line may be alive then

    def _begin(self, run: Begun) -> None:
        if not self.bar.task_ids:
            self._began = time.perf_counter()
            self.bar.add_task("...", total=run.total)
            if run.found:
                stderr.print(f"{run.found} runs were finished before; {run.total} are left.")
        self._run = run

    def _update(self, event: Updated) -> None:
        run = self._run
        assert run is not None, "a run begins before its updates"
        self.bar.start()  # only now: workers have been forked
        done = run.number - 1 + ((event.update + 1) / run.updates if run.updates else 0.0)
        left = (time.perf_counter() - self._began) * (run.total - done) / done if done > 0 else 0.0
        rest = f"about {duration(max(1.0, round(left)))} left  " if done > 0 else ""
        about = f"{run.variant.name} seed {run.seed}  update {event.update + 1}  loss {event.loss:.4f}"
        self.bar.update(self.bar.task_ids[0], description=rest + about)


def _json(written: Written) -> dict[str, Any]:
    return {
        "rows": [{name: value for cell in row for name, value in cell.values} for row in written.rows],
        "files": [str(path) for path in written.paths],
        "missing": written.missing,
    }


def _show(written: Written, folder: Path) -> None:
    """A table for each part, so that they fit on a screen of usual width."""
    names = [_name(row) for row in written.rows]
    for part in dict.fromkeys(cell.part for cell in written.rows[0] if cell.part not in (KEY, NOTE)):
        columns = ["", *(_short(cell) for cell in written.rows[0] if cell.part == part)]
        rows = [[n, *(c.text for c in row if c.part == part)] for n, row in zip(names, written.rows, strict=True)]
        shown = table(_TITLES.get(part, f"How soon: {part}"), columns, rows)
        shown.columns[0].no_wrap = True
        stdout.print(shown)
        stdout.print()
    for name, row in zip(names, written.rows, strict=True):
        if row[-1].text:
            stdout.print(f"{name}: {row[-1].text}", markup=False)
    if written.missing is not None:
        stderr.print(written.missing, markup=False)
    stderr.print(f"Table and curves: {folder} ({', '.join(path.name for path in written.paths)})", markup=False)


def _short(cell: Cell) -> str:
    """The column's title, without the target that stands above the table."""
    return cell.title.removesuffix(cell.part).strip().removesuffix(" to")


def _name(row: Sequence[Cell]) -> str:
    """The line's name: optimizer, if several are compared, rule and M."""
    *words, micro_batches = (cell.text for cell in row if cell.part == KEY)
    return "/".join(words) + (f" M={micro_batches}" if micro_batches else "")
