"""``roundelay plan``: write a job's plan."""

from __future__ import annotations

import sys
from pathlib import Path

from roundelay.cli.changed_by_job import PathResolver
from roundelay.cli.plan_from_options import PlanSource, check_source, plan_job
from roundelay.cli.screen import show_json, stderr
from roundelay.cli.text_file import write_text
from roundelay.planner.plan_options import Choices
from roundelay.planning.explain_plan import explain
from roundelay.planning.job_file import load_job
from roundelay.planning.physical_graph import physical_graph


def plan_command(
    job_file: Path, choices: Choices, seed: int, output: Path | None, *, graph: bool, as_json: bool
) -> None:
    """Plan a job, and write the plan.

    Args:
        job_file: defines the job.
        choices: for the plan.
        seed: of the data.
        output: where to write it; None: to stdout.
        graph: show what is computed and exchanged instead.
        as_json: print one JSON object.
    """
    paths = PathResolver()
    check_source(choices, PlanSource())
    job = load_job(job_file, seed)
    job_file, output = paths.of(job_file), paths.of(output)
    planned = plan_job(job, choices, seed, PlanSource(), quiet=as_json)
    plan = planned.plan
    text = plan.text(explain(planned.captured, plan, planned.reasons))
    if output is not None:
        write_text(output, text)
    shown = physical_graph(planned.captured, plan) if graph else None
    if as_json:
        path = str(output) if output else None
        found: dict[str, object] = {
            "plan": text,
            "path": path,
            "workers": plan.num_workers,
            "rule": plan.rule,
            "graph": None,
        }
        if shown is not None:
            found |= {"graph": shown.lines, "boxings": shown.boxings, "left_whole": shown.left_whole}
        show_json(found | {"notices": list(planned.notices)})
    elif shown is not None:
        sys.stdout.write("\n".join(shown.lines) + "\n")
    elif output is None:
        sys.stdout.write(text)
    else:
        stderr.print(f"Wrote {output}. Read it, edit it, run it: roundelay train {job_file} --plan {output}")
