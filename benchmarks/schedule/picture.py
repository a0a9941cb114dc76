"""Draw the README's picture: three schedules on a virtual clock. ``python -m benchmarks.schedule.picture FILE.svg``.

Four workers with equal stages, eight micro-batches per batch, two batches from an empty pipeline; messages and updates
take no time. The programs are those that a run executes.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.schedule.simulated import plan
from roundelay.ir.micro_batch import stream
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.observe.trace import Span
from roundelay.page.style import STYLE
from roundelay.page.timeline import Window, timeline
from roundelay.simulator import simulate

WORKERS, MICRO_BATCHES, SHOWN_S = 4, 8, 1.0
WIDTH, HEADING = 1040, 30
ROWS = {
    "1f1b": "1f1b: exact mini-batch training; the pipeline drains after every batch",
    "zb-h1": "zb-h1: the same bits; weight gradients are computed where a worker would wait",
    "pipedream": "pipedream, pipeoptim, async, ...: asynchronous rules never drain",
}
KINDS = {"forward": "forward", "backward": "backward", "data": "weight gradients"}


def window(rule: str) -> Window:
    """The first part of a simulated run; updates, which take no time, are not drawn."""
    made = plan(rule, WORKERS, MICRO_BATCHES)
    headers = list(stream([MICRO_BATCHES] * 4))
    batch = {header.g: header.batch for header in headers}
    spans = [
        Span(i.worker, i.opcode, i.g, batch[i.g], i.reads, i.distance, i.start_s, i.end_s, 0, i.stage)
        for i in simulate(made, emit(read(made)), headers).intervals
        if i.start_s < SHOWN_S and i.end_s > i.start_s
    ]
    return Window(0.0, SHOWN_S, spans, (), WORKERS)


def picture() -> str:
    """The three timelines below each other, as one SVG document that follows the reader's light or dark theme."""
    parts, y = [], 10.0
    for rule, title in ROWS.items():
        drawing = re.sub("<title>.*?</title>", "", timeline(window(rule), WIDTH, title), flags=re.DOTALL)
        height = float(re.search(rf'viewBox="0 0 {WIDTH} ([\d.]+)"', drawing)[1])  # type: ignore[index]
        parts.append(f'<text x="0" y="{y + 14:g}" style="font-weight:600">{title}</text>')
        parts.append(drawing.replace("<svg ", f'<svg y="{y + HEADING - 6:g}" width="{WIDTH}" height="{height:g}" ', 1))
        y += HEADING + height
    for place, (kind, name) in enumerate(KINDS.items()):
        x = 84 + 150 * place
        parts.append(f'<rect class="{kind}" x="{x}" y="{y - 8:g}" width="12" height="12" rx="3"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 3:g}">{name}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 0 {WIDTH + 24} {y + 16:g}">'
    style = f"<style>{STYLE}</style>"
    back = f'<rect x="-12" y="0" width="{WIDTH + 24}" height="{y + 16:g}" style="fill: var(--card)"/>'
    return "\n".join([head, style, back, *parts, "</svg>", ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(picture(), encoding="utf-8")
