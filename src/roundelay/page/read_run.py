"""Read and check the files of a run folder for its report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from roundelay.errors import PlanError, UsageError
from roundelay.ir.plan import Plan
from roundelay.observe.metrics_file import read_records
from roundelay.observe.run_folder import RunFolder
from roundelay.page.timeline import Window
from roundelay.page.trace_window import read_window


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``metrics.jsonl``; NaN where a number is missing.

    Args:
        update: its number, t.
        loss: mean loss of the batch.
        samples_per_second: over the last few seconds.
        time: Unix time in seconds.
        metrics: what the job's loss function returned in addition to the loss.
    """

    update: int
    loss: float = math.nan
    samples_per_second: float = math.nan
    time: float = math.nan
    metrics: Mapping[str, float] = {}


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``evaluations.jsonl``: what the job's ``evaluate`` returned after an update."""

    update: int
    time: float = math.nan
    metrics: Mapping[str, float]


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

    def seconds(self, record: Update | Evaluation) -> float:
        """Seconds from the first update to an update or evaluation; NaN if unknown."""
        return record.time - self.updates[0].time

    def notices(self) -> list[str]:
        """What the user was told of the plan before the run."""
        notices = self.summary.get("notices")
        return [text for text in notices if isinstance(text, str)] if isinstance(notices, list) else []

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
    updates = read_records(folder.metrics, Update) if folder.metrics.exists() else []
    if not updates:
        raise UsageError(
            f"run folder {path}",
            got="no update in metrics.jsonl",
            expected="at least one line: there is nothing to draw yet",
            remedy="Repeat the command after the first update of the run.",
        )
    plan = Plan.parse(text)
    return Run(
        name=path.resolve().name,
        plan=plan,
        plan_text=text,
        updates=updates,
        evaluations=read_records(folder.evaluations, Evaluation) if folder.evaluations.exists() else [],
        summary=read_summary(folder.summary) if folder.summary.exists() else {},
        window=read_window(folder.trace, plan.num_workers, plan.micro_batches) if folder.trace.exists() else None,
    )


def numbers(value: Any) -> dict[str, float]:
    """The finite numbers of an object, by name; empty for anything else."""
    fields = value.items() if isinstance(value, dict) else ()
    return {str(name): float(part) for name, part in fields if type(part) in (int, float) and math.isfinite(part)}


def read_summary(path: Path) -> dict[str, Any]:
    """The summary of a finished run.

    Raises:
        UsageError: it cannot be read, or is not a JSON object.
    """
    try:
        return msgspec.json.decode(_text(path), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise damaged(path, f"no JSON object ({error})") from error


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
