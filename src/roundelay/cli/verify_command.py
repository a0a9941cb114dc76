"""``roundelay verify``: compare a run bit by bit with plain PyTorch, and with a one-process reference."""

from __future__ import annotations

import signal
from pathlib import Path

from roundelay.cli.changed_by_job import PathResolver
from roundelay.cli.plan_from_options import PlanSource, check_source, plan_job
from roundelay.cli.screen import announce, show_json
from roundelay.cli.signals import SIGNALS
from roundelay.cli.sim_output import show_verification, verification_json
from roundelay.cli.verify_options import VerifyOptions
from roundelay.errors import NondeterministicError
from roundelay.launching.process_group import ProcessGroup
from roundelay.planner.plan_options import Choices
from roundelay.planning.job_file import load_job
from roundelay.proof.reference_start import ReferenceStart
from roundelay.proof.run_vs_reference import (
    UNPROVED,
    check_fidelity,
    follow_verification,
    length_or_default,
    verify_session,
)


def verify_command(
    job_file: Path, choices: Choices, options: VerifyOptions, process_group: ProcessGroup | None, *, as_json: bool
) -> int:
    """Verify a run; returns the exit code, the same in all processes of a launcher.

    Args:
        job_file: defines the job.
        choices: for the plan.
        options: of the comparison.
        process_group: the launcher's processes, if one has started this process.
        as_json: print one JSON object.
    """
    paths, seed = PathResolver(), options.seed
    if process_group is None:
        check_source(choices, PlanSource(options.plan_file, options.resume))
    job = load_job(job_file, seed)
    source = PlanSource(paths.of(options.plan_file), paths.of(options.resume))
    resume = source.resume
    quiet = as_json or process_group is not None
    planned = plan_job(job, choices, seed, source, quiet=quiet, process_group=process_group)
    length = length_or_default(options.steps, options.epochs)
    if process_group is not None and not process_group.leads:
        return follow_verification(planned.session(seed, length, resume), options.tamper, process_group)
    captured, plan = planned.captured, planned.plan
    first = ReferenceStart.of(captured)
    announce("Training in plain PyTorch, and as captured ...", as_json)
    fidelity = check_fidelity(job, captured, plan, seed, length, resumed=resume is not None)
    announce("Training distributed, then in one process ...", as_json)
    session = planned.session(seed, length, resume)
    try:
        result = verify_session(session, options.tamper, first=first, fidelity=fidelity, process_group=process_group)
        if as_json:
            show_json(verification_json(plan, result) | {"notices": list(planned.notices)})
        else:
            show_verification(plan, result)
    except BaseException as error:
        if process_group is not None:
            process_group.conclude(None)
        if isinstance(error, NondeterministicError):  # only where the plan asks for none, or the run has no second try
            error.exit_code = UNPROVED
        raise
    if process_group is not None:
        SIGNALS.leave_to(signal.SIG_IGN)  # a launcher ends this process as soon as another has ended with the code
        process_group.conclude(result.exit_code)
    return result.exit_code
