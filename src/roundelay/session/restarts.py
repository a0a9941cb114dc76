"""Restart a failed training from its last checkpoint, unless the same failure is certain to recur."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from roundelay.checkpoint.stored_files import is_checkpoint
from roundelay.errors import DivergedError, RunError
from roundelay.session.events import Event, Observer, Restarted, Updated
from roundelay.session.resume import load_checkpoint
from roundelay.session.run_record import Trained
from roundelay.session.stop_condition import Length
from roundelay.session.training import Session


def run_restarting(
    session: Session, restarts: int, run: Callable[[Session, Observer], Trained], notify: Observer, save_to: Path
) -> Trained:
    """Run a session; after a failure continue from the checkpoint at ``save_to``, or start again without one.

    A loss that is not finite would recur bit for bit, so it ends the training.

    Args:
        session: the training.
        restarts: the largest number of restarts.
        run: runs a session and passes its events to the given function.
        notify: called with every event, and with a restart before it begins.
        save_to: where ``run`` writes its checkpoints.

    Raises:
        RoundelayError: the failure after the last restart.
    """
    updates: list[Updated] = []

    def listen(event: Event) -> None:
        if isinstance(event, Updated):
            updates.append(event)
        notify(event)

    current, number = session, 0
    while True:
        try:
            return replace(run(current, listen), updates=tuple(updates))
        except DivergedError:
            raise
        except RunError as error:
            number += 1
            rest = rest_of(session, save_to) if number <= restarts else None
            if rest is None:
                raise
            current = rest
            updates[:] = [updated for updated in updates if updated.update < current.extent.start_batch]
            notify(Restarted(number, current.extent.start_batch, str(error)))


def rest_of(session: Session, save_to: Path) -> Session | None:
    """A session that continues from the checkpoint that ``session`` has written to ``save_to``, to the same end.

    Returns:
        ``session`` itself if there is no checkpoint; None if the checkpoint is that of the end.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    if not is_checkpoint(save_to):
        return session
    start = load_checkpoint(save_to, session.captured, lazily=session.job.weights is not None)
    extent, steps = session.extent, None
    if extent.batches is not None:
        steps = extent.batches - (start.position.updates - extent.start_batch)
    if steps == 0 or (extent.epochs is not None and start.position.epoch >= extent.epochs):
        return None
    length = Length(steps=steps, epochs=extent.epochs)
    return Session(session.job, session.captured, session.plan, session.seed, length, start)
