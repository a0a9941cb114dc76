"""A bound on what the simulator can find: no plan of these choices takes fewer seconds for a batch. No torch is needed.

It counts computation only, divided as evenly as it can be: messages, exchanges, what is computed again and uneven cuts
only add to it.
"""

from __future__ import annotations

from functools import cache
from typing import final

from roundelay.ir.device_names import CPU
from roundelay.ir.rule import rule_named
from roundelay.planner.draft_plan import default_rule
from roundelay.planner.holder_choices import parts_of, replicas_of
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_options import Choices
from roundelay.planner.source import Hardware
from roundelay.schedules import PIPELINE, schedule_named

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
        """Seconds of a batch that no plan of these choices undercuts; 0 of a layout, where no bound is known.

        Of a rule that flushes, stage k begins when the stages before it have computed a forward, and is left by the
        last backward as long before the end: the work before it, and M times its own, take no longer than a batch. Of
        all ways to divide the work W of a micro-batch over S stages, the best takes W / (1 - (1 - 1/M)^S).
        """
        if choices.layout not in (None, PIPELINE):
            return 0.0
        schedule = schedule_named(rule_named(choices.rule or default_rule(PIPELINE)).schedule)
        replicas, parts, workers = replicas_of(choices), parts_of(choices), choices.workers or 1
        micro_batches = choices.micro_batches or 1
        threads = choices.threads or self._machine.threads_each((CPU,) * (replicas * parts * workers))
        work_s = SLACK * self._work_s(self._facts.rows_of(micro_batches * replicas), threads) / parts
        if schedule.window == "batch" and schedule.stages_per_worker == 1 and not schedule.halved:
            return work_s / (1.0 - (1.0 - 1.0 / micro_batches) ** workers)
        return work_s * micro_batches / workers

    def _measured_work_s(self, rows: int, threads: int) -> float:
        """Seconds of all forwards and backwards of a micro-batch."""
        profile = self._facts.profile_at(rows, threads)
        return sum(profile.forward_s) + sum(profile.backward_s)
