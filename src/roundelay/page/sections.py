"""The page's sections: each takes a run and gives HTML, with a sentence in place of a figure that cannot be drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from roundelay.page.bars import Group, Part, bars
from roundelay.page.line_chart import Curve, Points, figure, smoothed
from roundelay.page.read_run import Run, numbers
from roundelay.page.scale import size
from roundelay.page.timeline import Window, first, timeline

WIDE, HALF, MIDDLE, NARROW = 1040, 520, 680, 350
TALL = 270
MOST_METRICS = 6

_KINDS = ("forward", "backward", "update", "data", "bubble", "wait")
_ITEMS = {
    "weights": "forward",
    "gradients": "backward",
    "optimizer": "update",
    "versions": "data",
    "tapes": "wait",
    "messages": "other",
}


def section(title: str, body: str) -> str:
    """A card of the page."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>\n"


def note(text: str) -> str:
    """A sentence or two; plain text."""
    return f"<p>{escape(text)}</p>"


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """(name, look) of everything that a figure shows."""
    return '<ul class="legend">' + "".join(f'<li><i class="{b}"></i>{escape(a)}</li>' for a, b in entries) + "</ul>"


def each(draw: Callable[[int], str], wide: int) -> str:
    """A figure for wide, middling and narrow screens, so that its letters keep their size; the style shows one."""
    sizes = {"wide": wide, "middle": MIDDLE if wide >= HALF else wide, "narrow": NARROW}
    return "".join(f'<div class="{look}">{draw(width)}</div>' for look, width in sizes.items())


def loss(run: Run) -> str:
    """The loss over updates and over time."""
    reach = _reach(run)
    told = note(
        f"Mean loss of each batch, and smoothed: the mean over {reach} updates to either side. "
        "Evaluations whose name contains “loss” stand beside it."
    )
    numbers = [(float(u.number), u.loss) for u in run.updates]
    times = [(u.at_s, u.loss) for u in run.updates if math.isfinite(u.at_s)]
    names = [name for name in metric_names(run) if "loss" in name.lower()][:2]
    looks = dict(zip(names, "bc", strict=False))

    def curves(points: Points, over_time: bool) -> list[Curve]:
        made = [Curve("loss", "thin", points), Curve("smoothed", "a", smoothed(points, reach))]
        return made + [Curve(n, look, evaluated(run, n, over_time), dots=True) for n, look in looks.items()]

    entries = [("loss", "thin"), ("smoothed", "a"), *looks.items()]
    wide = HALF if times else WIDE
    parts = [_plot(curves(numbers, False), "update", wide)]
    if times:
        parts.append(_plot(curves(times, True), "seconds", wide))
    return section("Loss", told + legend(entries) + _grid(parts, "pair"))


def beside(run: Run) -> str:
    """Every metric that the loss returned beside the loss, in a figure of its own; nothing without any."""
    names = list(dict.fromkeys(name for update in run.updates for name in update.metrics))
    if not names:
        return ""
    reach = _reach(run)
    told = f"What the loss returned beside itself: of each batch, and smoothed over {reach} updates to either side."
    figures = []
    for name in names[:MOST_METRICS]:
        points = [(float(u.number), u.metrics.get(name, math.nan)) for u in run.updates]
        curves = [Curve(name, "thin", points), Curve("smoothed", "a", smoothed(points, reach))]
        figures.append(_small(name, curves))
    entries = [("of each batch", "thin"), ("smoothed", "a")]
    return section("Metrics", note(told + _left(names)) + legend(entries) + _grid(figures, "many"))


def metric_names(run: Run) -> list[str]:
    """Names of everything that was evaluated, in order."""
    return list(dict.fromkeys(name for evaluation in run.evaluations for name in evaluation.metrics))


def evaluated(run: Run, name: str, over_time: bool) -> Points:
    """One metric's points."""
    made = [(e.at_s if over_time else float(e.number), e.metrics.get(name, math.nan)) for e in run.evaluations]
    return [point for point in made if math.isfinite(point[0])]


def _plot(curves: Sequence[Curve], x_label: str, wide: int) -> str:
    return f"<div>{each(lambda width: figure(curves, width, TALL, x_label, 'loss'), wide)}</div>"


def evaluations(run: Run) -> str:
    """Every metric of the evaluations, in a figure of its own; nothing without evaluations."""
    names = metric_names(run)
    if not names:
        return ""
    figures = [
        _small(name, [Curve(name, "b", evaluated(run, name, False), dots=True)]) for name in names[:MOST_METRICS]
    ]
    told = "What the job's own evaluate said." + _left(names)
    return section("Evaluations", note(told) + _grid(figures, "many"))


def _small(name: str, curves: Sequence[Curve]) -> str:
    return f"<div><h3>{escape(name)}</h3>{each(lambda width: figure(curves, width, 200, 'update', name), 340)}</div>"


def _left(names: Sequence[str]) -> str:
    return f" The first {MOST_METRICS} of {len(names)} are drawn." if len(names) > MOST_METRICS else ""


def _reach(run: Run) -> int:
    """Updates to either side over which curves are smoothed."""
    return max(1, len(run.updates) // 40)


def _grid(parts: Sequence[str], look: str) -> str:
    return f'<div class="{look}">{"".join(parts)}</div>'


def throughput(run: Run) -> str:
    """Samples per second over updates."""
    points = [(float(u.number), u.rate) for u in run.updates if u.rate > 0]
    if not points:
        return section("Throughput", note("Not known yet: it takes a second update."))
    curves = [Curve("samples/s", "a", points)]
    entries = [("this run, over the last few seconds", "a")]
    plain = run.plain()
    if plain:
        threads, rate = max(plain.items(), key=lambda item: item[1])
        curves.append(Curve(f"plain PyTorch, {threads} thread(s)", "b", [(points[0][0], rate), (points[-1][0], rate)]))
        entries.append((curves[-1].name, "b"))
    drawn = each(lambda width: figure(curves, width, 230, "update", "samples per second", zero=True), WIDE)
    return section("Throughput", note("Rows trained per second.") + legend(entries) + drawn)


def shares(run: Run) -> str:
    """Where each worker's time went."""
    rows = _rows(run.summary.get("shares"))
    if not rows:
        return section("Where the time went", note(_LATER.format("It is reckoned when the run ends")))
    groups = [Group(f"worker {k}", [_time(row)]) for k, row in enumerate(rows)]
    told = note(
        "Of the time from the first instruction to the last. Bubble: nothing could be done yet, by the schedule or "
        "because another stage is slower. Wait: something could have been done, but messages, the worker's own loop or "
        "a busy machine took their time. Data: waiting for the loader."
    )
    drawn = each(lambda width: bars(groups, width, 1.0, lambda v: f"{v:.0%}", "shares of time per worker"), WIDE)
    entries = [(kind, kind) for kind in _KINDS]
    if any(row.get("wait") is None for row in rows):
        told += note("The workers' clocks differ (several hosts): bubble and wait cannot be told apart.")
    return section("Where the time went", told + legend(entries) + drawn)


def _time(row: Mapping[str, Any]) -> list[Part]:
    known = {kind: value for kind, value in numbers(row).items() if kind in _KINDS}
    if "wait" not in known:
        known["bubble"] = max(0.0, 1.0 - sum(known.values()))
    return [
        Part("idle" if kind == "bubble" and "wait" not in known else kind, kind, known.get(kind, 0.0))
        for kind in _KINDS
    ]


_LATER = "Not there. {}: a run that has failed, or is still going on, has none."


def schedule(run: Run, predicted: Window) -> str:
    """The timeline as it ran, and as the plan predicts it."""
    looks = [(kind, kind) for kind in ("forward", "backward", "update", "data")]
    looks += [("bubble", "bubble"), ("wait", "wait")]
    body = note(
        "Numbers are micro-batches, in updates and loads the batch. Point at a box for its version, its time and the "
        "bytes sent. Above the workers stands what the reader loads meanwhile."
    )
    body += legend(looks)
    if run.window is None:
        body += note(
            "No trace of this run. trace.json is written when a run ends; roundelay simulate plan.toml --trace FILE "
            "writes one of what the plan predicts."
        )
    else:
        body += "<h3>As it ran, in the middle of the run</h3>" + _stretch(run.window, "schedule as it ran")
    body += "<h3>As the plan predicts it</h3>" + _stretch(predicted, "schedule as predicted")
    return section("Schedule", body)


def _stretch(window: Window, label: str) -> str:
    return each(lambda width: timeline(first(window, width / WIDE), width, label), WIDE)


def memory(run: Run) -> str:
    """What each worker was predicted to hold, beside what it held."""
    rows = _rows(run.summary.get("memory"))
    if not rows:
        return section("Memory", note(_LATER.format("It is measured when the run ends")))
    groups = [Group(f"worker {k}", _held(row)) for k, row in enumerate(rows)]
    most = max(sum(part.value for part in bar) for group in groups for bar in group.bars)
    told = note(
        "Upper bar: the plan's ledger, every item at its largest. Lower bar: bytes that the process has written for "
        "itself by the end of the run, with what Python and torch take, which no plan knows."
    )
    if any(row.get("process_shared") for row in rows):
        told += note("The workers were threads of one process: what is measured is that of all of them together.")
    drawn = each(lambda width: bars(groups, width, most, size, "bytes per worker"), WIDE)
    entries = [*_ITEMS.items(), ("held privately", "thin")]
    return section("Memory", told + legend(entries) + drawn + _table(rows))


def _held(row: Mapping[str, Any]) -> list[list[Part]]:
    predicted = numbers(row.get("predicted"))
    items = [Part(name, look, predicted.get(name, 0.0)) for name, look in _ITEMS.items()]
    return [items, [Part("held privately", "thin", numbers(row).get("private_bytes", 0.0))]]


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ("", "predicted", "held privately", "peak resident", "resident at the start")
    lines = []
    for k, row in enumerate(rows):
        values = {"total": numbers(row.get("predicted")).get("total"), **numbers(row)}
        told = (values.get(name) for name in ("total", "private_bytes", "peak_rss_bytes", "rss_at_start_bytes"))
        cells = "".join(f"<td>{'-' if value is None else size(value)}</td>" for value in told)
        lines.append(f"<tr><td>worker {k}</td>{cells}</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(lines)}</table></div>'


def _rows(value: Any) -> list[dict[str, Any]]:
    """One object per worker; none if it is anything else."""
    return value if isinstance(value, list) and all(isinstance(row, dict) for row in value) else []
