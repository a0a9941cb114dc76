"""Observers of a training: files of its run folder, curves for TensorBoard, the user's functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, final

from roundelay.errors import UserCodeError
from roundelay.job import StopTraining
from roundelay.observe.metrics_file import MetricsWriter
from roundelay.observe.run_folder import RunFolder
from roundelay.observe.tensorboard import Curves
from roundelay.session.events import Evaluated, Event, Observer, Restarted, Traced, Updated
from roundelay.session.trace_files import TraceFiles


@final
class RunFolderObserver:
    """Writes updates to ``metrics.jsonl``, evaluations to ``evaluations.jsonl``, and the traces of a free order.

    Args:
        folder: the run's folder.
        metrics: its metrics file, open.
        start: number of the run's first update: lines of it and of later ones are removed.

    Raises:
        RunError: the files cannot be read or written.
    """

    def __init__(self, folder: RunFolder, metrics: MetricsWriter, start: int) -> None:
        self._folder, self._metrics = folder, metrics
        self._traces = TraceFiles(folder.path)
        self._cut(start)

    def __call__(self, event: Event) -> None:
        """Write an event.

        Raises:
            RunError: it cannot be written.
        """
        self._traces(event)
        if isinstance(event, Updated):
            self._metrics.write(
                update=event.update,
                epoch=event.epoch,
                loss=event.loss,
                rows=event.rows,
                samples_per_second=event.samples_per_second,
                busy=event.busy,
                learning_rates=event.learning_rates,
                seconds=event.seconds,
                time=round(time.time(), 3),
                **({"metrics": event.metrics} if event.metrics else {}),
                **({} if event.loss_scale is None else {"loss_scale": event.loss_scale}),
            )
        elif isinstance(event, Evaluated):
            self._folder.add_evaluation(event.updates - 1, event.epoch, event.metrics)
        elif isinstance(event, Restarted):
            self._cut(event.updates)

    def _cut(self, updates: int) -> None:
        self._metrics.cut(updates)
        self._folder.cut_evaluations(updates)


def tensorboard_observer(curves: Curves) -> Observer:
    """An observer that draws updates and evaluations as curves; it raises RunError where they cannot be written."""

    def draw(event: Event) -> None:
        if isinstance(event, Updated):
            values = {"loss": event.loss, "samples_per_second": event.samples_per_second}
            values |= {f"training/{name}": value for name, value in event.metrics.items()}
            values |= {} if event.loss_scale is None else {"loss_scale": event.loss_scale}
            values |= {f"learning_rate/group_{i}": rate for i, rate in enumerate(event.learning_rates)}
            values |= {f"busy/worker_{k}": share for k, share in enumerate(event.busy)}
            curves.write(event.update, values)
        elif isinstance(event, Evaluated):  # at the same step as the loss of the last update
            curves.write(event.updates - 1, {f"evaluation/{name}": value for name, value in event.metrics.items()})
        elif isinstance(event, Restarted):
            curves.restart(event.updates)

    return draw


def user_observer(
    on_update: Callable[[Updated], None] | None, observers: Sequence[Observer], check_settings: Callable[[], None]
) -> Observer:
    """Call the user's functions; an exception in one becomes a :class:`UserCodeError`.

    After each call ``check_settings`` looks for changes that the stages would not notice.
    """

    def call(event: Event, function: Callable[[Any], None], name: str) -> None:
        try:
            function(event)
        except StopTraining:
            raise
        except Exception as error:  # user code
            raise UserCodeError(
                name,
                got=f"{type(error).__name__}: {error}",
                expected=f"a function of one event, here {type(event).__name__}, that returns",
                remedy="Correct the function; with save_to, resume continues from the last checkpoint.",
            ) from error
        check_settings()

    def observe(event: Event) -> None:
        for observer in () if isinstance(event, Traced) else observers:
            call(event, observer, f"an observer of {type(event).__name__}")
        if on_update is not None and isinstance(event, Updated):
            call(event, on_update, f"on_update at update {event.update}")

    return observe
