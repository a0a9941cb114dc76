"""``roundelay verify``: compare a run bit by bit with plain PyTorch, and with a one-process reference."""

from __future__ import annotations

from pathlib import Path

from roundelay.cli.changed_by_job import PathResolver
from roundelay.cli.plan_from_options import PlanSource, check_source, plan_job
from roundelay.cli.screen import announce, show_json
from roundelay.cli.sim_output import show_verification, verification_json
from roundelay.cli.verify_options import VerifyOptions
from roundelay.errors import NondeterministicError
from roundelay.planner.plan_options import Choices
from roundelay.planning.job_file import load_job
from roundelay.proof.reference_start import ReferenceStart
from roundelay.proof.run_vs_reference import UNPROVED, check_fidelity, length_or_default, verify_session
from roundelay.session.resume import load_checkpoint
from roundelay.session.training import Session


def verify_command(job_file: Path, choices: Choices, options: VerifyOptions, *, as_json: bool) -> int:
    """Verify a run; returns the exit code.

    Args:
        job_file: defines the job.
        choices: for the plan.
        options: of the comparison.
        as_json: print one JSON object.
    """
    paths, seed = PathResolver(), options.seed
    check_source(choices, PlanSource(options.plan_file, options.resume))
    job = load_job(job_file, seed)
    source = PlanSource(paths.of(options.plan_file), paths.of(options.resume))
    resume = source.resume
    planned = plan_job(job, choices, seed, source, quiet=as_json)
    captured, plan = planned.captured, planned.plan
    first, length = ReferenceStart.of(captured), length_or_default(options.steps, options.epochs)
    announce("Training in plain PyTorch, and as captured ...", as_json)
    fidelity = check_fidelity(job, captured, plan, seed, length, resumed=resume is not None)
    announce("Training distributed, then in one process ...", as_json)
    start = None if resume is None else load_checkpoint(resume, captured)
    session = Session(job, captured, plan, seed, length, start)
    try:
        result = verify_session(session, options.tamper, first=first, fidelity=fidelity)
    except NondeterministicError as error:  # only where the plan asks for none
        error.exit_code = UNPROVED
        raise
    if as_json:
        show_json(verification_json(plan, result) | {"notices": list(planned.notices)})
    else:
        show_verification(plan, result)
    return result.exit_code
