"""Run folders made by hand, without a training: of every state and length."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.channels import channels_of
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.observe.run_folder import RunFolder
from roundelay.observe.time_shares import gaps_of, shares_of
from roundelay.observe.trace import Span, write_trace
from roundelay.planner.memory_model import estimate_memory
from roundelay.simulator import Simulation, simulate
from tests.lower.plans import plan_of

EVIL = "<script>alert('x')</script>&\"'"


def planned(rule: str = "pipedream", workers: int = 3, micro_batches: int = 2) -> Plan:
    """A plan whose steps take milliseconds."""
    plan = plan_of(rule, workers, micro_batches, latency_s=0.0002, read_s=0.005, model=EVIL)
    times = {"forward_s": 0.01, "backward_s": 0.02, "update_s": 0.003}
    return replace(plan, stages=tuple(replace(stage, **times) for stage in plan.stages))  # type: ignore[arg-type]


def simulated(plan: Plan, batches: int) -> Simulation:
    """A run of the plan."""
    return simulate(plan, emit(read(plan)), stream([plan.micro_batches] * batches))


def spans_of(plan: Plan, batches: int) -> list[Span]:
    """What it does."""
    ordered = sorted(simulated(plan, batches).spans(), key=lambda span: span.worker)
    return [replace(span, num_bytes=1500) for span in ordered]


def begun(root: Path, updates: int, *, plan: Plan | None = None, name: str = "run") -> RunFolder:
    """A run that has made so many updates and not ended."""
    plan = plan or planned()
    folder = RunFolder.create(root, name)
    folder.write_plan(plan.text([f"A job {EVIL} by rule {plan.rule}."]))
    with folder.open_metrics() as metrics:
        for t in range(updates):
            metrics.write(
                update=t,
                epoch=t // 20,
                loss=3.0 / (1 + t / 10),
                samples_per_second=100.0 + t % 7,
                busy=[0.5] * plan.num_stages,
                time=1_700_000_000.0 + t / 4,
                metrics={f"right {EVIL}": t / updates, "never": math.nan},
            )
    return folder


def finished(root: Path, updates: int = 40, *, plan: Plan | None = None, name: str = "run") -> RunFolder:
    """A run that has ended, with evaluations and everything."""
    plan = plan or planned()
    folder = begun(root, updates, plan=plan, name=name)
    for t in range(9, updates, 10):
        folder.add_evaluation(t, 0, {"held_out_loss": 2.0, f"accuracy {EVIL}": t / updates})
    spans = spans_of(plan, updates)
    loads = simulated(plan, updates).loads
    write_trace(folder.trace, spans, gaps=gaps_of(spans, channels_of(read(plan)), plan.num_stages), loads=loads)
    folder.write_summary(summary(plan, spans))
    return folder


def summary(plan: Plan, spans: list[Span]) -> dict[str, Any]:
    """The parts of a summary that the page reads."""
    measured = {"private_bytes": 5000, "rss_at_start_bytes": 3_000_000, "peak_rss_bytes": 9_000_000}
    return {
        "samples_per_second": 123.0,
        "plain_samples_per_second": {"1": 50.0, "2": 82.0},
        "wall_s": 10.5,
        "shares": [
            share.as_json()
            for share in shares_of(spans, gaps_of(spans, channels_of(read(plan)), plan.num_stages), plan.num_stages)
        ],
        "terms": {"predicted": {"compute": 0.5, "update": 0.25}, "measured": {"compute": 0.625, "messages": 0.125}},
        "memory": [
            {"predicted": {**part.items(), "total": part.total}, "process_shared": False, **measured}
            for part in estimate_memory(plan, [200] * plan.num_stages)
        ],
    }


def append(path: Path, text: str) -> None:
    """Add to a file."""
    with path.open("a") as file:
        file.write(text)


def edit(path: Path, **changes: Any) -> None:
    """Replace fields of a JSON file; None removes one."""
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
