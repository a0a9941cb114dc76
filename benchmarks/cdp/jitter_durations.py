"""Durations that vary, and the time of a step: what the simulated benchmark of jitter and the real one share.

A time step is what a stage's forward, or its backward, takes without variation; a batch of N equal stages has 2N.
Factors come from a normal distribution of mean 1, truncated three standard deviations off, and depend on nothing but
a seed: every rule meets the same ones.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from roundelay.actor.machine import Run

Kind = Literal["none", "action", "batch"]
KINDS: dict[Kind, str] = {"none": "none", "action": "per action", "batch": "per worker and batch"}

RULES = {"synchronous": "1f1b", "CDP-v1": "cdp-v1", "CDP-v2": "cdp-v2"}
"""In the layout `dp`. `1f1b` all-reduces a stage's gradients while earlier stages' backwards go on."""

CUT = 3.0
"""Standard deviations from the mean at which the distribution is truncated."""

Factors = Sequence[Sequence[Sequence[float]]]
"""Of durations: by batch, worker and action, which are the forwards of the stages and then their backwards."""


@dataclass(frozen=True, slots=True)
class Variation:
    """What has a factor of its own, and the factors' standard deviation."""

    kind: Kind = "none"
    sigma: float = 0.0

    def __str__(self) -> str:
        return KINDS[self.kind] + (f", {self.sigma:.0%}" if self.sigma else "")


def factors(variation: Variation, size: int, batches: int, seed: int) -> Factors:
    """Draw them for N workers and N stages; those of more batches begin with those of fewer."""
    draw = random.Random(seed)
    own = 2 * size if variation.kind == "action" else 1
    return [
        [[1.0 + variation.sigma * _deviate(draw) for _ in range(own)] * (2 * size // own) for _ in range(size)]
        for _ in range(batches)
    ]


def _deviate(draw: random.Random) -> float:
    """From the standard normal distribution, truncated."""
    normal = statistics.NormalDist()
    below = normal.cdf(-CUT)
    return normal.inv_cdf(below + (1.0 - 2.0 * below) * draw.random())


def factor_of(found: Factors, worker: int, run: Run) -> float:
    """The factor of a forward or a backward, where a batch has one micro-batch on each worker."""
    of_worker = found[run.g][worker]
    return of_worker[run.stage + (len(of_worker) // 2) * (run.instruction.opcode == "backward")]


def counted(batches: int) -> range:
    """The batches that count: neither the first quarter nor the last two, as workers start and end at different times.

    Args:
        batches: of the run; at least 8.
    """
    return range(batches // 4, batches - 2)


class Executed(Protocol):
    """An instruction of a simulation or of a trace, and when it ended, in seconds."""

    @property
    def stage(self) -> int: ...
    @property
    def opcode(self) -> str: ...
    @property
    def g(self) -> int: ...
    @property
    def end_s(self) -> float: ...


def step_s(executed: Iterable[Iterable[Executed]], batches: int) -> float:
    """Seconds from a worker's last backward of one batch to that of the next: the mean of batches and workers.

    Args:
        executed: of each worker, in the whole run.
        batches: of the run.
    """
    counts = counted(batches)
    steps = []
    for of_worker in executed:
        ends = {one.g: one.end_s for one in of_worker if one.opcode == "backward" and one.stage == 0}
        steps.append((ends[counts[-1]] - ends[counts[0] - 1]) / len(counts))
    return statistics.fmean(steps)


def own_means(found: Factors) -> list[float]:
    """Of each worker: the mean of its factors over the batches that count. The largest is the floor of a step."""
    chosen = [found[batch] for batch in counted(len(found))]
    return [statistics.fmean(statistics.fmean(batch[worker]) for batch in chosen) for worker in range(len(found[0]))]
