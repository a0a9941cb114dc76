"""After which updates a checkpoint is due, and where a run starts and ends.

Both are decided where batches are read: the header of a micro-batch says that a checkpoint follows its batch's update,
or that it is the run's last. A checkpoint that falls due while the one before is still being written is left out:
training does not wait for the disk, and at most one copy of the state waits for it, that of the run's end.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import final


@dataclass(frozen=True, slots=True)
class Extent:
    """Start and end of a run.

    Args:
        start_g: number of the first micro-batch.
        start_batch: number of the first batch.
        start_epoch: epoch in which it starts.
        skip: batches of that epoch that were trained on before.
        batches: number of batches, or None.
        epochs: the epoch to end before, or None.
        save_every: updates between checkpoints, counted from update 0, in addition to one at every epoch's end; 0: only
            at epochs' ends; None: no checkpoints.
    """

    start_g: int = 0
    start_batch: int = 0
    start_epoch: int = 0
    skip: int = 0
    batches: int | None = None
    epochs: int | None = None
    save_every: int | None = None

    def saves(self, batch: int, ends_epoch: bool) -> bool:
        """Whether a checkpoint is due after the update of this batch, which is not the run's last."""
        every = self.save_every
        return every is not None and (ends_epoch or (every > 0 and (batch + 1) % every == 0))


_NOTHING, _REQUESTED = 0, 1
_SAVE, _END, _SAVING = 0, 1, 2
_LEFT_OUT = 8
"""Behind the flags: where a count of eight bytes is that the reader alone changes."""


@final
class RunControl:
    """Flags in shared memory, between the launching process and the reader, which may be in a forked worker."""

    def __init__(self) -> None:
        self._flags = mmap.mmap(-1, mmap.PAGESIZE)

    def save_soon(self) -> None:
        """Request a checkpoint after the update of the next batch that is read."""
        self._flags[_SAVE] = _REQUESTED

    def end_soon(self) -> None:
        """Make the next batch that is read the run's last."""
        self._flags[_END] = _REQUESTED

    @property
    def ending(self) -> bool:
        """Whether the next batch is to be the run's last."""
        return self._flags[_END] == _REQUESTED

    def begin_save(self) -> None:
        """Note that a checkpoint has been announced, by the reader."""
        self._flags[_SAVING] = _REQUESTED

    def end_save(self) -> None:
        """Note that a checkpoint has been written, or could not be."""
        self._flags[_SAVING] = _NOTHING

    @property
    def saving(self) -> bool:
        """Whether a checkpoint is announced and not yet written."""
        return self._flags[_SAVING] == _REQUESTED

    def leave_out(self) -> None:
        """Count a checkpoint that is due and not made, as the one before is still being written; by the reader."""
        struct.pack_into("Q", self._flags, _LEFT_OUT, self.left_out + 1)

    @property
    def left_out(self) -> int:
        """Checkpoints left out so far."""
        return int(struct.unpack_from("Q", self._flags, _LEFT_OUT)[0])

    def takes_save(self) -> bool:
        """Return whether a checkpoint is requested, and clear the request."""
        requested = self._flags[_SAVE] == _REQUESTED
        if requested:
            self._flags[_SAVE] = _NOTHING
        return requested
