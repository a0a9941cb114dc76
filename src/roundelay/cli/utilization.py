"""Where time and memory of a finished training went, worker by worker: for the summary and on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from roundelay.api.memory_report import memory_report, optimizer_bytes
from roundelay.api.training import Session, Trained
from roundelay.cli.screen import amount, stdout, table
from roundelay.ir.micro_batch import Load
from roundelay.ir.plan import Plan
from roundelay.observe.time_shares import gaps_of, shares_of
from roundelay.observe.trace import Gap, Span


def spans_of(trained: Trained) -> list[Span]:
    """Every instruction of a run as a span of its trace."""
    return [Span(k, *event[:9]) for k, events in sorted(trained.events.items()) for event in events]


def loads_of(trained: Trained) -> list[Load]:
    """Every batch that was loaded beside the instructions."""
    return [Load(k, *load) for k, loads in sorted(trained.loads.items()) for load in loads]


def gaps_between(spans: Sequence[Span], plan: Plan) -> list[Gap]:
    """What lies between the instructions of a run."""
    return gaps_of(spans, plan.edges, plan.num_workers)


def stage_names(session: Session) -> dict[int, str]:
    """Worker to the modules in which its segments end, for people."""
    graph = session.captured.graph
    modules = {op.name: op.module or "the model" for op in graph.ops}
    return {
        k: "up to " + ", ".join(f"{end} ({modules.get(end, '?')})" for end in ends_of(session.plan, stages))
        for k, stages in enumerate(session.plan.worker_stages)
    }


def ends_of(plan: Plan, stages: Sequence[int]) -> list[str]:
    """The operations that end the segments of some stages."""
    return [end for k in stages for end in plan.stages[k].segments]


def utilization(session: Session, trained: Trained, spans: Sequence[Span], gaps: Sequence[Gap]) -> dict[str, Any]:
    """Fields of the summary: ``busy``, ``shares`` and ``memory`` of each worker, and since when the first two count."""
    plan = trained.plan
    shares = shares_of(spans, gaps, plan.num_workers)
    of_optimizer = optimizer_bytes(session.job, session.captured, session.partition, plan)
    return {
        "shares_since_micro_batch": max(data["first_event_g"] for data in trained.workers.values()),
        "busy": [share.busy for share in shares],
        "shares": [share.as_json() for share in shares],
        "memory": memory_report(plan, of_optimizer, trained.workers),
    }


def show_utilization(summary: dict[str, Any]) -> None:
    """Both as tables."""
    kinds = ["forward", "backward", "update", "data", "bubble", "wait"]
    columns = ["", "busy", *kinds]
    rows = [[f"worker {k}", *(_share(row[kind]) for kind in columns[1:])] for k, row in enumerate(summary["shares"])]
    stdout.print()
    since = summary["shares_since_micro_batch"]
    stretch = f" since micro-batch {since}" if since else ""
    stdout.print(
        table(f"Time{stretch}: bubble is what the schedule asks for, wait is what messages take", columns, rows)
    )
    shared = any(row["process_shared"] for row in summary["memory"])
    rows = [[f"worker {k}", *_memory(row)] for k, row in enumerate(summary["memory"])]
    told = "; the workers are threads of one process, so what is measured is that of all" if shared else ""
    stdout.print()
    stdout.print(table(f"Memory{told}", ["", "predicted", "private", "peak resident", "of it at the start"], rows))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _memory(row: dict[str, Any]) -> list[str]:
    measured = [row["private_bytes"], row["peak_rss_bytes"], row["rss_at_start_bytes"]]
    return ["-" if value is None else amount(value) for value in (row["predicted"]["total"], *measured)]
