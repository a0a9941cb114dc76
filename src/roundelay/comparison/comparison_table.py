"""A comparison as a table for Markdown, CSV and the screen, and its curves as CSV.

The training loss varies from batch to batch, so a single figure of it is the mean over the last :data:`WINDOW` updates.
Metrics of the job's ``evaluate`` are used as they are.
"""

from __future__ import annotations

import csv
import io
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundelay.comparison.comparison import Compared
from roundelay.comparison.comparison_variants import OWN, Variant
from roundelay.comparison.run_results import LOSS, Point, RunResult, is_per_update
from roundelay.errors import UsageError
from roundelay.ir.plan import Plan
from roundelay.page.scale import seconds, short, size
from roundelay.planning.planning import simulate
from roundelay.schedules import PIPELINE

WINDOW = 10
"""Number of updates over which the training loss is averaged."""

_LOW = re.compile(r"loss|error|entropy|perplexity|bits|nll|mse|mae|rmse|cer\b|wer\b", re.IGNORECASE)

MOST_DIGITS = 5
"""Most digits after the decimal point; a spread that would need more is written with an exponent."""

HIGH, LOW = "high", "low"
KEY, QUALITY, COST, NOTE = "key", "quality", "cost", "note"
"""Groups of columns: names of the variant, what is learned, what it costs, remarks. Each target is one more group."""

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Aims:
    """Targets of metrics, and whether low or high values are better.

    Args:
        targets: metric to its target value.
        better: metric to ``high`` or ``low``. By default ``low`` for names that contain loss, error, entropy,
            perplexity, bits, nll, mse, mae, rmse, cer or wer, else ``high``.
    """

    targets: Mapping[str, float]
    better: Mapping[str, str]

    def __post_init__(self) -> None:
        for name, direction in self.better.items():
            if direction not in (HIGH, LOW):
                raise UsageError(
                    f"--better of metric {name!r}",
                    got=repr(direction),
                    expected="high or low",
                    remedy="Correct --better.",
                )

    def low(self, name: str) -> bool:
        """Whether low values of a metric are better."""
        return self.better.get(name, LOW if name == LOSS or _LOW.search(name) else HIGH) == LOW

    def best(self, name: str, values: Sequence[float]) -> float:
        """The best of the finite values; nan if there is none."""
        finite = [value for value in values if math.isfinite(value)]
        return (min if self.low(name) else max)(finite, default=math.nan)

    def reached(self, name: str, points: Sequence[Point]) -> Point | None:
        """The first point that reaches the target."""
        target, low = self.targets[name], self.low(name)
        return next((p for p in points if (p.value <= target if low else p.value >= target)), None)


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the table.

    Args:
        group: of its column: :data:`KEY` etc., or a target such as ``loss ≤ 0.5``.
        title: of its column.
        text: shown to people.
        values: (column, value) in the CSV file, with None for an empty field.
    """

    group: str
    title: str
    text: str
    values: tuple[tuple[str, Any], ...]


def running_mean(points: Sequence[Point]) -> list[Point]:
    """The mean over the last :data:`WINDOW` updates, from the first full window on; over all of a shorter run."""
    window = min(WINDOW, len(points))
    return [
        Point(points[i].updates, points[i].seconds, statistics.fmean(p.value for p in points[i + 1 - window : i + 1]))
        for i in range(max(window - 1, 0), len(points))
    ]


def reported_curve(result: RunResult, name: str) -> Sequence[Point]:
    """The curve of a metric, from which all its figures are taken: a running mean if every update has a value."""
    points = result.curves.get(name, ())
    return running_mean(points) if is_per_update(name) else points


def metrics_of(compared: Compared) -> list[str]:
    """Names of the loss and of every metric that any run has."""
    return list(dict.fromkeys([LOSS, *(name for result in compared.results.values() for name in result.curves)]))


def table(compared: Compared, aims: Aims) -> list[list[Cell]]:
    """The rows of the table, one per variant, all with the same columns."""
    names = metrics_of(compared)
    own = all(variant.optimizer == OWN for variant in compared.variants)
    return [list(_row(compared, variant, names, aims, own)) for variant in compared.variants]


def _row(compared: Compared, variant: Variant, names: Sequence[str], aims: Aims, own: bool) -> Iterator[Cell]:
    results = compared.of(variant)
    finished = [result for result in results if result.diverged is None]
    plan = compared.plans.get(variant.rule_text)
    if not own:
        yield _plain(KEY, "optimizer", variant.optimizer_text)
    yield _plain(KEY, "rule", variant.rule_text)
    yield _plain(KEY, "M", plan and (plan.micro_batches if plan.layout == PIPELINE else plan.batch_parts))
    for name in names:
        curves = [reported_curve(result, name) for result in finished]
        yield _spread(QUALITY, f"{name}, last", [points[-1].value for points in curves if points])
        best = [aims.best(name, [p.value for p in points]) for points in curves]
        yield _spread(QUALITY, f"{name}, best", [value for value in best if math.isfinite(value)])
    yield _plain(QUALITY, "seeds", len(finished))
    for name in aims.targets:
        yield from _time_to(name, results, aims)
    yield _spread(COST, "samples/s", [result.samples_per_second for result in finished], _whole)
    yield from _memory(plan)
    yield _plain(NOTE, "note", _note(compared, variant, results))


def _plain(group: str, title: str, value: Any) -> Cell:
    return Cell(group, title, "" if value is None else str(value), ((title, value),))


def _whole(value: float) -> str:
    return short(value) if abs(value) < 10 else f"{value:,.0f}"


def _spread(group: str, title: str, values: Sequence[float], as_text: Callable[[float], str] = short) -> Cell:
    """A cell with the mean and the sample standard deviation over seeds."""
    mean = statistics.fmean(values) if values else None
    spread = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
    text = NOTHING if mean is None else as_text(mean) if spread is None else rounded(mean, spread)
    return Cell(group, title, text, ((f"{title}, mean", mean), (f"{title}, spread", spread)))


def rounded(mean: float, spread: float) -> str:
    """Mean and spread as text, both rounded to the second digit of the spread."""
    digits = max(0, 1 - math.floor(math.log10(spread))) if spread > 0 and math.isfinite(spread) else 0
    if 0 < digits <= MOST_DIGITS or spread >= 1:
        return f"{mean:,.{digits}f} ± {spread:,.{digits}f}"
    return f"{short(mean)} ± {short(spread)}"


def _time_to(name: str, results: Sequence[RunResult], aims: Aims) -> Iterator[Cell]:
    """Cells with the median updates and time to the target over the seeds that reach it, and their number."""
    goal = f"{name} {'≤' if aims.low(name) else '≥'} {short(aims.targets[name])}"
    reached = [p for result in results if (p := aims.reached(name, reported_curve(result, name))) is not None]
    updates = statistics.median(p.updates for p in reached) if reached else None
    times = [p.seconds for p in reached if math.isfinite(p.seconds)]
    time = statistics.median(times) if times else None
    count = f"{len(reached)} of {len(results)}" if results else NOTHING
    for what, text, value in (
        ("updates to", NOTHING if updates is None else _whole(updates), updates),
        ("time to", NOTHING if time is None else seconds(time), time),
        ("reached", count, len(reached)),
    ):
        yield Cell(goal, f"{what} {goal}", text, ((f"{what.replace('time', 'seconds')} {goal}", value),))


def _memory(plan: Plan | None) -> Iterator[Cell]:
    """Cells with simulated memory: most weight versions on a worker, bytes of all versions and tapes.

    A worker with two stages has the versions of either and the bytes of both.
    """
    versions = weights = tapes = None
    if plan is not None:
        workers = simulate(plan, batches=2 * plan.num_stages + 4).workers
        versions = max(report.versions_held_peak for report in workers)
        weights = sum(report.versions_held_peak * report.weight_bytes_peak for report in workers)
        tapes = sum(report.tape_bytes_peak for report in workers)
    yield _plain(COST, "versions", versions)
    for title, column, amount in (
        ("their size", "versions, bytes", weights),
        ("activations", "activations, bytes", tapes),
    ):
        yield Cell(COST, title, "" if amount is None else size(amount), ((column, amount),))


def _note(compared: Compared, variant: Variant, results: Sequence[RunResult]) -> str:
    if variant.rule_text in compared.refused:
        return f"refused: {compared.refused[variant.rule_text]}"
    diverged = [f"{r.diverged} (seed {r.seed})" for r in results if r.diverged is not None]
    return f"diverged at update {', '.join(diverged)}" if diverged else ""


def markdown(rows: Sequence[Sequence[Cell]]) -> str:
    """The table as Markdown."""
    lines = [[cell.title for cell in rows[0]], ["---"] * len(rows[0]), *([c.text for c in row] for row in rows)]
    return "".join("| " + " | ".join(_escaped(text) for text in line) + " |\n" for line in lines)


def _escaped(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("|", r"\|"))


def spreadsheet(rows: Sequence[Sequence[Cell]]) -> str:
    """The table as CSV, with numbers that are not rounded."""
    lines = [[value for cell in row for _, value in cell.values] for row in rows]
    return _csv([[name for cell in rows[0] for name, _ in cell.values], *lines])


def curves_csv(compared: Compared) -> str:
    """Every value of every run as CSV."""
    lines: list[list[Any]] = [["optimizer", "rule", "seed", "quantity", "updates", "seconds", "value"]]
    for variant in compared.variants:
        for result in compared.of(variant):
            for name, points in result.curves.items():
                key = [variant.optimizer_text, variant.rule_text, result.seed, name]
                lines += [[*key, p.updates, p.seconds, p.value] for p in points]
    return _csv(lines)


def _csv(lines: Sequence[Sequence[Any]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue()
