"""A bound on what the simulator can find: no plan of these choices takes fewer seconds for a batch. No torch is needed.

It counts computation only, divided as evenly as it can be: messages, exchanges, what is computed again and uneven cuts
only add to it.
"""

from __future__ import annotations

from functools import cache
from typing import final

from roundelay.ir.device_names import CPU
from roundelay.planner.holder_choices import parts_of, replicas_of
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_options import Choices
from roundelay.planner.source import Hardware
from roundelay.schedules import PIPELINE

SLACK = 1.0 - 1e-3
"""Seconds in a plan are rounded to microseconds."""


@final
class Bounds:
    """Bounds on choices for one model and machine.

    Args:
        facts: of the model.
        machine: where it would run.
    """

    def __init__(self, facts: ModelFacts, machine: Hardware) -> None:
        self._facts, self._machine = facts, machine
        self._work_s = cache(self._measured_work_s)

    def least_s(self, choices: Choices) -> float:
        """Seconds of a batch that no plan of these choices undercuts; 0 where none is known.

        That is of a layout, and of a number of micro-batches that the rule chooses. Stages need not wait for each other
        (they may be towers of which each has a stage), so the work of a batch is divided over all workers,
        by their speeds.
        """
        if choices.layout not in (None, PIPELINE) or choices.micro_batches is None:
            return 0.0
        replicas, parts, workers = replicas_of(choices), parts_of(choices), choices.workers or 1
        micro_batches = choices.micro_batches
        threads = choices.threads or self._machine.threads_each((CPU,) * (replicas * parts * workers))
        work_s = SLACK * self._work_s(self._facts.rows_of(micro_batches * replicas), threads) / parts
        count, cluster = replicas * parts * workers, self._machine.cluster
        speeds = [1.0] * count if cluster is None else [worker.speed for worker in cluster.workers]
        return work_s * micro_batches * replicas * parts / sum(sorted(speeds, reverse=True)[:count])

    def _measured_work_s(self, rows: int, threads: int) -> float:
        """Seconds of all forwards and backwards of a micro-batch."""
        profile = self._facts.profile_at(rows, threads)
        return sum(profile.forward_s) + sum(profile.backward_s)
