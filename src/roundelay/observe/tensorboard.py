"""Curves for TensorBoard, an optional package: scalars over updates, which it can read during the run.

Its writer has a thread of its own. So it is created with the first value, when all workers have been forked, and
:meth:`Curves.restart` closes it before they are forked again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from roundelay.checkpoint.atomic_files import unwritten
from roundelay.errors import RunError
from roundelay.optional_packages import optional

FLUSH_S = 5
"""Longest time until a value is written to disk, in seconds."""

WRITER = "torch.utils.tensorboard"


CurveWriter = Callable[..., Any]
"""The class of TensorBoard's writer, called with folder, ``purge_step`` and ``flush_secs``."""


def writer() -> CurveWriter:
    """Import TensorBoard's writer; this takes half a second and starts no thread.

    Raises:
        UsageError: TensorBoard is not installed, or cannot be loaded.
    """
    summary_writer: CurveWriter = optional(
        WRITER, "--tensorboard", "tensorboard", ", or leave the option out."
    ).SummaryWriter
    return summary_writer


@final
class Curves:
    """Writes scalars into a folder.

    Args:
        folder: where; created with the first value.
        make: the class that :func:`writer` returns.
        start: number of the run's first update; older points in the folder from it on are dropped.
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

    def restart(self, start: int) -> None:
        """Close the writer and its thread; later points replace those of update number ``start`` and later ones.

        Raises:
            RunError: the points so far cannot be written.
        """
        self.close()
        self._start = start

    def close(self) -> None:
        """Write buffered points, and end the thread; closing it again does nothing.

        Raises:
            RunError: it cannot be written.
        """
        closing, self._writer = self._writer, None
        try:
            if closing is not None:
                closing.close()
        except OSError as error:
            raise unwritten(self._folder, error) from error

    def __enter__(self) -> Curves:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with suppress(*([] if error is None else [RunError])):  # the first error is reported, not one that follows
            self.close()
