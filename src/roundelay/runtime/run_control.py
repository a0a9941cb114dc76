"""What a run's launcher asks of its reader while the run goes on, also where that is another process.

The reader is the one place from which every stage hears what is the last batch, and behind which a checkpoint is due:
it says so in the header of each micro-batch. So whoever wants a run to end early asks the reader, at any moment, and
all stages agree by themselves.
"""

from __future__ import annotations

import mmap
from typing import final

_NOTHING, _ASKED = 0, 1
_SAVE, _END = 0, 1


@final
class RunControl:
    """Two flags in memory that forked processes share: each is set by the launcher, and read by the reader."""

    def __init__(self) -> None:
        self._flags = mmap.mmap(-1, mmap.PAGESIZE)

    def save_soon(self) -> None:
        """Have a checkpoint made behind the update of the next batch that is read."""
        self._flags[_SAVE] = _ASKED

    def end_soon(self) -> None:
        """Make the next batch that is read the run's last."""
        self._flags[_END] = _ASKED

    @property
    def ending(self) -> bool:
        """Whether the next batch is to be the last."""
        return self._flags[_END] == _ASKED

    def takes_save(self) -> bool:
        """Whether a checkpoint was asked for and not yet taken; it counts as taken then."""
        asked = self._flags[_SAVE] == _ASKED
        if asked:
            self._flags[_SAVE] = _NOTHING
        return asked
