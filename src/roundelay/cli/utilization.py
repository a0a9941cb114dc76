"""Time and memory of a finished training by worker, as tables."""

from __future__ import annotations

import statistics
from typing import Any

from roundelay import env
from roundelay.api.run_record import Trained
from roundelay.cli.screen import amount, stderr, stdout, table


def show_utilization(summary: dict[str, Any]) -> None:
    """Print time and memory as tables."""
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
    note = "; the workers are threads of one process, so the measured values are those of all" if shared else ""
    stdout.print()
    stdout.print(table(f"Memory{note}", ["", "predicted", "private", "peak resident", "of it at the start"], rows))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _memory(row: dict[str, Any]) -> list[str]:
    measured = [row["private_bytes"], row["peak_rss_bytes"], row["rss_at_start_bytes"]]
    return ["-" if value is None else amount(value) for value in (row["predicted"]["total"], *measured)]


def show_debug(trained: Trained) -> None:
    """What ROUNDELAY_DEBUG shows of a run: times from level 2 on, every instruction from level 4 on."""
    if env.level() >= 2:
        for worker, stages in enumerate(trained.plan.worker_stages):
            for k in stages:
                _show_times(trained, worker, k)
        for worker, loads in sorted(trained.loads.items()):
            mean_s = statistics.fmean(load.end_s - load.start_s for load in loads) / trained.plan.micro_batches
            stderr.print(f"worker {worker} data: {mean_s * 1e3:.3f} ms, planned {trained.plan.read_s * 1e3:.3f} ms")
    if env.level() >= 4:
        for worker, events in sorted(trained.events.items()):
            for event in events:
                stderr.print(f"worker {worker} {event.text}", markup=False, soft_wrap=True)


def _show_times(trained: Trained, worker: int, k: int) -> None:
    """Median measured and planned seconds of a stage's instructions."""
    stage, label = trained.plan.stages[k], "" if k == worker else f", stage {k}:"
    planned = {"forward": stage.forward_s, "backward": stage.backward_s}
    planned |= {"backward-weight": stage.weights_s, "update": stage.update_s}
    for opcode, seconds in planned.items():
        executed = [event for event in trained.events[worker] if (event.opcode, event.stage) == (opcode, k)]
        if executed:
            median_s = statistics.median(event.end_s - event.start_s for event in executed)
            stderr.print(f"worker {worker}{label} {opcode}: {median_s * 1e3:.3f} ms, planned {seconds * 1e3:.3f} ms")
