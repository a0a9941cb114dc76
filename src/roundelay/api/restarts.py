"""Run a training again from its last checkpoint when it fails for a reason that need not come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from roundelay.api.events import Event, Observer, Restarted, Updated
from roundelay.api.resume import load_checkpoint
from roundelay.api.run_record import Trained
from roundelay.api.stop_condition import Length
from roundelay.api.training import Session
from roundelay.checkpoint.atomic_files import present
from roundelay.errors import DivergedError, RunError


def run_restarting(
    session: Session, restarts: int, run: Callable[[Session, Observer], Trained], notify: Observer, save_to: Path
) -> Trained:
    """Run a session; after a failure go on from the checkpoint at ``save_to``, or from where the session began.

    A loss that is not a number would come back, bit for bit: it is not tried again.

    Args:
        session: the training.
        restarts: how often it may begin again.
        run: runs a session, told of whom to notify.
        notify: told of everything; of a restart before it begins.
        save_to: where ``run`` writes its checkpoints.

    Raises:
        RoundelayError: the failure behind the last restart.
    """
    updates: list[Updated] = []

    def listen(event: Event) -> None:
        if isinstance(event, Updated):
            updates.append(event)
        notify(event)

    current = session
    for number in range(1, restarts + 1):
        try:
            trained = run(current, listen)
            return replace(trained, updates=tuple(updates))
        except DivergedError:
            raise
        except RunError as error:
            again = rest_of(session, save_to)
            if again is None:
                raise
            current = again
            updates[:] = [one for one in updates if one.update < current.extent.start_batch]
            notify(Restarted(number, current.extent.start_batch, str(error)))
    trained = run(current, listen)
    return replace(trained, updates=tuple(updates))


def rest_of(session: Session, save_to: Path) -> Session | None:
    """A session that goes on from the checkpoint which ``session`` has left at ``save_to``, to the same end.

    The session itself if it has left none; None if nothing is left to do.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    if not present(save_to).exists():
        return session
    start = load_checkpoint(save_to, session.captured)
    extent, steps = session.extent, None
    if extent.batches is not None:
        steps = extent.batches - (start.position.updates - extent.start_batch)
    if steps == 0 or (extent.epochs is not None and start.position.epoch >= extent.epochs):
        return None
    length = Length(steps=steps, epochs=extent.epochs)
    return Session(session.job, session.captured, session.plan, session.seed, length, start)
