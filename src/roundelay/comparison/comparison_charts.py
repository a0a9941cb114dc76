"""Curves of a comparison as means over seeds, and the files with its table and curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from roundelay.checkpoint.atomic_files import replacing_bytes
from roundelay.comparison.comparison import Compared
from roundelay.comparison.comparison_folder import write
from roundelay.comparison.comparison_table import (
    WINDOW,
    Aims,
    Cell,
    curves_csv,
    markdown,
    metrics_of,
    reported_curve,
    spreadsheet,
    table,
)
from roundelay.comparison.comparison_variants import OWN
from roundelay.comparison.run_results import Point, RunResult, is_per_update
from roundelay.errors import UsageError
from roundelay.page.comparison_page import Chart, comparison_page
from roundelay.page.line_chart import Points
from roundelay.page.png import draw_png, load_matplotlib

TITLE = "Update rules compared"


@dataclass(frozen=True, slots=True)
class Written:
    """The files of a comparison.

    Args:
        rows: the table, a row per variant.
        paths: all files.
        missing: why there is no PNG file, or None.
    """

    rows: Sequence[Sequence[Cell]]
    paths: tuple[Path, ...]
    missing: str | None


def write_comparison(compared: Compared, folder: Path, aims: Aims) -> Written:
    """Write the table, the curves and the figures into a folder.

    Args:
        compared: the finished comparison.
        folder: where; existing files are replaced.
        aims: targets of metrics, and whether low or high is better.

    Raises:
        RunError: a file cannot be written.
    """
    rows = table(compared, aims)
    text_rows = (tuple(c.title for c in rows[0]), *(tuple(c.text for c in row) for row in rows))
    about, charts = explanations(compared, aims), [chart_of(compared, name) for name in metrics_of(compared)]
    texts = {
        "table.md": markdown(rows) + "\n" + "".join(f"{line}\n" for line in about),
        "table.csv": spreadsheet(rows),
        "curves.csv": curves_csv(compared),
        "curves.html": comparison_page(TITLE, about, text_rows, charts),
    }
    for name, text in texts.items():
        write(folder / name, text)
    names, missing = [*texts], None
    try:
        png = draw_png(load_matplotlib(), TITLE, charts)
        with replacing_bytes(folder / "curves.png") as file:
            file.write(png)
        names.append("curves.png")
    except UsageError as error:
        missing = f"No {folder / 'curves.png'}: {error.got}. {error.remedy}"
    return Written(rows, tuple(folder / name for name in names), missing)


def explanations(compared: Compared, aims: Aims) -> list[str]:
    """Sentences that explain the numbers of the table."""
    names = metrics_of(compared)
    count, directions = len(compared.seeds), [f"{name} {'low' if aims.low(name) else 'high'}" for name in names]
    lines = [
        f"Mean ± standard deviation over {count} seed{'s' if count > 1 else ''}, without runs that diverged. With the "
        "same seed, every rule has the same initial weights and the same data in the same order.",
        f"The loss is the training loss, mean of {WINDOW} updates. Better is: {', '.join(directions)}.",
        "M: micro-batches per batch. versions: the largest number of weight versions on one stage, simulated; their "
        "size and that of activations are sums over stages.",
    ]
    if aims.targets:
        lines.append(
            "Updates and time to a target: the median over the seeds that reach it; time starts with the run, and "
            "evaluations run in parallel."
        )
    unknown = [name for name in aims.targets if name not in names]
    if unknown:
        lines.append(f"No metric is called {', '.join(unknown)}; there are {', '.join(names)}.")
    return lines


def chart_of(compared: Compared, name: str) -> Chart:
    """A chart for the loss or for a metric, with one line per variant."""
    own = all(variant.optimizer == OWN for variant in compared.variants)
    over_updates: list[tuple[str, Points]] = []
    over_time: list[tuple[str, Points]] = []
    for variant in compared.variants:
        points = mean_curve(compared.of(variant), name)
        label = variant.rule_text if own else variant.name
        over_updates.append((label, [(float(p.updates), p.value) for p in points]))
        over_time.append((label, [(p.seconds, p.value) for p in points if math.isfinite(p.seconds)]))
    return Chart(name, over_updates, over_time, dots=not is_per_update(name))


def mean_curve(results: Sequence[RunResult], name: str) -> list[Point]:
    """The mean over seeds, of values and seconds, at updates where all runs have a point.

    Runs that diverged are left out, unless all did.
    """
    finished = [result for result in results if result.diverged is None] or list(results)
    curves = [{p.updates: p for p in reported_curve(result, name)} for result in finished]
    shared = [at for at in curves[0] if all(at in curve for curve in curves)] if curves else []
    return [
        Point(
            at, *(statistics.fmean(part) for part in zip(*((c[at].seconds, c[at].value) for c in curves), strict=True))
        )
        for at in shared
    ]
