"""A comparison as tables and curves: what is the same for people, for spreadsheets and for figures, worked out once.

The training loss jumps from batch to batch, so wherever one number stands for it, it is the mean of the last
:data:`WINDOW` updates. Metrics of the job's ``evaluate`` are taken as they are.
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

from roundelay.api.comparison import Compared
from roundelay.api.comparison_variants import OWN, Variant
from roundelay.api.run_results import LOSS, Point, RunResult, each_update
from roundelay.api.simulating import simulate
from roundelay.errors import UsageError
from roundelay.ir.plan import Plan
from roundelay.page.scale import seconds, short, size

WINDOW = 10
"""Updates over which the training loss is averaged."""

_LOW = re.compile(r"loss|error|entropy|perplexity|bits|nll|mse|mae|rmse|cer\b|wer\b", re.IGNORECASE)

MOST_DIGITS = 5
"""Digits behind the point; a spread that would need more is written with an exponent."""

HIGH, LOW = "high", "low"
KEY, QUALITY, COST, NOTE = "key", "quality", "cost", "note"
"""What a cell is about: which line it is, how well it learns, what that takes, a remark; or a target, by its text."""

NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Aims:
    """What is wanted of a metric.

    Args:
        targets: metric to the value that is to be reached.
        better: metric to ``high`` or ``low``, where its name does not say so: the loss, and whatever is called loss,
            error, entropy, perplexity, bits, nll, mse, mae, cer or wer, is better low, anything else high.
    """

    targets: Mapping[str, float]
    better: Mapping[str, str]

    def __post_init__(self) -> None:
        for name, word in self.better.items():
            if word not in (HIGH, LOW):
                raise UsageError(
                    f"--better of metric {name!r}", got=repr(word), expected="high or low", remedy="Correct --better."
                )

    def low(self, name: str) -> bool:
        """Whether less is better."""
        return self.better.get(name, LOW if name == LOSS or _LOW.search(name) else HIGH) == LOW

    def best(self, name: str, values: Sequence[float]) -> float:
        """The best of some values; nan without any."""
        finite = [value for value in values if math.isfinite(value)]
        return (min if self.low(name) else max)(finite, default=math.nan)

    def reached(self, name: str, points: Sequence[Point]) -> Point | None:
        """The first point that reaches the target."""
        target, low = self.targets[name], self.low(name)
        return next((p for p in points if (p.value <= target if low else p.value >= target)), None)


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a line.

    Args:
        part: what it is about: :data:`KEY` and so on, or a target such as ``loss ≤ 0.5``.
        title: its column, for people.
        text: what it says there.
        values: its columns in a spreadsheet, with what stands there; None where there is nothing.
    """

    part: str
    title: str
    text: str
    values: tuple[tuple[str, Any], ...]


def settled(points: Sequence[Point]) -> list[Point]:
    """The loss as the mean of the last :data:`WINDOW` updates, from the first such mean on; fewer in a shorter run."""
    reach = min(WINDOW, len(points))
    return [
        Point(points[i].updates, points[i].seconds, statistics.fmean(p.value for p in points[i + 1 - reach : i + 1]))
        for i in range(max(reach - 1, 0), len(points))
    ]


def measure_of(outcome: RunResult, name: str) -> Sequence[Point]:
    """A curve as numbers are taken from it: of what each update tells, such as the loss, its running mean."""
    points = outcome.curves.get(name, ())
    return settled(points) if each_update(name) else points


def metrics_of(compared: Compared) -> list[str]:
    """The loss, and every metric that any run has."""
    return list(dict.fromkeys([LOSS, *(name for one in compared.outcomes.values() for name in one.curves)]))


def table(compared: Compared, aims: Aims) -> list[list[Cell]]:
    """A line for every variant, with the same columns each."""
    names = metrics_of(compared)
    own = all(variant.optimizer == OWN for variant in compared.variants)
    return [list(_line(compared, variant, names, aims, own)) for variant in compared.variants]


def _line(compared: Compared, variant: Variant, names: Sequence[str], aims: Aims, own: bool) -> Iterator[Cell]:
    every = compared.of(variant)
    done = [outcome for outcome in every if outcome.diverged is None]
    plan = compared.plans.get(variant.rule_text)
    if not own:
        yield _plain(KEY, "optimizer", variant.optimizer_text)
    yield _plain(KEY, "rule", variant.rule_text)
    yield _plain(KEY, "M", plan and plan.micro_batches)
    for name in names:
        curves = [measure_of(outcome, name) for outcome in done]
        yield _spread(QUALITY, f"{name}, last", [points[-1].value for points in curves if points])
        best = [aims.best(name, [p.value for p in points]) for points in curves]
        yield _spread(QUALITY, f"{name}, best", [value for value in best if math.isfinite(value)])
    yield _plain(QUALITY, "seeds", len(done))
    for name in aims.targets:
        yield from _time_to(name, every, aims)
    yield _spread(COST, "samples/s", [outcome.samples_per_second for outcome in done], _whole)
    yield from _memory(plan)
    yield _plain(NOTE, "note", _note(compared, variant, every))


def _plain(part: str, title: str, value: Any) -> Cell:
    return Cell(part, title, "" if value is None else str(value), ((title, value),))


def _whole(value: float) -> str:
    return short(value) if abs(value) < 10 else f"{value:,.0f}"


def _spread(part: str, title: str, values: Sequence[float], shown: Callable[[float], str] = short) -> Cell:
    """Mean and sample standard deviation over seeds."""
    mean = statistics.fmean(values) if values else None
    spread = statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None
    text = NOTHING if mean is None else shown(mean) if spread is None else rounded(mean, spread)
    return Cell(part, title, text, ((f"{title}, mean", mean), (f"{title}, spread", spread)))


def rounded(mean: float, spread: float) -> str:
    """Both to the second digit of the spread: more of them say nothing."""
    digits = max(0, 1 - math.floor(math.log10(spread))) if spread > 0 and math.isfinite(spread) else 0
    if 0 < digits <= MOST_DIGITS or spread >= 1:
        return f"{mean:,.{digits}f} ± {spread:,.{digits}f}"
    return f"{short(mean)} ± {short(spread)}"


def _time_to(name: str, outcomes: Sequence[RunResult], aims: Aims) -> Iterator[Cell]:
    """Medians over the seeds that came there, and how many did."""
    goal = f"{name} {'≤' if aims.low(name) else '≥'} {short(aims.targets[name])}"
    found = [p for outcome in outcomes if (p := aims.reached(name, measure_of(outcome, name))) is not None]
    updates = statistics.median(p.updates for p in found) if found else None
    times = [p.seconds for p in found if math.isfinite(p.seconds)]
    time = statistics.median(times) if times else None
    reached = f"{len(found)} of {len(outcomes)}" if outcomes else NOTHING
    for what, text, value in (
        ("updates to", NOTHING if updates is None else _whole(updates), updates),
        ("time to", NOTHING if time is None else seconds(time), time),
        ("reached", reached, len(found)),
    ):
        yield Cell(goal, f"{what} {goal}", text, ((f"{what.replace('time', 'seconds')} {goal}", value),))


def _memory(plan: Plan | None) -> Iterator[Cell]:
    """Weight versions of the worker that holds most, their bytes on all, and those of all tapes; simulated.

    Of a worker with two stages: the versions of either, the bytes of both.
    """
    versions = held = tapes = None
    if plan is not None:
        workers = simulate(plan, batches=2 * plan.num_stages + 4).workers
        bytes_of = [sum(plan.stages[k].parameter_bytes for k in stages) for stages in plan.worker_stages]
        versions = max(report.versions_held_peak for report in workers)
        held = sum(r.versions_held_peak * own for r, own in zip(workers, bytes_of, strict=True))
        tapes = sum(report.tape_bytes_peak for report in workers)
    yield _plain(COST, "versions", versions)
    for title, column, amount in (
        ("their size", "versions, bytes", held),
        ("activations", "activations, bytes", tapes),
    ):
        yield Cell(COST, title, "" if amount is None else size(amount), ((column, amount),))


def _note(compared: Compared, variant: Variant, outcomes: Sequence[RunResult]) -> str:
    if variant.rule_text in compared.refused:
        return f"refused: {compared.refused[variant.rule_text]}"
    first = [f"{o.diverged} (seed {o.seed})" for o in outcomes if o.diverged is not None]
    return f"diverged at update {', '.join(first)}" if first else ""


def markdown(rows: Sequence[Sequence[Cell]]) -> str:
    """The table for people."""
    lines = [[cell.title for cell in rows[0]], ["---"] * len(rows[0]), *([c.text for c in row] for row in rows)]
    return "".join("| " + " | ".join(_escaped(text) for text in line) + " |\n" for line in lines)


def _escaped(text: str) -> str:
    return re.sub(r"\s+", " ", text.replace("|", r"\|"))


def spreadsheet(rows: Sequence[Sequence[Cell]]) -> str:
    """The table as CSV, with unrounded numbers."""
    lines = [[value for cell in row for _, value in cell.values] for row in rows]
    return _csv([[name for cell in rows[0] for name, _ in cell.values], *lines])


def curves_csv(compared: Compared) -> str:
    """Every value of every run, a line each."""
    lines: list[list[Any]] = [["optimizer", "rule", "seed", "quantity", "updates", "seconds", "value"]]
    for variant in compared.variants:
        for outcome in compared.of(variant):
            for name, points in outcome.curves.items():
                about = [variant.optimizer_text, variant.rule_text, outcome.seed, name]
                lines += [[*about, p.updates, p.seconds, p.value] for p in points]
    return _csv(lines)


def _csv(lines: Sequence[Sequence[Any]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(lines)
    return file.getvalue()
