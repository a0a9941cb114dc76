"""The HTML report of one run, self-contained."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.channels import channels_of
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.lower.validate_plan import check_plan
from roundelay.observe.time_shares import gaps_of
from roundelay.page import sections as s
from roundelay.page.read_run import Run, numbers, read_run
from roundelay.page.scale import seconds, short
from roundelay.page.terms_chart import predicted_and_measured
from roundelay.page.timeline import Window
from roundelay.page.trace_window import window_length
from roundelay.simulator import Simulation, simulate


def run_page(path: Path) -> str:
    """The report of the run in a folder, as HTML.

    Raises:
        UsageError: there is no run, it has made no update, or one of its files is damaged.
        PlanError: its plan cannot be read or is invalid.
    """
    run = read_run(path)
    title = f"{run.name}: {run.plan.rule} on {run.plan.arrangement}"
    terms, css = predicted_and_measured(run)
    body = [
        _heading(run),
        s.loss(run),
        s.training_metrics(run),
        s.evaluations(run),
        s.throughput(run),
        s.shares(run),
        terms,
        s.schedule(run, predicted_window(run.plan)),
        s.memory(run),
        f"<section><details><summary>Plan</summary><pre>{escape(run.plan_text)}</pre></details></section>\n",
    ]
    return s.document(title, body, "report", css)


def predicted_window(plan: Plan) -> Window:
    """A window of the simulated run, in its steady state."""
    count = window_length(plan.micro_batches)
    batches = -(-3 * count // plan.micro_batches) + plan.num_stages
    counts = [plan.micro_batches] * batches
    simulation = simulate(plan, emit(check_plan(plan)), stream(counts))
    starts = sorted(span.start_s for span in simulation.intervals if span.opcode == "forward" and span.stage == 0)
    first = len(starts) // 2 - count // 2
    return window_between(plan, simulation, starts[first], max(starts[first + count], starts[first] + 1e-6))


def window_between(plan: Plan, simulation: Simulation, begin: float, end: float) -> Window:
    """What happens in a simulated run of a plan between two times, in seconds from its start."""
    spans = simulation.spans()
    gaps = [g for g in gaps_of(spans, channels_of(read(plan)), plan.num_workers) if g.start_s < end and g.end_s > begin]
    inside = [span for span in spans if span.start_s < end and span.end_s > begin]
    loads = [load for load in simulation.loads if load.start_s < end and load.end_s > begin]
    return Window(begin, end, inside, gaps, plan.num_workers, loads)


def _heading(run: Run) -> str:
    ended = bool(run.summary)
    state = ("diverged" if "diverged" in run.summary else "finished") if ended else "not finished"
    state = f'<span class="state {"done" if state == "finished" else "open"}">{state}</span>'
    about = next((line.removeprefix("# ") for line in run.plan_text.splitlines() if line.startswith("# ")), "")
    warning = (
        "" if ended else s.note("There is no summary.json: the run has failed, was interrupted, or is still running.")
    )
    warning += "".join(s.note(notice) for notice in run.notices())
    return (
        f"<header><h1>{escape(run.name)}{state}</h1>{s.note(about) if about else ''}{warning}</header>"
        f"<section>{s.facts(_facts(run))}</section>\n"
    )


def _facts(run: Run) -> list[tuple[str, str]]:
    plan, last, first = run.plan, run.updates[-1], run.updates[0]
    facts = [
        ("rule", plan.rule),
        ("backward", plan.backward),
        *([("recompute", ", ".join(plan.recompute))] if plan.recompute else []),
        ("predictor", plan.predictor),
        ("workers", str(plan.num_workers)),
        ("micro-batches", str(plan.micro_batches)),
        ("transport", plan.transport),
        ("updates", f"{last.update + 1}"),
        ("loss, first to last", f"{short(first.loss)} → {short(last.loss)}"),
    ]
    summary = numbers(run.summary)
    rate, wall = summary.get("samples_per_second", last.samples_per_second), summary.get("wall_s", run.seconds(last))
    facts.append(("samples/s", short(rate)))
    if run.plain():
        facts.append(("against plain PyTorch", f"{rate / max(run.plain().values()):.2f} ×"))
    facts.append(("time", seconds(wall) if math.isfinite(wall) else "-"))
    if run.evaluations:
        facts += [(name, short(value)) for name, value in list(run.evaluations[-1].metrics.items())[: s.MOST_METRICS]]
    return facts
