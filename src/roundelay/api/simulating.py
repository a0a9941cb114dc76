"""Run a plan on a virtual clock."""

from __future__ import annotations

from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.verify_schedule import programs_of
from roundelay.planner.prove import prove
from roundelay.simulator import Simulation
from roundelay.simulator import simulate as run_simulation


def simulate(plan: Plan, *, batches: int = 8) -> Simulation:
    """Simulate ``batches`` full batches.

    Raises:
        PlanError: the plan cannot be executed.
    """
    prove(plan)
    return run_simulation(plan, programs_of(plan), stream([plan.micro_batches] * batches))
