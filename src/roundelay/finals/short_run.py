"""Run a plan for some seconds, and time its batches; the model stays as it was."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import pairwise

from roundelay.errors import RunError
from roundelay.frontend import Captured
from roundelay.ir.device_names import CPU
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.launching.forked_call import isolated
from roundelay.session.events import Event, Updated
from roundelay.session.stop_condition import Length
from roundelay.session.training import Session

WARM = 3
"""Batches that do not count."""

LEAST, MOST = 3, 200
"""Batches that count."""

LIMIT_S, SLOWER = 30.0, 3.0
"""A run is given up so many seconds beyond those asked for, and so many times those predicted for its batches."""


@dataclass(frozen=True, slots=True)
class ShortRun:
    """What is run.

    Args:
        job: on a GPU its data are read here; else it is not changed.
        captured: its model.
        seed: of the data.
        seconds: of each run, about.
    """

    job: Job
    captured: Captured
    seed: int
    seconds: float

    def batch_s(self, plan: Plan, predicted_s: float = 0.0) -> float:
        """Median seconds of a batch.

        Args:
            plan: what is run.
            predicted_s: seconds of a batch by prediction, so that long ones are waited for.

        Raises:
            RoundelayError: the run failed, or took too long.
        """
        if set(plan.devices) == {CPU}:
            limit_s = self.seconds + LIMIT_S + SLOWER * (WARM + LEAST) * predicted_s
            return float(isolated(lambda: self._here(plan), "a short run", limit_s=limit_s, quiet=True))
        return self._here(plan)  # a process that uses a GPU cannot fork another that does

    def _here(self, plan: Plan) -> float:
        session = Session(self.job, self.captured, plan, self.seed, Length(steps=WARM + MOST))

        def end_in_time(event: Event) -> None:
            if isinstance(event, Updated) and event.seconds >= self.seconds and event.update >= WARM + LEAST:
                session.control.end_soon()

        done = session.run(notify=end_in_time, gathers="nothing")
        last = max(stage for events in done.events.values() for stage in (event.stage for event in events))
        ends = sorted(e.end_s for own in done.events.values() for e in own if (e.opcode, e.stage) == ("update", last))
        each = len(plan.stages[last].workers)
        times = [b - a for a, b in pairwise(ends[each - 1 :: each][WARM:])]
        if not times:
            raise RunError(
                "a short run",
                got=f"{len(ends) // each} batches",
                expected=f"more than {WARM}",
                remedy="Give a job whose data last longer.",
            )
        return statistics.median(times)
