"""Schedules whose backwards run in two halves (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).

The first half, ``B``, computes the gradients that the stage before waits for; the second, ``W``, those of the weights,
later, so that it fills what would be bubble.

In ``zb-h1`` (Sect. 2.1) stage k's second halves come k micro-batches after the first: forwards and second halves are
then D - 1 micro-batches apart on every stage, and none holds more micro-batches than stage 0 does under ``1f1b``.

In ``zb-v`` worker k of D runs the stages k and 2D - 1 - k of 2D, a V, so that forwards turn at the last worker and come
back. Either stage's forwards and first halves come in the order of ``1f1b`` on 2D stages, and second halves are saved
up for the batch's end, the more the nearer a worker is to the turn.

::

    zb-h1, D = 3, 4 micro-batches
    stage 0 |F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3 U0
    stage 1 |F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3 U0
    stage 2 |F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3 U0

    zb-v, 2 workers, 3 micro-batches, a worker's second stage in small letters
    worker 0 |F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 u0 B1 W1 B2 W2 U0
    worker 1 |F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 u0 W2 U0

(The order of each worker, not yet in time.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from roundelay.ir.action import Action
from roundelay.schedules.schedule import Body, Schedule, register_schedule


def _zb_h1(stages: Sequence[int], num_stages: int, micro_batches: int) -> Body:
    stage = stages[0]
    return Body(1, (Action(stage, "F", num_stages - 1 - stage), Action(stage, "B", 0), Action(stage, "W", -stage)))


def _zb_v(stages: Sequence[int], num_stages: int, micro_batches: int) -> Body:
    """A whole batch, written out: the stages down and up the V take turns so that no worker waits if F, B, W are equal.

    A batch of fewer than 2D - 1 micro-batches cannot fill the pipeline: it has a longer one's order, cut off.
    """
    (down, up), num_workers = stages, num_stages // 2
    before_turn = num_workers - down
    size = max(micro_batches, 2 * num_workers - 1)
    order = [
        *[(down, "F")] * (2 * before_turn - 1),  # until the first forward comes back up
        *[(up, "F"), (down, "F")] * down,  # until the first gradient comes down
        *[(up, "FBW")] * before_turn,  # until it comes back
        *[(down, "FBW"), (up, "FBW")] * (size - num_workers),
        *[(down, "B"), (up, "B")] * down,  # no forward is left: gradients first, as others wait for them
        *[(down, "BW")] * before_turn,
        *[(up, "W")] * down,
        *[(down, "W")] * down,
    ]
    done: Counter[tuple[int, str]] = Counter()
    actions = []
    for stage, kinds in order:
        for kind in kinds:
            if done[stage, kind] < micro_batches:
                actions.append(Action(stage, kind, done[stage, kind]))  # type: ignore[arg-type]
            done[stage, kind] += 1
    return Body(micro_batches, tuple(actions))


def _v(num_stages: int) -> tuple[int, ...]:
    return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))


register_schedule(Schedule("zb-h1", "batch", _zb_h1, halved=True))
register_schedule(Schedule("zb-v", "batch", _zb_v, halved=True, stages_per_worker=2, place=_v))
