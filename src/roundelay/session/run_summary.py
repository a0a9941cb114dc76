"""The results that a finished training leaves in its run folder: ``summary.json`` and ``trace.json``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from roundelay.errors import counted
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.channels import channels_of
from roundelay.lower.priced_bytes import priced_bytes
from roundelay.lower.reading import read
from roundelay.observe.progress_lines import duration
from roundelay.observe.run_folder import RunFolder
from roundelay.observe.state_digest import joined, state_digest
from roundelay.observe.time_shares import gaps_of, shares_of
from roundelay.observe.trace import Gap, Span, write_trace
from roundelay.planning.memory_report import memory_report, optimizer_bytes
from roundelay.session.run_record import Trained
from roundelay.session.training import Session
from roundelay.simulator import simulate
from roundelay.simulator.critical_path import LEAST, batch_terms

UNCHECKED = "not checked"
"""What a comparison with plain PyTorch that could not be made says of itself."""


def write_results(
    session: Session,
    trained: Trained,
    folder: RunFolder,
    baselines: Mapping[int, float],
    checked: str,
    notices: Sequence[str] = (),
) -> dict[str, Any]:
    """Write summary and trace; returns the summary.

    Args:
        session: the training.
        trained: what it returned.
        folder: the run's folder.
        baselines: samples per second of plain PyTorch by number of threads, if measured.
        checked: how the captured job was compared with plain PyTorch, in one line; empty if it was not.
        notices: what the user is told of the plan.

    Raises:
        RunError: they cannot be written.
    """
    spans = spans_of(trained)
    gaps = gaps_between(spans, trained.plan)
    told = {"check": checked, "notices": list(notices), "terms": terms_of(session, trained.plan, spans, gaps)}
    summary = _summary(trained, baselines, folder) | utilization(session, trained, spans, gaps) | told
    folder.write_summary(summary)  # before the trace, which is larger and may not fit on the disk
    loads = [load for _, loads in sorted(trained.loads.items()) for load in loads]
    write_trace(folder.trace, spans, gaps=gaps, loads=loads, names=stage_names(session))
    return summary


def summary_lines(summary: Mapping[str, Any], plan: Plan) -> list[str]:
    """A run in a few lines, its loss first.

    Args:
        summary: of :func:`write_results`.
        plan: what was run.
    """
    pairs = {"loss": (summary["loss_first"], summary["loss_last"])}
    pairs |= {name: (value, summary["metrics_last"][name]) for name, value in summary["metrics_first"].items()}
    told = ", ".join(f"{name} {first:.4f} -> {last:.4f}" for name, (first, last) in pairs.items())
    lines = [f"{told} in {counted(summary['steps'], 'update')}, {duration(summary['wall_s'])}"]
    if summary["evaluation"]:
        lines.append("evaluation: " + ", ".join(f"{name} {value:.4f}" for name, value in summary["evaluation"].items()))
    rate, plain = summary["samples_per_second"], summary["plain_samples_per_second"]
    of_plain = f": {rate / max(plain.values()):.2f} x plain PyTorch" if plain else ""
    lines.append(f"{rate:.1f} samples/s{of_plain}, {plan.rule} on {plan.arrangement} over {plan.transport}")
    if UNCHECKED in summary["check"]:
        lines.append(f"warning: {summary['check']}")
    if summary["stopped"]:
        lines.append(f"ended early: {summary['stopped']}")
    if any(summary["skipped_updates"]):
        lines.append("updates skipped, by stage: " + ", ".join(map(str, summary["skipped_updates"])))
    return lines


def spans_of(trained: Trained) -> list[Span]:
    """All instructions of a run as spans of its trace."""
    return [
        Span(k, *event[:-3], takes=tuple(event.takes), gives=tuple(event.gives))
        for k, events in sorted(trained.events.items())
        for event in events
    ]


def terms_of(session: Session, plan: Plan, spans: Sequence[Span], gaps: Sequence[Gap]) -> dict[str, dict[str, float]]:
    """Seconds of a batch by terms of the critical path, as predicted and measured; nothing where clocks differ."""
    if not spans or any(gap.kind == "idle" for gap in gaps):
        return {}
    simulation = simulate(plan, session.programs, stream([plan.micro_batches] * LEAST))
    return {
        "predicted": batch_terms(simulation.spans(), session.programs),
        "measured": batch_terms(spans, session.programs, real=True),
    }


def gaps_between(spans: Sequence[Span], plan: Plan) -> list[Gap]:
    """The gaps between the instructions of a run."""
    return gaps_of(spans, channels_of(read(plan)), plan.num_workers)


def stage_names(session: Session) -> dict[int, str]:
    """Worker to the operations and modules in which its segments end, as text."""
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
    """Fields of the summary: shares of time, memory and bytes by worker, and where the measured stretch begins."""
    plan, reports = trained.plan, [report for _, report in sorted(trained.workers.items())]
    batches = sum(report["updates"] for report in reports) // session.reading.updaters
    shares = shares_of(spans, gaps, plan.num_workers)
    optimizer_sizes = optimizer_bytes(session.job, session.captured, session.partition, plan)
    return {
        "shares_since_micro_batch": max(data["first_event_g"] for data in trained.workers.values()),
        "busy": [share.busy for share in shares],
        "shares": [share.as_json() for share in shares],
        "memory": memory_report(plan, optimizer_sizes, trained.workers, activation_bytes(trained)),
        "bytes_sent": [sum(report["bytes_sent"].values()) for report in reports],
        "bytes_priced": priced_bytes(session.reading, session.programs, batches),
    }


def activation_bytes(trained: Trained) -> list[int]:
    """Most bytes that each worker's tapes, and the inputs kept for its deferred weight gradients, took at one time."""
    peaks = []
    for worker, report in sorted(trained.workers.items()):
        events = trained.events.get(worker, [])
        forwards = Counter((event.stage, event.g) for event in events if event.opcode == "forward")
        parts = {stage: 1 for stage, _ in forwards}
        for (stage, _), count in forwards.items():
            parts[stage] = max(parts[stage], count)
        changes = (_change(report, event.opcode, event.stage, parts.get(event.stage, 1)) for event in events)
        peaks.append(round(max(accumulate(changes, initial=0.0))))
    return peaks


def digest_of(workers: Sequence[Mapping[str, Any]], name: str) -> str | None:
    """The digest of a run's whole state, of what its workers report under a name; None if they report nothing."""
    sums = [report[name] for report in workers if report.get(name) is not None]
    return state_digest(joined(sums)) if sums else None


def _change(report: Mapping[str, Any], opcode: str, stage: int, parts: int) -> float:
    """Bytes that an instruction allocates (positive) or frees (negative); parts of a forward are taken to be equal."""
    tape, debt = int(report["tape_bytes"][str(stage)]), int(report["owed_bytes"][str(stage)])
    return {"forward": tape / parts, "backward": (debt - tape) / parts, "backward-weight": -debt}.get(opcode, 0.0)


def _summary(trained: Trained, baselines: Mapping[int, float], folder: RunFolder) -> dict[str, Any]:
    plan, workers = trained.plan, [report for _, report in sorted(trained.workers.items())]
    return {
        "rule": plan.rule,
        "predictor": plan.predictor,
        "backward": plan.backward,
        "workers": plan.num_workers,
        "threads": [report["threads"] for report in workers],
        "micro_batches": plan.micro_batches,
        "transport": plan.transport,
        "steps": len(trained.updates),
        "loss_first": trained.updates[0].loss,
        "loss_last": trained.updates[-1].loss,
        "metrics_first": trained.updates[0].metrics,
        "metrics_last": trained.updates[-1].metrics,
        "samples_per_second": trained.samples_per_second,
        "plain_samples_per_second": {str(threads): rate for threads, rate in baselines.items()},
        "evaluation": dict(trained.evaluations[-1].metrics) if trained.evaluations else {},
        "activation_bytes": activation_bytes(trained),
        "skipped_updates": [report["skipped"] for report in workers],
        "digest_start": digest_of(workers, "start_sums"),
        "digest_end": digest_of(workers, "end_sums"),
        "bytes_received": [sum(report["bytes_received"].values()) for report in workers],
        "wall_s": max(report["wall_s"] for report in workers),
        "stopped": trained.stopped,
        "run_folder": str(folder.path),
    }
