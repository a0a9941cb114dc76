"""One run of a comparison: train in a run folder, or continue the interrupted run in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from roundelay.api.checkpointing import Saving, evaluate, holding_averages
from roundelay.api.events import Event, Observer, Updated, samples_per_second
from roundelay.api.observers import RunFolderObserver
from roundelay.api.restarts import rest_of
from roundelay.api.resume import load_checkpoint
from roundelay.api.run_results import read_progress
from roundelay.api.run_summary import write_results
from roundelay.api.training import Session
from roundelay.checkpoint.checkpoint import Checkpoint
from roundelay.errors import DivergedError
from roundelay.observe.run_folder import RunFolder


def run_in_folder(session: Session, folder: RunFolder, notify: Observer, on_resume: Callable[[int], None]) -> None:
    """Train to the end, from the checkpoint in the folder if there is one; a loss that is not finite is an end, too.

    Times are counted from the start of the first part of the run, without interruptions.

    Args:
        session: the whole run.
        folder: the run's folder, with its plan.
        notify: called with every event.
        on_resume: called with the number of updates that are not repeated, before the run continues.

    Raises:
        UsageError: the files of the interrupted run are damaged.
    """
    rest = rest_of(session, folder.checkpoint)
    start = load_checkpoint(folder.checkpoint, session.captured) if rest is None else rest.start
    with folder.open_metrics() as metrics:
        updates, evaluations = read_progress(folder, 0 if start is None else start.position.updates)
        record = RunFolderObserver(folder, metrics, len(updates))
        if start is not None:
            on_resume(len(updates))
            evaluated = bool(evaluations) and evaluations[-1].update == len(updates) - 1
            if not evaluated and (rest is None or not start.position.batches_into_epoch):
                _evaluate(session, start, record)
        if rest is None:  # interrupted between its last checkpoint and its summary
            folder.write_summary({"steps": len(updates), "samples_per_second": samples_per_second(updates)})
            return
        before_s = updates[-1].seconds if updates else 0.0

        def observe(event: Event) -> None:
            if isinstance(event, Updated):
                event = replace(event, seconds=before_s + event.seconds)
                updates.append(event)
            record(event)
            notify(event)

        try:
            trained = rest.run(notify=observe, saving=Saving(path=folder.checkpoint))
        except DivergedError:
            folder.write_summary({"diverged": len(updates)})
        else:
            whole = replace(trained, updates=tuple(updates), samples_per_second=samples_per_second(updates))
            write_results(rest, whole, folder, {}, "")


def _evaluate(session: Session, start: Checkpoint, notify: Observer) -> None:
    """Evaluate a checkpoint's weights; it was written before that, and an interruption came in between."""
    if session.job.evaluate is not None:
        at = start.position
        with holding_averages(session.captured, start.optimizer):
            epoch = at.epoch if at.batches_into_epoch else at.epoch - 1
            notify(evaluate(session.job, session.captured.model, at.updates, epoch)[0])
