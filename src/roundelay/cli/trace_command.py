"""``roundelay verify --trace``: replay what a run whose order was free has written down, and compare."""

from __future__ import annotations

from pathlib import Path

from rich.progress import Progress

from roundelay.cli.plan_from_options import PlanSource, plan_job
from roundelay.cli.screen import announce, show_json, stderr, stdout
from roundelay.cli.sim_output import replay_line
from roundelay.cli.verify_options import VerifyOptions
from roundelay.errors import UsageError
from roundelay.observe.arithmetic import arithmetic
from roundelay.planner.plan_options import Choices
from roundelay.planning.job_file import load_job
from roundelay.planning.planning import read_plan
from roundelay.planning.torch_scope import on_threads, user_code
from roundelay.proof.reference_start import ReferenceStart, reference_start_of
from roundelay.proof.replayed import replayed_trace, told
from roundelay.proof.run_vs_reference import DIFFERENT
from roundelay.runtime.processes.determinism import deterministic
from roundelay.session.stop_condition import Length
from roundelay.session.trace_files import digest_of, folder_with, read_traces


def verify_trace(job_file: Path, choices: Choices, options: VerifyOptions, run: Path, *, as_json: bool) -> int:
    """Replay a run; returns the exit code.

    Args:
        job_file: defines the job.
        choices: none, as the run has its plan.
        options: of the comparison.
        run: its folder.
        as_json: print one JSON object.

    Raises:
        UsageError: an option contradicts the run, or it cannot be replayed here.
    """
    _refuse_others(choices, options)
    plan = read_plan(run / "plan.toml")
    folder = folder_with(run, options.resume)
    traces = read_traces(folder, plan.num_stages)
    head = traces[0].head
    _check_same("the plan of the run", head.plan, digest_of(plan), "plan.toml as the run has written it")
    _check_same("the arithmetic of this machine", head.arithmetic, arithmetic(), _SAME)
    seed = head.seed
    job = load_job(job_file, seed)
    planned = plan_job(job, choices, seed, PlanSource(run / "plan.toml"), quiet=True)
    session = planned.session(seed, Length(steps=max(1, traces[0].letters.count("F"))), options.resume)
    origin = reference_start_of(session, ReferenceStart.of(planned.captured))
    with Progress(console=stderr, transient=True, disable=as_json) as bar:
        letters = bar.add_task("Replaying in one process", total=sum(len(trace.letters) for trace in traces))
        with (
            deterministic(plan.deterministic, threads=plan.threads),
            on_threads(plan.leader_threads),
            user_code("the replay"),
        ):
            found = replayed_trace(session, origin, traces, options.window, lambda: bar.advance(letters))
    difference = told(found)
    if not found.digests and not difference:
        raise UsageError(
            f"the window of {options.window} letters" if options.window else f"the trace {folder}",
            got=f"{found.letters} letters, and no digest among them",
            expected="at least one digest of a stage's state: there is one every 256 letters, and at the end",
            remedy="Give a larger --window, or none." if options.window else "The run was broken off too early.",
        )
    ended = all(trace.ended for trace in traces) or options.window is not None
    if as_json:
        fields = {"letters": found.letters, "digests": found.digests, "digests_that_differ": len(found.differing)}
        show_json({"equal": not difference, "difference": difference, "ended": ended, "rule": plan.rule, **fields})
    else:
        stdout.print(
            replay_line(found.letters, found.digests, len(found.differing), equal=not difference), markup=False
        )
        if difference:
            stdout.print(difference, markup=False)
    if not ended:
        announce("The run was broken off: what it did after its last letters is not known.", as_json)
    return DIFFERENT if difference else 0


_SAME = "the one that the run was computed with: on another the last bits differ"


def _refuse_others(choices: Choices, options: VerifyOptions) -> None:
    given: dict[str, object] = {"--steps": options.steps, "--epochs": options.epochs, "--plan": options.plan_file}
    given |= {"--tamper": options.tamper, "--seed": options.seed or None}
    names = [name for name, value in given.items() if value is not None]
    names += [f"--{name.replace('_', '-')}" for name in sorted(choices.names())]
    if names:
        raise UsageError(
            f"{names[0]} with --trace",
            got="both",
            expected="--trace, --from and --window only: the run says everything else",
            remedy=f"Leave {', '.join(names)} out.",
        )


def _check_same(subject: str, written: str, here: str, expected: str) -> None:
    if written != here:
        remedy = "Replay it on a machine like those that ran it." if expected is _SAME else "Give the run unchanged."
        raise UsageError(subject, got=here, expected=f"{written}, {expected}", remedy=remedy)
