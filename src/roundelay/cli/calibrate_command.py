"""``roundelay calibrate``: measure this machine, and keep its profile."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from roundelay.calibration.calibrate import follow, measured, sweep_with
from roundelay.cli.screen import announce, show_json, stderr
from roundelay.cli.text_file import write_text
from roundelay.env import launched
from roundelay.launching.process_group import ProcessGroup
from roundelay.planner.plan_options import Choices
from roundelay.planning.machine_profiles import keep_profile


def calibrate_command(
    choices: Choices, seconds: float, output: Path | None, process_group: ProcessGroup | None, *, as_json: bool
) -> int:
    """Measure, and write the profile; returns the exit code.

    Args:
        choices: workers, transport and threads.
        seconds: to measure.
        output: where to write it; None: to the cache, or to stdout where nothing is kept.
        process_group: the launcher's processes, if one has started this process.
        as_json: print it as JSON.
    """
    default = 2 if process_group is None else process_group.size
    sweep = sweep_with(choices.workers or default, choices.transport or "memory", choices.threads, seconds)
    if process_group is not None and not process_group.leads:
        return follow(sweep, process_group)
    place = launched()
    hosts = 1 if place is None else place.nodes
    profile = measured(sweep, lambda line: announce(f"Measured: {line}.", as_json), process_group, hosts)
    path = keep_profile(profile) if output is None else output
    if output is not None:
        write_text(output, profile.text())
    if as_json:
        show_json({"profile": msgspec.to_builtins(profile), "path": None if path is None else str(path)})
    elif path is None:
        sys.stdout.write(profile.text())
    else:
        stderr.print(f"Wrote {path}.", markup=False, soft_wrap=True)
    return 0
