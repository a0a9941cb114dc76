"""A load: the reading of one batch, beside what the workers compute."""

from __future__ import annotations

from typing import NamedTuple


class Load(NamedTuple):
    """One batch as a reader has loaded it into a register.

    Args:
        worker: the worker that the reader reads for.
        batch: t, the number of the batch.
        start_s: when the reader began, in seconds of the clock that the worker's instructions are told in.
        end_s: when the register was full.
    """

    worker: int
    batch: int
    start_s: float
    end_s: float
