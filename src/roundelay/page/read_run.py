"""Read and check the files of a run folder for its report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from roundelay.errors import PlanError, UsageError
from roundelay.ir.plan import Plan
from roundelay.observe.metrics_file import read_metrics
from roundelay.observe.run_folder import RunFolder
from roundelay.page.timeline import Window
from roundelay.page.trace_window import read_window
from roundelay.schedules import num_workers


@dataclass(frozen=True, slots=True)
class Update:
    """One line of ``metrics.jsonl``; NaN where a number is missing.

    Args:
        number: of the update, t.
        loss: mean loss of the batch.
        rate: samples per second.
        at_s: seconds since the time of the first line.
        metrics: what the job's loss function returned in addition to the loss.
    """

    number: int
    loss: float
    rate: float
    at_s: float
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the job's ``evaluate`` returned after update ``number``."""

    number: int
    at_s: float
    metrics: Mapping[str, float] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as read from its folder.

    Args:
        name: of the folder.
        plan: the plan that was run.
        plan_text: its text, with comments.
        updates: at least one.
        evaluations: in order.
        summary: empty until the run has finished.
        window: part of the trace in the steady state, if there is a trace.
    """

    name: str
    plan: Plan
    plan_text: str
    updates: Sequence[Update]
    evaluations: Sequence[Evaluation]
    summary: Mapping[str, Any] = field(hash=False)
    window: Window | None

    def plain(self) -> dict[str, float]:
        """Samples per second of plain PyTorch, by number of threads."""
        return {name: rate for name, rate in numbers(self.summary.get("plain_samples_per_second")).items() if rate > 0}


def read_run(path: Path) -> Run:
    """Read the folder of a run that has finished, has failed or is still running.

    Raises:
        UsageError: there is no such folder, the run has made no update, or one of its files is damaged.
        PlanError: its plan cannot be read.
    """
    if not path.is_dir():
        raise UsageError(
            f"run folder {path}",
            got="a file" if path.exists() else "no such folder",
            expected="the folder of a run, such as runs/latest",
            remedy="Name a folder that `roundelay train` has written.",
        )
    folder = RunFolder.reopen(path)
    text = _text(folder.plan)
    lines = read_metrics(folder.metrics) if folder.metrics.exists() else []
    if not lines:
        raise UsageError(
            f"run folder {path}",
            got="no update in metrics.jsonl",
            expected="at least one line: there is nothing to draw yet",
            remedy="Repeat the command after the first update of the run.",
        )
    start = _number(lines[0].get("time"))
    evaluations = read_metrics(folder.evaluations) if folder.evaluations.exists() else []
    plan = Plan.parse(text)
    window = read_window(folder.trace, num_workers(plan), plan.micro_batches) if folder.trace.exists() else None
    return Run(
        name=path.resolve().name,
        plan=plan,
        plan_text=text,
        updates=[_update(folder.metrics, n, line, start) for n, line in enumerate(lines, 1)],
        evaluations=[_evaluation(folder.evaluations, n, line, start) for n, line in enumerate(evaluations, 1)],
        summary=_summary(folder.summary) if folder.summary.exists() else {},
        window=window,
    )


def _update(path: Path, line: int, fields: Mapping[str, Any], start: float) -> Update:
    rate, at = _number(fields.get("samples_per_second")), _number(fields.get("time"))
    number, loss = _count(path, line, fields), _number(fields.get("loss"))
    return Update(number, loss, rate, at - start, _metrics(fields.get("metrics") or {}, path, line))


def _evaluation(path: Path, line: int, fields: Mapping[str, Any], start: float) -> Evaluation:
    metrics = _metrics(fields.get("metrics"), path, line)
    return Evaluation(_count(path, line, fields), _number(fields.get("time")) - start, metrics)


def _metrics(value: Any, path: Path, line: int) -> dict[str, float]:
    """Numbers by name; NaN in place of anything else."""
    if not isinstance(value, dict):
        raise damaged(path, f"line {line} without `metrics`")
    return {str(name): _number(part) for name, part in value.items()}


def _count(path: Path, line: int, fields: Mapping[str, Any]) -> int:
    value = fields.get("update")
    if not isinstance(value, int) or isinstance(value, bool):
        raise damaged(path, f"line {line} without the number of its update")
    return value


def _number(value: Any) -> float:
    """A number, or NaN for anything else."""
    ordinary = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if ordinary else math.nan


def numbers(value: Any) -> dict[str, float]:
    """The finite numbers of an object, by name; empty for anything else."""
    values = {str(name): _number(part) for name, part in value.items()} if isinstance(value, dict) else {}
    return {name: part for name, part in values.items() if math.isfinite(part)}


def _summary(path: Path) -> Mapping[str, Any]:
    try:
        summary = json.loads(_text(path))
    except ValueError as error:
        raise damaged(path, f"no JSON ({error})") from error
    if not isinstance(summary, dict):
        raise damaged(path, "no JSON object")
    return summary


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        kind = PlanError if path.suffix == ".toml" else UsageError
        raise kind(
            f"file {path}",
            got=str(error),
            expected="text that can be read",
            remedy="Check whether the run folder is complete.",
        ) from error


def damaged(path: Path, got: str) -> UsageError:
    """The error for a file of a run folder that cannot be used."""
    return UsageError(
        f"file {path}",
        got=got,
        expected="a file as `roundelay train` writes it",
        remedy="Move the file away; the report can be written without it unless it is the plan or the metrics.",
    )
