"""Where workers leave short texts for one another before they are connected: the addresses at which they serve."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import final

import torch.distributed as dist


class Meeting(ABC):
    """A place where each worker can write, and all can read. Its methods may be called in any thread."""

    @abstractmethod
    def set(self, name: str, text: str) -> None:
        """Write a text under a name."""

    @abstractmethod
    def get(self, name: str) -> str:
        """Return the text under a name, waiting for it.

        Raises:
            RuntimeError: it does not come in time.
        """


@final
class FileMeeting(Meeting):
    """A file that all workers reach, empty at first.

    Args:
        path: of the file.
        num_workers: how many meet.
        deadline_s: seconds that a text may take.
    """

    def __init__(self, path: str, num_workers: int, deadline_s: float) -> None:
        self._store = dist.FileStore(path, num_workers)  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=deadline_s))

    def set(self, name: str, text: str) -> None:
        """Write a text under a name."""
        self._store.set(name, text)

    def get(self, name: str) -> str:
        """Return the text under a name, waiting for it.

        Raises:
            RuntimeError: it does not come in time.
        """
        return bytes(self._store.get(name)).decode()
