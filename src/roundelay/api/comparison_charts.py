"""A comparison's curves, as means over its seeds; and everything that is written of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roundelay.api.comparison import Compared
from roundelay.api.comparison_table import (
    WINDOW,
    Aims,
    Cell,
    curves_csv,
    markdown,
    measure_of,
    metrics_of,
    spreadsheet,
    table,
)
from roundelay.api.comparison_variants import OWN
from roundelay.api.run_results import Point, RunResult, each_update, write
from roundelay.checkpoint.atomic_files import replacing_bytes
from roundelay.errors import UsageError
from roundelay.page.comparison_page import Chart, comparison_page
from roundelay.page.line_chart import Points
from roundelay.page.png import drawer, picture

TITLE = "Update rules compared"


@dataclass(frozen=True, slots=True)
class Written:
    """What was written of a comparison.

    Args:
        rows: the table, a row for every line.
        paths: every file.
        missing: why there is no picture, if there is none.
    """

    rows: Sequence[Sequence[Cell]]
    paths: tuple[Path, ...]
    missing: str | None


def write_comparison(compared: Compared, folder: Path, aims: Aims) -> Written:
    """Write table, curves and figures into a folder.

    Args:
        compared: what came of the comparison.
        folder: where; files of an earlier time are replaced.
        aims: targets, and which way is better.

    Raises:
        RunError: a file cannot be written.
    """
    rows = table(compared, aims)
    told = (tuple(c.title for c in rows[0]), *(tuple(c.text for c in row) for row in rows))
    about, charts = explained(compared, aims), charts_of(compared)
    texts = {
        "table.md": markdown(rows) + "\n" + "".join(f"{line}\n" for line in about),
        "table.csv": spreadsheet(rows),
        "curves.csv": curves_csv(compared),
        "curves.html": comparison_page(TITLE, about, told, charts),
    }
    for name, text in texts.items():
        write(folder / name, text)
    names, missing = [*texts], None
    try:
        drawn = picture(drawer(), TITLE, charts)
        with replacing_bytes(folder / "curves.png") as file:
            file.write(drawn)
        names.append("curves.png")
    except UsageError as error:
        missing = f"No {folder / 'curves.png'}: {error.got}. {error.remedy}"
    return Written(rows, tuple(folder / name for name in names), missing)


def explained(compared: Compared, aims: Aims) -> list[str]:
    """What the numbers mean, in sentences."""
    names = metrics_of(compared)
    count, shown = len(compared.seeds), [f"{name} {'low' if aims.low(name) else 'high'}" for name in names]
    lines = [
        f"Mean ± standard deviation over {count} seed{'s' if count > 1 else ''}, without those that diverged. A seed "
        "gives every rule the same initial weights and the same data in the same order.",
        f"The loss is the training loss as the mean of {WINDOW} updates. Better is: {', '.join(shown)}.",
        "M: micro-batches of a batch. versions: most weight versions that one stage holds, simulated; their size and "
        "that of activations are sums over stages.",
    ]
    if aims.targets:
        lines.append(
            "Updates and time to a target: the median over the seeds that reach it; time runs from a run's start, and "
            "evaluations beside it."
        )
    unknown = [name for name in aims.targets if name not in names]
    if unknown:
        lines.append(f"Nothing called {', '.join(unknown)} was measured, but {', '.join(names)}.")
    return lines


def charts_of(compared: Compared) -> list[Chart]:
    """A chart for the loss and for every metric; a line is drawn if any of its runs has points."""
    return [_chart(compared, name) for name in metrics_of(compared)]


def _chart(compared: Compared, name: str) -> Chart:
    own = all(variant.optimizer == OWN for variant in compared.variants)
    over_updates: list[tuple[str, Points]] = []
    over_time: list[tuple[str, Points]] = []
    for variant in compared.variants:
        points = mean_curve(compared.of(variant), name)
        label = variant.rule_text if own else variant.name
        over_updates.append((label, [(float(p.updates), p.value) for p in points]))
        over_time.append((label, [(p.seconds, p.value) for p in points if math.isfinite(p.seconds)]))
    return Chart(name, over_updates, over_time, dots=not each_update(name))


def mean_curve(outcomes: Sequence[RunResult], name: str) -> list[Point]:
    """The mean over seeds, of value and of seconds, where all have a point; of those that did not diverge, if any."""
    whole = [outcome for outcome in outcomes if outcome.diverged is None] or list(outcomes)
    curves = [{p.updates: p for p in measure_of(outcome, name)} for outcome in whole]
    shared = [at for at in curves[0] if all(at in curve for curve in curves)] if curves else []
    return [
        Point(
            at, *(statistics.fmean(part) for part in zip(*((c[at].seconds, c[at].value) for c in curves), strict=True))
        )
        for at in shared
    ]
