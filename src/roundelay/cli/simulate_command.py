"""``roundelay simulate``: run a plan on a virtual clock."""

from __future__ import annotations

from pathlib import Path

from roundelay.cli.screen import show_json, stdout
from roundelay.cli.sim_output import show_simulation, simulation_json
from roundelay.lower.emit import emit
from roundelay.lower.validate_plan import check_plan
from roundelay.observe.trace import write_trace
from roundelay.planning.planning import read_plan, simulate
from roundelay.schedule_grid import legend, staircase
from roundelay.session.run_summary import ends_of, gaps_between


def simulate_command(
    plan_file: Path, batches: int, trace: Path | None, *, grid: bool, programs: bool, as_json: bool
) -> None:
    """Simulate a plan, and print what it takes.

    Args:
        plan_file: the plan.
        batches: full batches to simulate.
        trace: where to write a trace.
        grid: also print the schedule as a grid.
        programs: also print every worker's program.
        as_json: print one JSON object.
    """
    plan = read_plan(plan_file)
    simulation = simulate(plan, batches=batches)
    if trace is not None:
        spans = simulation.spans()
        names = {k: "up to " + ", ".join(ends_of(plan, stages)) for k, stages in enumerate(plan.worker_stages)}
        write_trace(trace, spans, gaps=gaps_between(spans, plan), loads=simulation.loads, names=names)
    drawn = staircase(plan, min(batches, 6)) if grid else None
    texts = [str(program) for program in emit(check_plan(plan))] if programs else None
    if as_json:
        show_json(simulation_json(plan, simulation) | {"grid": drawn, "programs": texts})
        return
    show_simulation(plan, simulation, batches)
    if drawn is not None:
        stdout.print(f"\n{drawn}\n\n{legend(plan)}", markup=False, soft_wrap=True)
    for text in texts or []:
        stdout.print("\n" + text, markup=False, soft_wrap=True)
