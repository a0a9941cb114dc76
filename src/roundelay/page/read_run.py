"""What a run folder holds, checked: the page is drawn from these values and nothing else."""

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


@dataclass(frozen=True, slots=True)
class Update:
    """One line of the metrics: NaN where a number is missing, seconds from the first line's time.

    Args:
        number: t.
        loss: the batch's mean loss.
        rate: samples per second.
        at_s: when.
        metrics: what the job's loss returned beside the loss.
    """

    number: int
    loss: float
    rate: float
    at_s: float
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the job's ``evaluate`` said after update ``number``."""

    number: int
    at_s: float
    metrics: Mapping[str, float] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its folder tells it.

    Args:
        name: the folder's.
        plan: what was run.
        plan_text: its text, with comments.
        updates: at least one.
        evaluations: in order.
        summary: the summary, empty while the run has not ended.
        window: a stretch of the steady state, if there is a trace.
    """

    name: str
    plan: Plan
    plan_text: str
    updates: Sequence[Update]
    evaluations: Sequence[Evaluation]
    summary: Mapping[str, Any] = field(hash=False)
    window: Window | None

    def plain(self) -> dict[str, float]:
        """Samples per second of plain PyTorch, by threads."""
        return {name: rate for name, rate in numbers(self.summary.get("plain_samples_per_second")).items() if rate > 0}


def read_run(path: Path) -> Run:
    """Read a run's folder, whether the run has ended, has failed or is still going on.

    Raises:
        UsageError: there is no such folder, nothing has been trained in it, or a file in it is damaged.
        PlanError: its plan cannot be read.
    """
    if not path.is_dir():
        raise UsageError(
            f"run folder {path}",
            got="a file" if path.exists() else "no such folder",
            expected="the folder of a run, such as runs/latest",
            remedy="Name a folder that `roundelay train` has made.",
        )
    folder = RunFolder.reopen(path)
    text = _text(folder.plan)
    lines = read_metrics(folder.metrics) if folder.metrics.exists() else []
    if not lines:
        raise UsageError(
            f"run folder {path}",
            got="no update in metrics.jsonl",
            expected="at least one line: there is nothing to draw yet",
            remedy="Report again after the first update of the run.",
        )
    begin = _number(lines[0].get("time"))
    evaluations = read_metrics(folder.evaluations) if folder.evaluations.exists() else []
    plan = Plan.parse(text)
    window = read_window(folder.trace, plan.num_workers, plan.micro_batches) if folder.trace.exists() else None
    return Run(
        name=path.resolve().name,
        plan=plan,
        plan_text=text,
        updates=[_update(folder.metrics, n, line, begin) for n, line in enumerate(lines, 1)],
        evaluations=[_evaluation(folder.evaluations, n, line, begin) for n, line in enumerate(evaluations, 1)],
        summary=_summary(folder.summary) if folder.summary.exists() else {},
        window=window,
    )


def _update(path: Path, line: int, fields: Mapping[str, Any], begin: float) -> Update:
    rate, at = _number(fields.get("samples_per_second")), _number(fields.get("time"))
    number, loss = _count(path, line, fields), _number(fields.get("loss"))
    return Update(number, loss, rate, at - begin, _metrics(fields.get("metrics") or {}, path, line))


def _evaluation(path: Path, line: int, fields: Mapping[str, Any], begin: float) -> Evaluation:
    found = _metrics(fields.get("metrics"), path, line)
    return Evaluation(_count(path, line, fields), _number(fields.get("time")) - begin, found)


def _metrics(value: Any, path: Path, line: int) -> dict[str, float]:
    """Numbers by name, NaN for what is none."""
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
    """The numbers of an object, by name; none of anything else."""
    found = {str(name): _number(part) for name, part in value.items()} if isinstance(value, dict) else {}
    return {name: part for name, part in found.items() if math.isfinite(part)}


def _summary(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise damaged(path, f"no JSON ({error})") from error
    if not isinstance(found, dict):
        raise damaged(path, "no JSON object")
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        kind = PlanError if path.suffix == ".toml" else UsageError
        raise kind(
            f"file {path}",
            got=str(error),
            expected="text that can be read",
            remedy="See whether the run folder is whole.",
        ) from error


def damaged(path: Path, got: str) -> UsageError:
    """The error for a file that is not as a run writes it."""
    return UsageError(
        f"file {path}",
        got=got,
        expected="a file as `roundelay train` writes it",
        remedy="Move the file away; the report does without it where it can.",
    )
