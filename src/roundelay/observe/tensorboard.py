"""Curves for TensorBoard, an optional package: scalars over updates, in a folder that it reads while the run lasts.

Its writer has a thread of its own. So it exists only from the first value on, when all workers have been forked, and
:meth:`Curves.go_on` ends it before they are forked anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, final

from roundelay.checkpoint.atomic_files import unwritten
from roundelay.errors import RunError
from roundelay.observe.optional import optional

FLUSH_S = 5
"""Seconds after which values are on the disk at the latest; a run that is killed loses no more."""

WRITER = "torch.utils.tensorboard"


CurveWriter = Callable[..., Any]
"""TensorBoard's writer: folder, the step from which on older values are dropped, and seconds between flushes."""


def writer() -> CurveWriter:
    """TensorBoard's writer; loading it takes half a second and starts no thread.

    Raises:
        UsageError: TensorBoard is not installed, or cannot be loaded.
    """
    found: CurveWriter = optional(WRITER, "--tensorboard", "tensorboard", ", or leave the option out.").SummaryWriter
    return found


@final
class Curves:
    """Writes scalars into a folder.

    Args:
        folder: where; made with the first value.
        make: what :func:`writer` has returned.
        start: number of the first update that is to come: what the folder has of it and of later ones counts no more.
    """

    def __init__(self, folder: Path, make: CurveWriter, start: int) -> None:
        self._folder, self._make, self._start = folder, make, start
        self._writer: Any = None

    def write(self, update: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve.

        Args:
            update: number of the update.
            values: name of the curve to value.

        Raises:
            RunError: it cannot be written.
        """
        try:
            if self._writer is None:
                self._writer = self._make(str(self._folder), purge_step=self._start, flush_secs=FLUSH_S)
            for name, value in values.items():
                self._writer.add_scalar(name, value, update)
        except OSError as error:
            raise unwritten(self._folder, error) from error

    def go_on(self, start: int) -> None:
        """Drop update number ``start`` and later ones, which will be made again; no thread is left.

        Raises:
            RunError: what was written before cannot be.
        """
        self.close()
        self._start = start

    def close(self) -> None:
        """Write what waits, and end the thread; closing it again does nothing.

        Raises:
            RunError: it cannot be written.
        """
        ending, self._writer = self._writer, None
        try:
            if ending is not None:
                ending.close()
        except OSError as error:
            raise unwritten(self._folder, error) from error

    def __enter__(self) -> Curves:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(*([] if error is None else [RunError])):  # what has ended the run is told, not what follows it
            self.close()
