"""Output of ``ROUNDELAY_DEBUG`` on stderr, by level: plan (1), timings (2), programs (3), instructions (4)."""

from __future__ import annotations

import statistics

from roundelay import env
from roundelay.api.training import Trained
from roundelay.cli.screen import stderr
from roundelay.ir.plan import Plan
from roundelay.lower.verify_schedule import programs_of


def show_choices(plan: Plan) -> None:
    """Print the plan from level 1 on, its programs from level 3 on."""
    if env.level() >= 1:
        stderr.print(plan.text(["The plan (ROUNDELAY_DEBUG=1):"]), markup=False, soft_wrap=True)
    if env.level() >= 3:
        for program in programs_of(plan):
            stderr.print(str(program), markup=False, soft_wrap=True)


def show_run(trained: Trained) -> None:
    """Print measured and planned seconds by opcode from level 2 on, every instruction from level 4 on."""
    if env.level() >= 2:
        for worker, events in sorted(trained.events.items()):
            for k in sorted({event[8] for event in events}):
                stage, label = trained.plan.stages[k], "" if k == worker else f", stage {k}:"
                planned = {"forward": stage.forward_s, "backward": stage.backward_s}
                planned |= {"backward-weight": stage.weights_s, "update": stage.update_s}
                for opcode, seconds in planned.items():
                    measured = [event[6] - event[5] for event in events if (event[0], event[8]) == (opcode, k)]
                    if measured:
                        times = f"{statistics.median(measured) * 1e3:.3f} ms, planned {seconds * 1e3:.3f} ms"
                        stderr.print(f"worker {worker}{label} {opcode}: {times}")
        for worker, loads in sorted(trained.loads.items()):
            mean_s = statistics.fmean(end - start for _, start, end in loads) / trained.plan.micro_batches
            stderr.print(f"worker {worker} data: {mean_s * 1e3:.3f} ms, planned {trained.plan.read_s * 1e3:.3f} ms")
    if env.level() >= 4:
        for worker, events in sorted(trained.events.items()):
            for event in events:
                stderr.print(f"worker {worker} {event[9]}", markup=False, soft_wrap=True)
