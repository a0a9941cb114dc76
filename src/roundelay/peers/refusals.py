"""The file of refusals of a run: one line of JSON each, with time, peer and reason, and never a secret."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import final

from roundelay.checkpoint.atomic_files import unwritten
from roundelay.membership import roster
from roundelay.trust import request

MAX_FILE_BYTES = 2**20
"""Most bytes of the file: a flood must not fill the disk."""

_END_BYTES = 512  # more than the last two lines

DOOR_REASONS = (
    "too many connections",
    "plaintext",
    "broken TLS",
    "TLS without a call",
    "too slow",
    "oversize",
    "unknown method",
    "unreadable",
    "another version of Roundelay",
    "another version of torch",
    "no certificate of this run",
    "unknown service",
)
"""Why the door refused something without asking the roster."""
(
    CROWDED,
    PLAINTEXT,
    BROKEN,
    SILENT,
    SLOW,
    OVERSIZE,
    UNKNOWN_METHOD,
    UNREADABLE,
    OTHER_ROUNDELAY,
    OTHER_TORCH,
    UNCERTIFIED,
    UNKNOWN_SERVICE,
) = DOOR_REASONS

REASONS = (*DOOR_REASONS, *roster.REASONS, *request.REASONS)
"""Every reason of a door, which stand in the file; `FULL` is that of its last line."""
FULL = "no more refusals fit into this file"


@final
class RefusalLog:
    """Counts refusals, and appends each to a file until this is full. Threads may share it.

    Args:
        path: the file; created if absent.
        reasons: which are allowed.
        clock: tells UTC in seconds since 1970.

    Raises:
        RunError: it cannot be opened.
    """

    counts: Counter[str]
    """How often something was refused, by reason, whether or not it stands in the file; ``unwritten``: lines that a
    full disk has lost."""

    def __init__(self, path: Path, reasons: tuple[str, ...] = REASONS, clock: Callable[[], float] = time.time) -> None:
        self.counts = Counter()
        self._reasons, self._clock, self._lock = frozenset(reasons), clock, threading.Lock()
        try:
            self._file = path.open("ab", buffering=0)
            self._room = MAX_FILE_BYTES - _END_BYTES - self._file.tell()
        except OSError as error:
            raise unwritten(path, error) from error

    def refuse(self, peer: str, reason: str) -> None:
        """Add a refusal of `peer`, an address, for one of the reasons. A full disk loses lines, and ends nothing."""
        assert reason in self._reasons, reason
        with self._lock:
            self.counts[reason] += 1
            if self._room > 0:
                self._write(peer, reason)
                if self._room <= 0:
                    self._write("", FULL)

    def close(self) -> None:
        """Close the file; closing it again does nothing, and what is refused afterwards is only counted."""
        with self._lock:
            self._room = 0
            self._file.close()

    def _write(self, peer: str, reason: str) -> None:
        line = json.dumps({"time": round(self._clock(), 3), "peer": peer, "reason": reason}).encode() + b"\n"
        try:
            self._room -= self._file.write(line)
        except OSError:
            self.counts["unwritten"] += 1


@final
class RefusalLines:
    """Tells refusals as they come, in one line each, up to a number of them.

    Args:
        tell: shows a line.
        most: lines.
    """

    def __init__(self, tell: Callable[[str], None], most: int = 50) -> None:
        self._tell, self._left, self._lock = tell, most, threading.Lock()

    def refuse(self, peer: str, reason: str) -> None:
        """Tell of a refusal of `peer`; may be called from any thread."""
        with self._lock:
            self._left -= 1
            if self._left >= 0:
                self._tell(f"Refused {peer}: {reason}.")
            if not self._left:
                self._tell("Further refusals are not told.")
