"""Schedules with one stage per worker and whole backwards: GPipe, 1F1B with and without flushes, and no order at all.

::

    1f1b, D = 3, 4 micro-batches                 async-1f1b, D = 3, M = 1
    stage 0 |F0 F1 F2 B0 F3 B1 B2 B3 U0          stage 0 |F0 F1 F2 B0 U0 F3 B1 U1 F4 B2 U2 ...
    stage 1 |F0 F1 B0 F2 B1 F3 B2 B3 U0          stage 1 |F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 ...
    stage 2 |F0 B0 F1 B1 F2 B2 F3 B3 U0          stage 2 |F0 B0 U0 F1 B1 U1 F2 B2 U2 ...

(The order of each worker, not yet in time.)
"""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.ir.action import Action
from roundelay.schedules.schedule import Body, Schedule, register_schedule


def _gpipe(stages: Sequence[int], num_stages: int, micro_batches: int) -> Body:
    """All forwards of a batch, then all backwards (Huang et al., "GPipe", 2019)."""
    return Body(1, (Action(stages[0], "F", micro_batches), Action(stages[0], "B", 0)))


def _one_f_one_b(stages: Sequence[int], num_stages: int, micro_batches: int) -> Body:
    """D - 1 - k forwards ahead, then one forward and one backward in turns (Narayanan et al., "PipeDream", 2019)."""
    return Body(1, (Action(stages[0], "F", num_stages - 1 - stages[0]), Action(stages[0], "B", 0)))


def _free(stages: Sequence[int], num_stages: int, micro_batches: int) -> Body:
    """What can run does (Menon et al., "Ravnest", 2024, Algorithm 1)."""
    return Body(1, (Action(stages[0], "F", 0), Action(stages[0], "B", 0)))


register_schedule(Schedule("gpipe", "batch", _gpipe))
register_schedule(Schedule("1f1b", "batch", _one_f_one_b))
register_schedule(Schedule("async-1f1b", "run", _one_f_one_b))
register_schedule(Schedule("free", "run", _free, free=True))
