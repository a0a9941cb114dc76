"""Sections of a run's report as HTML; a sentence takes the place of a figure that cannot be drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from roundelay.page.bars import BarPart, Group, bars
from roundelay.page.line_chart import Curve, Points, line_chart, smoothed
from roundelay.page.read_run import Run, numbers
from roundelay.page.scale import size
from roundelay.page.style import SCRIPT, STYLE
from roundelay.page.timeline import Window, first_part, timeline

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The pages' Content-Security-Policy: they may load nothing, whatever names a run contains."""

WIDE, HALF, MIDDLE, NARROW = 1040, 520, 680, 350
TALL = 270
MOST_METRICS = 6

KINDS = ("forward", "backward", "update", "data", "bubble", "wait")
ITEMS = {
    "weights": "forward",
    "gradients": "backward",
    "optimizer": "update",
    "versions": "data",
    "tapes": "wait",
    "messages": "other",
}


def document(title: str, body: Iterable[str], command: str, css: str = "") -> str:
    """A whole page.

    Args:
        title: of the page.
        body: its header and sections.
        command: that writes the page.
        css: further style rules.
    """
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}{css}</style></head>\n<body><main>{''.join(body)}<footer>Written by roundelay {command}; this "
        f"file is self-contained.</footer></main><script>{SCRIPT}</script></body></html>\n"
    )


def section(title: str, body: str) -> str:
    """A section of the page, with its title."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n"


def note(text: str) -> str:
    """A paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of names and values."""
    body = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f'<dl class="facts">{body}</dl>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """The legend of a figure.

    Args:
        entries: (name, CSS class) of everything that the figure shows.
    """
    return '<ul class="legend">' + "".join(f'<li><i class="{b}"></i>{escape(a)}</li>' for a, b in entries) + "</ul>"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text; the first row has the column titles."""
    head = "".join(f"<th>{escape(text)}</th>" for text in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows[1:])
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def for_screens(draw: Callable[[int], str], wide: int) -> str:
    """A figure for wide, medium and narrow screens, so that its text keeps its size; the CSS shows one of them."""
    sizes = {"wide": wide, "middle": MIDDLE if wide >= HALF else wide, "narrow": NARROW}
    return "".join(f'<div class="{css_class}">{draw(width)}</div>' for css_class, width in sizes.items())


def loss(run: Run) -> str:
    """The loss over updates and over time."""
    reach = _smoothing_reach(run)
    text = note(
        f"Mean loss of each batch, and smoothed: the mean over {reach} updates to either side. "
        "Evaluated metrics whose name contains “loss” are drawn in the same figure."
    )
    over_updates = [(float(u.update), u.loss) for u in run.updates]
    over_time = [(run.seconds(u), u.loss) for u in run.updates if math.isfinite(run.seconds(u))]
    names = [name for name in metric_names(run) if "loss" in name.lower()][:2]
    css_classes = dict(zip(names, "bc", strict=False))

    def curves(points: Points, timed: bool) -> list[Curve]:
        losses = [Curve("loss", "thin", points), Curve("smoothed", "a", smoothed(points, reach))]
        return losses + [Curve(n, css, evaluated(run, n, timed), dots=True) for n, css in css_classes.items()]

    entries = [("loss", "thin"), ("smoothed", "a"), *css_classes.items()]
    wide = HALF if over_time else WIDE
    parts = [_plot(curves(over_updates, False), "update", wide)]
    if over_time:
        parts.append(_plot(curves(over_time, True), "seconds", wide))
    return section("Loss", text + legend(entries) + _container(parts, "pair"))


def training_metrics(run: Run) -> str:
    """A figure for every metric that the loss function returned in addition to the loss; empty without any."""
    names = list(dict.fromkeys(name for update in run.updates for name in update.metrics))
    if not names:
        return ""
    reach = _smoothing_reach(run)
    text = f"Returned in addition to the loss: by batch, and smoothed over {reach} updates to either side."
    figures = []
    for name in names[:MOST_METRICS]:
        points = [(float(u.update), u.metrics.get(name, math.nan)) for u in run.updates]
        curves = [Curve(name, "thin", points), Curve("smoothed", "a", smoothed(points, reach))]
        figures.append(_small_plot(name, curves))
    entries = [("of each batch", "thin"), ("smoothed", "a")]
    return section("Metrics", note(text + _omitted(names)) + legend(entries) + _container(figures, "many"))


def metric_names(run: Run) -> list[str]:
    """Names of all evaluated metrics, in order of their first appearance."""
    return list(dict.fromkeys(name for evaluation in run.evaluations for name in evaluation.metrics))


def evaluated(run: Run, name: str, over_time: bool) -> Points:
    """The points of an evaluated metric, over updates or over time."""
    points = [
        (run.seconds(e) if over_time else float(e.update), e.metrics.get(name, math.nan)) for e in run.evaluations
    ]
    return [point for point in points if math.isfinite(point[0])]


def _plot(curves: Sequence[Curve], x_label: str, wide: int) -> str:
    return f"<div>{for_screens(lambda width: line_chart(curves, width, TALL, x_label, 'loss'), wide)}</div>"


def evaluations(run: Run) -> str:
    """A figure for every evaluated metric; empty without evaluations."""
    names = metric_names(run)
    if not names:
        return ""
    figures = [
        _small_plot(name, [Curve(name, "b", evaluated(run, name, False), dots=True)]) for name in names[:MOST_METRICS]
    ]
    text = "Returned by the job's evaluate." + _omitted(names)
    return section("Evaluations", note(text) + _container(figures, "many"))


def _small_plot(name: str, curves: Sequence[Curve]) -> str:
    svg = for_screens(lambda width: line_chart(curves, width, 200, "update", name), 340)
    return f"<div><h3>{escape(name)}</h3>{svg}</div>"


def _omitted(names: Sequence[str]) -> str:
    return f" The first {MOST_METRICS} of {len(names)} are drawn." if len(names) > MOST_METRICS else ""


def _smoothing_reach(run: Run) -> int:
    """Number of updates to either side over which curves are smoothed."""
    return max(1, len(run.updates) // 40)


def _container(parts: Sequence[str], css_class: str) -> str:
    return f'<div class="{css_class}">{"".join(parts)}</div>'


def throughput(run: Run) -> str:
    """Samples per second over updates."""
    points = [(float(u.update), u.samples_per_second) for u in run.updates if u.samples_per_second > 0]
    if not points:
        return section("Throughput", note("Unknown until the second update."))
    curves = [Curve("samples/s", "a", points)]
    entries = [("this run, over the last few seconds", "a")]
    plain = run.plain()
    if plain:
        threads, rate = max(plain.items(), key=lambda item: item[1])
        curves.append(Curve(f"plain PyTorch, {threads} thread(s)", "b", [(points[0][0], rate), (points[-1][0], rate)]))
        entries.append((curves[-1].name, "b"))
    svg = for_screens(lambda width: line_chart(curves, width, 230, "update", "samples per second", zero=True), WIDE)
    return section("Throughput", note("Rows trained per second.") + legend(entries) + svg)


def shares(run: Run) -> str:
    """Shares of each worker's time."""
    rows = _rows(run.summary.get("shares"))
    if not rows:
        return section("Where the time went", note(_LATER.format("It is computed when the run ends")))
    groups = [Group(f"worker {k}", [_time_parts(row)]) for k, row in enumerate(rows)]
    text = note(
        "Shares of the time from the first instruction to the last. Bubble: idle by the schedule, or because another "
        "stage is slower. Wait: an instruction could have run, but messages, the worker's own loop or a busy machine "
        "delayed it. Data: waiting for the loader."
    )
    svg = for_screens(lambda width: bars(groups, width, 1.0, lambda v: f"{v:.0%}", "shares of time per worker"), WIDE)
    entries = [(kind, kind) for kind in KINDS]
    if any(row.get("wait") is None for row in rows):
        text += note("The workers' clocks differ (several hosts): bubble and wait cannot be told apart.")
    return section("Where the time went", text + legend(entries) + svg)


def _time_parts(row: Mapping[str, Any]) -> list[BarPart]:
    known = {kind: value for kind, value in numbers(row).items() if kind in KINDS}
    if "wait" not in known:
        known["bubble"] = max(0.0, 1.0 - sum(known.values()))
    return [
        BarPart("idle" if kind == "bubble" and "wait" not in known else kind, kind, known.get(kind, 0.0))
        for kind in KINDS
    ]


_LATER = "Not there. {}: a run that has failed, or is still running, has none."


def schedule(run: Run, predicted: Window) -> str:
    """The measured timeline, and the predicted one."""
    entries = [(kind, kind) for kind in KINDS]
    body = note(
        "Numbers are micro-batches, in updates and loads batches. Point at a box for its version, its time and the "
        "bytes sent. The row above the workers shows what the reader loads meanwhile."
    )
    body += legend(entries)
    if run.window is None:
        body += note(
            "No trace of this run: trace.json is written when a run ends. roundelay simulate plan.toml --trace FILE "
            "writes the predicted one."
        )
    else:
        body += "<h3>As it ran, in the middle of the run</h3>" + draw_window(run.window, "schedule as it ran")
    body += "<h3>As the plan predicts it</h3>" + draw_window(predicted, "schedule as predicted")
    return section("Schedule", body)


def draw_window(window: Window, label: str) -> str:
    """A timeline for all screens; on narrower ones its first part."""
    return for_screens(lambda width: timeline(first_part(window, width / WIDE), width, label), WIDE)


def memory(run: Run) -> str:
    """Predicted and measured memory of each worker."""
    rows = _rows(run.summary.get("memory"))
    if not rows:
        return section("Memory", note(_LATER.format("It is measured when the run ends")))
    groups = [Group(f"worker {k}", _memory_bars(row)) for k, row in enumerate(rows)]
    most = max(sum(part.value for part in bar) for group in groups for bar in group.bars)
    text = note(
        "Upper bar: predicted by the plan, every item at its largest. Lower bar: private memory of the process at the "
        "end of the run, including what Python and torch take, which no plan knows."
    )
    if any(row.get("process_shared") for row in rows):
        text += note("The workers were threads of one process: the measured values are those of all together.")
    svg = for_screens(lambda width: bars(groups, width, most, size, "bytes per worker"), WIDE)
    entries = [*ITEMS.items(), ("private", "thin")]
    return section("Memory", text + legend(entries) + svg + _table(rows))


def _memory_bars(row: Mapping[str, Any]) -> list[list[BarPart]]:
    predicted = numbers(row.get("predicted"))
    items = [BarPart(name, css_class, predicted.get(name, 0.0)) for name, css_class in ITEMS.items()]
    return [items, [BarPart("private", "thin", numbers(row).get("private_bytes", 0.0))]]


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [["", "predicted", "private", "peak resident", "resident at the start"]]
    for k, row in enumerate(rows):
        values = {"total": numbers(row.get("predicted")).get("total"), **numbers(row)}
        columns = (values.get(name) for name in ("total", "private_bytes", "peak_rss_bytes", "rss_at_start_bytes"))
        lines.append([f"worker {k}", *("-" if value is None else size(value) for value in columns)])
    return text_table(lines)


def _rows(value: Any) -> list[dict[str, Any]]:
    """A list of one object per worker; empty if ``value`` is anything else."""
    return value if isinstance(value, list) and all(isinstance(row, dict) for row in value) else []
