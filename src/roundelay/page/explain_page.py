"""The HTML page of a plan: where its predicted time and memory go. It holds the JSON object that it shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from roundelay.checkpoint.atomic_files import strict_json
from roundelay.ir.plan import Plan
from roundelay.page import sections as s
from roundelay.page.bars import BarPart, Group, bars
from roundelay.page.comparison_page import line_styles
from roundelay.page.run_page import window_between
from roundelay.page.scale import seconds, size
from roundelay.page.terms_chart import colours_of, terms_chart
from roundelay.page.timeline import Mark, Window
from roundelay.simulator import Simulation
from roundelay.simulator.critical_path import Piece

Found = Mapping[str, Any]
"""What ``roundelay explain --json`` prints, or a part of it."""

SHOWN_BATCHES = 2
"""How many of the last batches are drawn."""

_CSS = """
.stages { display: flex; flex-wrap: wrap; gap: 10px; margin: 12px 0 0; padding: 0; list-style: none; }
.stages .stage { flex: 1 1 195px; max-width: 420px; border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 14px; break-inside: avoid; }
.stages h3 { margin: 0 0 4px; }
.stages .edge { align-self: center; font-size: 13px; color: var(--soft); white-space: nowrap; }
.stages .facts { display: block; }
.stages .facts div { display: flex; justify-content: space-between; gap: 14px; font-size: 13px; }
.stages .facts dt { flex: 1 1 5em; }
.stages .facts dd { text-align: right; min-width: 0; }
.plans td:last-child, .plans th:last-child { white-space: normal; text-align: left; overflow-wrap: anywhere; }
"""


def explain_page(name: str, found: Found, plan: Plan, simulation: Simulation, path: Sequence[Piece]) -> str:
    """The page as HTML.

    Args:
        name: of the plan's file.
        found: what is explained of it; ``diff`` or ``why_not`` another plan beside it, ``alternatives`` a search's.
        plan: the plan.
        simulation: of it, of several batches.
        path: its critical path.
    """
    other = found.get("diff") or found.get("why_not")
    colours = colours_of({"plan": found["terms"], "other": other["terms"] if other else {}})
    title = f"{name}: {found['rule']} on {found['arrangement']}"
    body = [
        _heading(title, found),
        _stages(found),
        _costs(found, other, colours),
        _timeline(_last_batches(plan, simulation, path, colours), colours),
        _memory(found, other),
        _alternatives(found.get("alternatives", ())),
        _embedded(found),
    ]
    return s.document(title, body, "explain", _CSS + line_styles(range(len(colours))))


def _embedded(found: Found) -> str:
    text = strict_json(found).replace("<", "\\u003c")  # no text in it can end the element
    return f'<script type="application/json" id="explained">{text}</script>\n'


def _heading(title: str, found: Found) -> str:
    sentence = (
        f"By the rule {found['rule']} on {found['arrangement']}, with {found['micro_batches']} micro-batches, a batch "
        f"takes {seconds(found['batch_s'])}, as predicted. The plan has been made by these choices:"
    )
    choices = s.facts([(name.replace("_", "-"), _text(value)) for name, value in found["choices"].items()])
    return f"<header><h1>{escape(title)}</h1></header>" + s.section("Plan", s.note(sentence) + choices)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)


def _stages(found: Found) -> str:
    edges = {(edge["source"], edge["target"]): edge for edge in found["edges"]}
    boxes = []
    for one in found["stages"]:
        number = one["stage"]
        pairs = [*_of_stage(one, found), *_skips(number, found["edges"])]
        boxes.append(f'<li class="stage"><h3>stage {number}</h3>{s.facts(pairs)}</li>')
        if edge := edges.get((number, number + 1)):
            sizes = f"→ {size(edge['forward_bytes'])}<br>← {size(edge['backward_bytes'])}"
            boxes.append(f'<li class="edge">{sizes}</li>')
    text = s.note(
        "Seconds of one micro-batch and of an update; what a worker computes in a batch, how much of it is on the "
        "critical path, and its share of the path; bytes of one message. An exchange begins when all holders of "
        "the stage are there."
    )
    return s.section("Stages on machines", f'{text}<ol class="stages">{"".join(boxes)}</ol>')


def _of_stage(one: Found, found: Found) -> Iterator[tuple[str, str]]:
    yield "workers", ", ".join(map(str, one["workers"]))
    if any(worker["speed"] != 1.0 for worker in found["workers"]):
        yield "speed", ", ".join(f"{found['workers'][k]['speed']:g}" for k in one["workers"])
    yield "device", ", ".join(dict.fromkeys(found["workers"][k]["device"] for k in one["workers"]))
    yield "busy", ", ".join(f"{found['busy'][k]:.0%}" for k in one["workers"])
    yield "up to", one["up_to"]
    yield "weights", size(one["weight_bytes"])
    yield "forward", seconds(one["forward_s"])
    yield "backward", seconds(one["backward_s"])
    if one["weights_s"]:
        yield "its weights' half", seconds(one["weights_s"])
    yield "update", seconds(one["update_s"])
    yield "computes", seconds(one["computes_s"])
    yield "on the path", seconds(one["on_path_s"])
    yield "share", f"{one['on_path_share']:.0%}"
    for exchange in one["exchanges"]:
        what = f"{exchange['kind'].replace('-', ' ')} over {exchange['axis']}"
        yield (
            f"{what}, {exchange['count']} a {exchange['every']}",
            f"{size(exchange['bytes'])}, {seconds(exchange['seconds'])}",
        )


def _skips(stage: int, edges: Sequence[Found]) -> Iterator[tuple[str, str]]:
    for edge in edges:
        if edge["source"] == stage and edge["target"] != stage + 1:
            yield f"→ stage {edge['target']}", size(edge["forward_bytes"])
            yield f"← stage {edge['target']}", size(edge["backward_bytes"])


def _costs(found: Found, other: Found | None, colours: Mapping[str, str]) -> str:
    plans = {"plan": found} | ({"other": other} if other else {})
    text = s.note(
        "Of a batch, along the critical path: the terms add up to it. What lies beside the path costs nothing."
        + (f" The other plan is {other['name']}: {other['rule']} on {other['arrangement']}." if other else "")
    )
    chart = terms_chart({name: one["terms"] for name, one in plans.items()}, colours, "more" if other else "")
    return s.section("Costs", text + chart)


def _last_batches(plan: Plan, simulation: Simulation, path: Sequence[Piece], colours: Mapping[str, str]) -> Window:
    """The last batches of a simulated run, with the critical path marked."""
    first = max(i.batch for i in simulation.intervals) - SHOWN_BATCHES + 1
    begin = min(i.start_s for i in simulation.intervals if i.opcode == "forward" and i.batch >= first)
    pieces = [piece for piece in path if piece.end_s > begin]
    marks = [Mark(one.worker, colours[one.term], one.term, one.start_s, one.end_s) for one in pieces]
    return replace(window_between(plan, simulation, begin, simulation.makespan_s), marks=marks)


def _timeline(window: Window, colours: Mapping[str, str]) -> str:
    text = s.note(
        f"The last {SHOWN_BATCHES} simulated batches. Numbers are micro-batches, in updates batches. The strip below a "
        "worker is the critical path, in the colours of what it is spent on; under a gap the worker waits for that. "
        "A narrow screen shows the first part."
    )
    kinds = s.legend((kind, kind) for kind in s.KINDS)
    path = s.legend((f"path: {term}", colour) for term, colour in colours.items())
    return s.section("Steady state", text + kinds + path + s.draw_window(window, "the last batches as predicted"))


def _memory(found: Found, other: Found | None) -> str:
    plans = {"plan": found} | ({"other": other} if other else {})
    most = max(sum(items.values()) for one in plans.values() for items in one["memory"])
    body = s.note("Every item at its largest. Without the optimizer's states, of which a plan does not tell.")
    body += s.legend((name, colour) for name, colour in s.ITEMS.items() if name in found["memory"][0])
    for name, one in plans.items():
        groups = [Group(f"worker {k}", [_items(items)]) for k, items in enumerate(one["memory"])]
        body += f"<h3>{name}</h3>" if other else ""
        body += s.for_screens(
            lambda width, groups=groups: bars(groups, width, most, size, "bytes of each worker"),  # type: ignore[misc]
            s.WIDE,
        )
    return s.section("Memory", body)


def _items(items: Mapping[str, int]) -> list[BarPart]:
    return [BarPart(name, s.ITEMS[name], value) for name, value in items.items()]


def _alternatives(plans: Sequence[Found]) -> str:
    """The plans of a search, the chosen one first; empty without one."""
    if not plans:
        return ""
    chosen = plans[0]["choices"]
    rows = [["", "predicted", "measured", "most memory", "what differs from the chosen"]]
    for i, one in enumerate(plans):
        differs = [f"{k.replace('_', '-')} {_text(v)}" for k, v in one["choices"].items() if chosen.get(k) != v]
        why = [f"failed: {one['why']}"] if one["why"] else []
        measured = "-" if one["measured_s"] is None else seconds(one["measured_s"])
        memory = "-" if one["memory_bytes"] is None else size(one["memory_bytes"])
        name = ", ".join(filter(None, ("" if i else "chosen", one["name"])))
        rows.append([name, seconds(one["predicted_s"]), measured, memory, ", ".join(differs + why)])
    return s.section("Alternatives", f'<div class="plans">{s.text_table(rows)}</div>')
