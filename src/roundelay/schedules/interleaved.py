"""Interleaved 1F1B: two stages per worker, stage s on worker s mod D (Narayanan et al., "Megatron-LM", 2021).

Forwards go through the stages of a worker in groups of D micro-batches, backwards in reverse. A worker is
D + 2 (D - 1 - k) forwards ahead of its backwards, and the bubble is half that of ``1f1b``::

    2 workers, 4 micro-batches, a worker's second stage in small letters
    worker 0 |F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 b2 b3 u0 B2 B3 U0
    worker 1 |F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 u0 B2 B3 U0

(The order of each worker, not yet in time.)
"""

from __future__ import annotations

from collections.abc import Sequence

from roundelay.ir.action import Action
from roundelay.ir.rule import MODES, UpdateRule, register_rule
from roundelay.schedules.schedule import Body, Schedule, register_schedule

NAME = "interleaved-1f1b"


def _interleaved(stages: Sequence[int], num_stages: int, micro_batches: int) -> Body:
    num_workers = num_stages // len(stages)
    turn = len(stages) * num_workers
    ahead = (len(stages) - 1) * num_workers + 2 * (num_workers - 1 - stages[0])
    actions: list[Action] = []
    for i in range(turn):
        later, place = divmod(i + ahead, turn)
        actions.append(Action(stages[place // num_workers], "F", later * num_workers + place % num_workers))
        actions.append(Action(stages[-1 - i // num_workers], "B", i % num_workers))
    return Body(num_workers, tuple(actions))


def _round(num_stages: int) -> tuple[int, ...]:
    return tuple(stage % (num_stages // 2) for stage in range(num_stages))


register_schedule(Schedule(NAME, "batch", _interleaved, stages_per_worker=2, place=_round))
register_rule(
    UpdateRule(
        name=NAME,
        schedule=NAME,
        predicts=False,
        stashes=False,
        modes=MODES,
        source="Megatron-LM (2021), interleaved 1F1B",
    )
)
