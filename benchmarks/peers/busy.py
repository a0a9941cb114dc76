"""How busy each stage is by one rule or another (Ravnest, Fig. 1): three stages that sleep, simulated and run.

A forward takes 8 ms and a backward 12 for each micro-batch, whatever the processor does; there is no network.
"""

from __future__ import annotations

from dataclasses import dataclass

import roundelay
from benchmarks.peers import sleeping
from roundelay.ir.micro_batch import stream
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.observe.time_shares import shares_of
from roundelay.session.run_summary import gaps_between, spans_of
from roundelay.session.training import Length, Session
from roundelay.simulator import simulate

RULES = (("1f1b", 1), ("1f1b", 4), ("pipedream", 1), ("ravnest", 1))
"""Rule, and micro-batches of a batch: the paper's Figs. 1a and 1b, and what never empties its stages."""

MESSAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Busy:
    """Share of a run's time in which each stage computes.

    Args:
        rule: of the run.
        micro_batches: of a batch.
        simulated: by stage, 0 to 1.
        measured: by stage, 0 to 1.
    """

    rule: str
    micro_batches: int
    simulated: list[float]
    measured: list[float]


def busy_of(rule: str, micro_batches: int, transport: str, total: int) -> Busy:
    """Simulate and run so many micro-batches in all."""
    job = sleeping.job_of(MESSAGE_BYTES)
    captured = roundelay.capture(job)
    plan = sleeping.timed(
        roundelay.plan(
            job,
            captured=captured,
            workers=sleeping.STAGES,
            rule=rule,
            micro_batches=micro_batches,
            transport=transport,
            cuts="equal",
            threads=1,
        )
    )
    updates = total // micro_batches
    handlers = {stage: sleeping.asleep() for stage in range(plan.num_stages)}
    session = Session(job, captured, plan, 0, Length(steps=updates))
    spans = spans_of(session.run(notify=lambda event: None, handlers=handlers, gathers="nothing"))
    simulated = simulate(plan, emit(read(plan)), stream([micro_batches] * updates)).spans()
    shares = [
        [share.busy for share in shares_of(own, gaps_between(own, plan), plan.num_workers)]
        for own in (simulated, spans)
    ]
    return Busy(rule, micro_batches, *shares)
