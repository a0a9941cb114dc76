"""How many slots must a link have? Three stages that sleep, on lines of 100 Mbit/s and 40 ms.

Each stage sleeps 20 ms for a micro-batch, so that 50 updates a second are the most. Compared are the slots and forwards
in flight that the planner's rule gives, and capacities 1 (the paper's), 2 and 8, over our grpc in alternating rounds.

    .venv/bin/python -m benchmarks.peers.capacity [--repeats 5] [--short] [--anyway] [--out FILE]
"""

from __future__ import annotations

import statistics
import sys
from functools import partial

import roundelay
from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.peers import sleeping
from benchmarks.peers.forked import over_grpc
from tests.wan.bed import Bed, Unusable

MESSAGE_BYTES, WARM, WANTED = 4096, 24, 0.9
CAPACITIES = (1, 2, 8)


def main() -> None:
    """Run, and print a table."""
    what = asked(__doc__ or "")
    job = sleeping.job_of(MESSAGE_BYTES)
    captured = roundelay.capture(job)
    planned = sleeping.plan_of(job, captured, "grpc")
    plans = {"by the rule": planned} | {str(n): sleeping.with_capacity(planned, n) for n in CAPACITIES}
    updates = 100 if what.short else 150
    with Bed(peers=sleeping.STAGES, mbit_per_s=sleeping.MBIT_PER_S, rtt_ms=sleeping.RTT_MS) as bed:
        runs = {
            name: partial(sleeping.updates_per_s, job, captured, plan, over_grpc(bed), WARM, updates)
            for name, plan in plans.items()
        }
        found = alternate(runs, what.repeats)
    rows = []
    for name, plan in plans.items():
        slots = ", ".join(f"{e.slots} ({e.source} to {e.target})" for e in plan.edges)
        flight = ", ".join(str(stage.in_flight) for stage in plan.stages)
        share = statistics.median(found[name]) / sleeping.COMPUTE_LIMIT
        rows.append([name, slots, flight, spread(found[name]), f"{share:.2f}"])
    head = ["capacity", "slots", "in flight", "updates per second", f"of the limit, {sleeping.COMPUTE_LIMIT:.0f}"]
    reached = statistics.median(found["by the rule"]) / sleeping.COMPUTE_LIMIT
    verdict = f"The rule reaches {reached:.2f} of the limit; {WANTED} are wanted."
    report(what, f"{table(head, rows)}\n\n{verdict}", {"updates per s": found})


if __name__ == "__main__":
    try:
        main()
    except Unusable as error:
        sys.exit(str(error))
