"""A run of a comparison that is under way: what it has told, and the checkpoint from which it goes on if it must."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, final

from roundelay.api.checkpointing import Saving, evaluate, holding_averages
from roundelay.api.events import Evaluated, Updated
from roundelay.api.restarts import rest_of
from roundelay.api.training import Session
from roundelay.checkpoint.atomic_files import unwritten
from roundelay.errors import UsageError
from roundelay.observe.metrics_file import MetricsWriter, read_metrics

Told = Updated | Evaluated


@final
class PartialRun:
    """The folder of a run that is not finished. Entered it exists; it stays until :meth:`remove`.

    Args:
        path: the folder.

    Raises:
        RunError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        #: where checkpoints go
        self.saving = Saving(path=path / "checkpoint", interim=True)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritten(path, error) from error
        self._log = MetricsWriter(path / "told.jsonl")
        #: of the whole run, those before an interruption included, in their order
        self.events: list[Told] = []
        self._before_s = 0.0

    def rest(self, session: Session) -> Session:
        """What is left to do of a session, which may be all; what was told behind the checkpoint is forgotten.

        Raises:
            UsageError: the folder is damaged.
        """
        left = rest_of(session, self.saving.path) or session
        made = left.extent.start_batch
        self.events = self._read(made)
        updates = [event for event in self.events if isinstance(event, Updated)]
        if [event.update for event in updates] != list(range(made)):
            raise self._damaged(f"{len(updates)} updates beside a checkpoint after {made}")
        self._before_s = updates[-1].seconds if updates else 0.0
        self._evaluate(left)
        return left

    def note(self, event: Told) -> Told:
        """Keep what is told; returns it with the seconds since the run first began, interruptions left out.

        Raises:
            RunError: it cannot be written.
        """
        if isinstance(event, Updated):
            event = replace(event, seconds=self._before_s + event.seconds)
        self._log.write(**_record(event))
        self.events.append(event)
        return event

    def remove(self) -> None:
        """The run is finished and kept elsewhere."""
        self._log.close()
        shutil.rmtree(self._path, ignore_errors=True)

    def _evaluate(self, left: Session) -> None:
        """A checkpoint is written before its epoch is evaluated, which an interrupt may then prevent."""
        start = left.start
        if start is None or start.position.batches_into_epoch or left.job.evaluate is None:
            return
        updates, epoch = start.position.updates, start.position.epoch - 1
        if not any(isinstance(event, Evaluated) and event.updates == updates for event in self.events):
            with holding_averages(left.captured, start.optimizer):
                self.note(evaluate(left.job, left.captured.model, updates, epoch)[0])

    def _read(self, updates: int) -> list[Told]:
        """What was told of so many updates; the rest is cut off."""
        path = self._path / "told.jsonl"
        try:
            self._log.cut(updates)
            return [_event(record) for record in read_metrics(path)]
        except (UsageError, TypeError, KeyError, AttributeError) as error:
            raise self._damaged(f"{path.name}: {error}") from error

    def _damaged(self, got: str) -> UsageError:
        return UsageError(
            f"the unfinished run {self._path}",
            got=got,
            expected="what `roundelay compare` has written there",
            remedy="Remove this folder: its run then begins anew, and no other.",
        )

    def __enter__(self) -> PartialRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()


def _record(event: Told) -> dict[str, Any]:
    """A line of the file; one of an evaluation counts as its last update's."""
    if isinstance(event, Updated):
        return {"kind": "updated", **asdict(event)}
    return {"kind": "evaluated", "update": event.updates - 1, **asdict(event)}


def _event(record: dict[str, Any]) -> Told:
    kind, metrics = record.pop("kind"), _numbers(record.pop("metrics"))
    if kind == "updated":
        rates = tuple(record.pop("learning_rates"))
        return Updated(busy=tuple(record.pop("busy")), learning_rates=rates, metrics=metrics, **record)
    del record["update"]
    return Evaluated(metrics=metrics, **record)


def _numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """As they were told: what is no finite number is written as ``null``."""
    return {name: math.nan if value is None else value for name, value in metrics.items()}
