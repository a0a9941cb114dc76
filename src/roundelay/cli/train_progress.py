"""Observers of ``roundelay train``: the screen, and the end of a run at a signal's request."""

from __future__ import annotations

from typing import final

from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from roundelay.cli.screen import stderr
from roundelay.deferred_signals import EndedAsAsked
from roundelay.observe.progress_lines import ProgressLines, RunLength
from roundelay.observe.run_folder import RunFolder
from roundelay.runtime.loading.checkpoint_schedule import RunControl
from roundelay.session.events import Drained, Evaluated, Event, NotSaved, Restarted, Saved, Skipped, Stopping, Updated

_REPORTED_SKIPS = (8, 16, 32, 64, 128)
"""Numbers of updates skipped in a row that are reported; a dynamic scale settles after fewer."""


@final
class ScreenObserver:
    """Shows a training on stderr: progress, evaluations, and messages.

    Progress is a line that changes on a terminal; elsewhere a line every ten seconds.

    Args:
        length: of the run.
        quiet: show messages only.
    """

    def __init__(self, length: RunLength, *, quiet: bool) -> None:
        self._length, self._quiet = length, quiet
        self._progress = _progress_line() if stderr.is_terminal and not quiet else None
        self._task = None if self._progress is None else self._progress.add_task("...", total=length.total)
        self._lines = ProgressLines(length, _plainly)
        self._reported_left_out = False

    def __call__(self, event: Event) -> None:
        """Show an event."""
        if isinstance(event, Restarted) and self._progress is not None and self._task is not None:
            self._progress.stop()  # workers are forked now
            self._progress.update(self._task, completed=event.updates)
        if message := _message(event):
            stderr.print(message, markup=False)
        elif isinstance(event, Saved) and event.left_out:
            self._report_left_out(event)
        elif isinstance(event, Evaluated) and not self._quiet:
            metrics = "  ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
            _plainly(f"after update {event.updates}: {metrics}")
        elif isinstance(event, Updated) and not self._quiet:
            self._length.see(event.epoch)
            self._show(event)

    def _show(self, event: Updated) -> None:
        if self._progress is None or self._task is None:
            self._lines.update(event.update, event.loss, event.metrics, event.samples_per_second)
            return
        self._progress.start()  # only now: its thread must not be alive while workers are forked
        self._progress.update(
            self._task, completed=event.update + 1, total=self._length.total, description=_progress_text(event)
        )

    def _report_left_out(self, event: Saved) -> None:
        """Say once that checkpoints are left out."""
        if not self._reported_left_out:
            stderr.print(
                f"A checkpoint was still being written when the next was due: {event.left_out} left out, and later "
                f"ones likewise. {event.path} is complete up to update {event.updates - 1}.",
                markup=False,
            )
        self._reported_left_out = True

    def close(self) -> None:
        """Leave the progress line as it is, and end its thread."""
        if self._progress is not None:
            self._progress.stop()


def _plainly(line: str) -> None:
    stderr.print(line, markup=False, soft_wrap=True)


def _progress_line() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("update"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        console=stderr,
        transient=False,
    )


def _progress_text(event: Updated) -> str:
    busy = " ".join(f"{share:.0%}" for share in event.busy)
    metrics = "".join(f"  {escape(name)} {value:.4f}" for name, value in event.metrics.items())
    return f"loss {event.loss:.4f}{metrics}  {event.samples_per_second:.0f} samples/s  busy {busy}"


def _message(event: Event) -> str:
    """A message on an event that is shown in any case; empty for most events."""
    match event:
        case Restarted():
            return f"{event.cause}\nRestart {event.number}: continuing after update {event.updates}."
        case Drained(micro_batches=0):
            return (
                "The first batches read the checkpoint's weights, and not older ones, as they would in one run: "
                f"{event.reason}."
            )
        case Drained():
            return (
                f"{event.micro_batches} micro-batches that were in flight are dropped and start again: {event.reason}."
            )
        case Skipped() if event.in_a_row in _REPORTED_SKIPS:
            return (
                f"Updates {event.update - event.in_a_row + 1} to {event.update} are skipped: their gradients are not "
                f"finite, with losses scaled by up to {event.loss_scale:g}."
            )
        case NotSaved():
            return f"No checkpoint at {event.path}: {event.reason}. The one before it, if there is one, is complete."
        case Stopping():
            return f"The training ends soon: {event.reason}"
    return ""


@final
class GracefulStop:
    """Ends a run at a signal's request: a checkpoint in mid-flight, then ``KeyboardInterrupt``.

    Args:
        control: of the run.
        folder: the run's folder.
    """

    def __init__(self, control: RunControl, folder: RunFolder) -> None:
        self._control, self._folder = control, folder
        self._updates = 0
        self._requested_at: int | None = None

    def request(self) -> None:
        """Request the checkpoint and the end."""
        self._requested_at = self._updates
        self._control.save_soon()

    def ready(self) -> bool:
        """Whether there is anything to save."""
        return self._updates > 0

    def __call__(self, event: Event) -> None:
        """Take an event; the requested checkpoint ends the run.

        Raises:
            KeyboardInterrupt: the checkpoint is written, or cannot be.
        """
        if isinstance(event, Updated):
            self._updates = event.update + 1
        if self._requested_at is None:
            return
        if isinstance(event, Saved) and event.updates >= self._requested_at:
            done = f"the checkpoint after update {event.updates - 1} is written"
            stderr.print(f"Asked to end: {done}. Continue with --from {self._folder.path}.", markup=False)
            raise EndedAsAsked(done)
        if isinstance(event, NotSaved):
            raise KeyboardInterrupt
