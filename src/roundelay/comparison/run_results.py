"""Results of a comparison's runs, read from their run folders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roundelay.errors import UsageError
from roundelay.observe.metrics_file import read_records
from roundelay.observe.run_folder import RunFolder
from roundelay.page.read_run import Evaluation, numbers, read_summary
from roundelay.session.events import Updated

LOSS = "loss"
"""Name of the training loss; an evaluated metric of this name becomes ``evaluate.loss``."""

TRAINING = "train."
"""Prefix of a metric that the loss function returns in addition to the loss; evaluated metrics have no prefix."""


def is_per_update(name: str) -> bool:
    """Whether a metric has a value for every update, as the loss has, and not for every evaluation."""
    return name == LOSS or name.startswith(TRAINING)


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a curve.

    Args:
        updates: number of updates until then; for a loss, including the update of its own batch.
        seconds: since the start of the run; nan if unknown.
        value: of the loss or metric; nan if it is not finite.
    """

    updates: int
    seconds: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Curves and speed of one finished run.

    Args:
        variant: the variant's name.
        seed: of the run.
        curves: name of the loss or a metric to its points, in order of updates.
        samples_per_second: over the whole run but its first tenth; nan if the run diverged.
        diverged: the update whose loss was not finite, or None.
    """

    variant: str
    seed: int
    curves: Mapping[str, tuple[Point, ...]]
    samples_per_second: float
    diverged: int | None


def read_result(variant: str, seed: int, folder: RunFolder) -> RunResult | None:
    """The result of a run; None if it has not finished.

    Raises:
        UsageError: a file of the run is damaged.
    """
    if not folder.summary.exists():
        return None
    try:
        summary = numbers(read_summary(folder.summary))
        diverged = int(summary["diverged"]) if "diverged" in summary else None
        count = int(summary["steps"]) if diverged is None else diverged
    except UsageError as error:
        raise damaged_run(folder, f"{error.subject}: {error.got}") from error
    except KeyError as error:
        raise damaged_run(folder, f"{folder.summary.name} without {error}") from error
    updates, evaluations = read_progress(folder, count)
    return RunResult(
        variant=variant,
        seed=seed,
        curves=_curves(updates, evaluations),
        samples_per_second=summary.get("samples_per_second", math.nan),
        diverged=diverged,
    )


def read_progress(folder: RunFolder, count: int) -> tuple[list[Updated], list[Evaluation]]:
    """The first ``count`` updates of a run, and the evaluations of their weights.

    Raises:
        UsageError: a file is damaged, or updates are missing.
    """
    try:
        updates = read_records(folder.metrics, Updated)[:count] if folder.metrics.exists() else []
        evaluations = read_records(folder.evaluations, Evaluation) if folder.evaluations.exists() else []
    except UsageError as error:
        raise damaged_run(folder, f"{error.subject}: {error.got}") from error
    if [updated.update for updated in updates] != list(range(count)):
        raise damaged_run(folder, f"{folder.metrics.name} without all of the first {count} updates")
    return updates, [evaluation for evaluation in evaluations if evaluation.update < count]


def damaged_run(folder: RunFolder, got: str) -> UsageError:
    """The error for a run of a comparison whose files cannot be used."""
    return UsageError(
        f"the run in {folder.path}",
        got=got,
        expected="what `roundelay compare` has written there",
        remedy="Remove this folder: this run is then repeated, and no other.",
    )


def _curves(updates: Sequence[Updated], evaluations: Sequence[Evaluation]) -> dict[str, tuple[Point, ...]]:
    seconds = {updated.update: updated.seconds for updated in updates}
    curves = {LOSS: [Point(updated.update + 1, updated.seconds, updated.loss) for updated in updates]}
    for updated in updates:
        for name, value in updated.metrics.items():
            curves.setdefault(TRAINING + name, []).append(Point(updated.update + 1, updated.seconds, value))
    per_update = set(curves)
    for evaluation in evaluations:
        at = seconds.get(evaluation.update, math.nan)  # of the update: evaluations run in parallel
        for name, value in evaluation.metrics.items():
            unique = f"evaluate.{name}" if name in per_update else name
            curves.setdefault(unique, []).append(Point(evaluation.update + 1, at, value))
    return {name: tuple(points) for name, points in curves.items()}
