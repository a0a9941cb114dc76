"""A timeline of the schedule, measured or predicted, as inline SVG: one row per worker, one box per instruction.

Where it is known, a row above the workers shows the batches that the reader loads meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from roundelay.ir.micro_batch import Load
from roundelay.ir.program import OPCODES
from roundelay.observe.trace import Gap, Span
from roundelay.page.scale import Axis, labelled_grid, seconds, size

LEFT, RIGHT, TOP, BOTTOM = 84.0, 10.0, 2.0, 38.0
TALL, BETWEEN = 26.0, 7.0
MOST_WORKERS = 32


@dataclass(frozen=True, slots=True)
class Mark:
    """A time interval that is marked below a worker's row.

    Args:
        worker: whose row.
        css_class: gives the colour.
        name: shown when the cursor points at it.
        start_s: when it begins.
        end_s: when it ends.
    """

    worker: int
    css_class: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """A time interval of a run and what happens in it; times are seconds from the run's first span.

    Args:
        start_s: begin of the interval.
        end_s: end of the interval.
        spans: instructions that overlap it.
        gaps: idle times between them, if known.
        num_workers: D.
        loads: batches loaded in it.
        marks: what is marked in it.
    """

    start_s: float
    end_s: float
    spans: Sequence[Span]
    gaps: Sequence[Gap]
    num_workers: int
    loads: Sequence[Load] = ()
    marks: Sequence[Mark] = ()


def first_part(window: Window, share: float) -> Window:
    """The first ``share`` (0 to 1) of a window, for a narrow screen."""
    end = window.start_s + share * (window.end_s - window.start_s)
    spans = [span for span in window.spans if span.start_s < end]
    gaps = [gap for gap in window.gaps if gap.start_s < end]
    loads = [load for load in window.loads if load.start_s < end]
    marks = [mark for mark in window.marks if mark.start_s < end]
    return replace(window, end_s=end, spans=spans, gaps=gaps, loads=loads, marks=marks)


def timeline(window: Window, width: int, label: str) -> str:
    """Draw a window as an ``svg`` element.

    Args:
        window: what to draw; only its first :data:`MOST_WORKERS` workers are drawn.
        width: in pixels.
        label: what the figure shows, for screen readers.
    """
    rows = min(window.num_workers, MOST_WORKERS)
    across = Axis(window.start_s, window.end_s, LEFT, width - RIGHT)
    above = TALL + BETWEEN if window.loads else 0.0
    bottom = above + TOP + rows * (TALL + BETWEEN)
    parts = [
        f'<svg class="timeline" viewBox="0 0 {width} {bottom + BOTTOM:g}" role="img" aria-label="{escape(label)}">'
    ]
    parts += _axis(across, bottom, width)
    if window.loads:
        parts += [_row(TOP, "reader", width), *(_load_box(load, across) for load in window.loads)]
    parts.append(f'<g transform="translate(0 {above:g})">')
    parts += [_row(TOP + k * (TALL + BETWEEN), f"worker {k}", width) for k in range(rows)]
    parts += [_gap(gap, across) for gap in window.gaps if gap.worker < rows and gap.kind == "wait"]
    parts += [_instruction_box(span, across) for span in window.spans if span.worker < rows]
    parts += [_mark(mark, across) for mark in window.marks if mark.worker < rows]
    return "".join([*parts, "</g></svg>"])


def _row(y: float, name: str, width: int) -> str:
    return (
        f'<text class="row" x="0" y="{y + TALL / 2 + 4:.1f}">{name}</text>'
        f'<rect class="bubble" x="{LEFT:g}" y="{y:g}" width="{width - RIGHT - LEFT:g}" height="{TALL:g}" rx="3"/>'
    )


def _x_and_width(start_s: float, end_s: float, across: Axis) -> tuple[float, float]:
    """Left edge and width in pixels, clipped to the window."""
    x = across.place(max(start_s, across.low))
    return x, max(0.0, across.place(min(end_s, across.high)) - x)


def _gap(gap: Gap, across: Axis) -> str:
    x, wide = _x_and_width(gap.start_s, gap.end_s, across)
    if wide < 0.3:
        return ""
    y = TOP + gap.worker * (TALL + BETWEEN)
    title = f"wait: {seconds(gap.end_s - gap.start_s)}"
    return (
        f'<rect class="wait" x="{x:.1f}" y="{y + TALL - 6:.1f}" width="{wide:.1f}" height="6">'
        f"<title>{title}</title></rect>"
    )


def _mark(mark: Mark, across: Axis) -> str:
    x, wide = _x_and_width(mark.start_s, mark.end_s, across)
    y = TOP + mark.worker * (TALL + BETWEEN) + TALL + 1
    title = f"{mark.name}: {seconds(mark.end_s - mark.start_s)}"
    return (
        f'<rect class="{mark.css_class}" x="{x:.1f}" y="{y:g}" width="{max(0.4, wide):.1f}" height="{BETWEEN - 2:g}">'
        f"<title>{escape(title)}</title></rect>"
    )


def _load_box(load: Load, across: Axis) -> str:
    time = f"{seconds(load.end_s - load.start_s)}, from {seconds(load.start_s)}"
    title = f"reader of worker {load.worker}: batch {load.batch} loaded\n{time}"
    return _labelled_box(_x_and_width(load.start_s, load.end_s, across), TOP, "data", title, str(load.batch))


def _instruction_box(span: Span, across: Axis) -> str:
    css_class, y = _CSS.get(span.opcode, "other"), TOP + span.worker * (TALL + BETWEEN)
    text = str(span.batch if OPCODES[span.opcode].once_a_batch and not span.of else span.g)
    return _labelled_box(_x_and_width(span.start_s, span.end_s, across), y, css_class, describe(span), text)


def _labelled_box(x_and_width: tuple[float, float], y: float, css_class: str, title: str, text: str) -> str:
    """A box with a tooltip ``title``, and ``text`` inside if it fits."""
    x, wide = x_and_width
    if wide < 0.05:
        return ""
    box = (
        f'<rect class="{css_class}" x="{x:.1f}" y="{y:g}" width="{max(0.4, wide - 0.4):.1f}" '
        f'height="{TALL:g}" rx="2"><title>{escape(title)}</title></rect>'
    )
    if wide < 7.5 * len(text) + 5:
        return box
    return box + f'<text class="inside" x="{x + wide / 2:.1f}" y="{y + 17:g}" text-anchor="middle">{text}</text>'


_CSS = {"forward": "forward", "backward": "backward", "backward-weight": "data", "update": "update", "read": "data"}


def describe(span: Span) -> str:
    """The tooltip of an instruction."""
    if OPCODES[span.opcode].once_a_batch and not span.of:
        what = f"{span.opcode} {span.batch}"
    else:
        what = " ".join(filter(None, (span.opcode, span.of, f"of micro-batch {span.g}")))
    where = f"worker {span.worker}" + (f", stage {span.stage}" if span.stage != span.worker else "")
    lines = [f"{where}: {what}", f"batch {span.batch}"]
    if span.opcode == "update":
        lines.append(f"version {span.version} becomes {span.version + 1}")
    elif span.opcode != "read":
        lines.append(f"version {span.version}" + (f", predicted {span.distance} ahead" if span.distance else ""))
    lines.append(f"{seconds(span.end_s - span.start_s)}, from {seconds(span.start_s)}")
    if span.num_bytes:
        lines.append(f"{size(span.num_bytes)} sent")
    return "\n".join(lines)


def _axis(across: Axis, bottom: float, width: int) -> list[str]:
    unit, factor = ("s", 1.0) if across.high - across.low >= 2.0 else ("ms", 1e3)
    inner = Axis(0.0, (across.high - across.low) * factor, across.start, across.end)
    elements = labelled_grid(inner, max(4, int(width / 80)), bottom, bottom + 14, lambda value: f"{value:g}")
    label = f"{unit}, from {seconds(across.low)} of the run" if across.low else unit
    elements.append(
        f'<text class="tick" x="{(LEFT + width - RIGHT) / 2:g}" y="{bottom + 32:g}" text-anchor="middle">{label}</text>'
    )
    return elements
