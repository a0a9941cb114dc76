"""The commands."""

from __future__ import annotations

import gc
import signal
import sys
import time
import webbrowser
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from roundelay import env
from roundelay.api import simulate
from roundelay.api.fidelity_precheck import check_known
from roundelay.api.plan_file import read_plan
from roundelay.api.planning import explain
from roundelay.api.reference_start import ReferenceStart
from roundelay.api.training import Session, load_checkpoint
from roundelay.api.verifying import check_way, judged, length_of, verify_session
from roundelay.checkpoint.atomic_files import replacing_file
from roundelay.cli import options as o
from roundelay.cli.compare_command import compare_command
from roundelay.cli.doctor_command import doctor, show_version
from roundelay.cli.job_file import PathResolver, load_job, own_arguments
from roundelay.cli.output_streams import lost
from roundelay.cli.screen import announce, only_json, show_error, show_json, stderr, stdout
from roundelay.cli.signals import SIGNALS, Grace
from roundelay.cli.sim_output import show_simulation, show_verification, simulation_json, verification_json
from roundelay.cli.train_command import RUNS, follow_job, train_job
from roundelay.cli.utilization import ends_of, gaps_between
from roundelay.errors import InternalError, RoundelayError, ToldElsewhereError, UsageError
from roundelay.lower.verify_schedule import programs_of
from roundelay.observe.run_folder import check_vacant
from roundelay.observe.tensorboard import writer as curve_writer
from roundelay.observe.trace import Span, write_trace
from roundelay.page.run_page import run_page
from roundelay.runtime.tamper import WAYS
from roundelay.runtime.user_errors import out_of_threads
from roundelay.schedule_grid import LEGEND, staircase

_INTERRUPTED = 130  # as typer says Ctrl-C
"""Exit code of what Ctrl-C has ended: 128 and the signal's number."""

_BEHIND_S = 20.0
"""Seconds that another process of a launcher gets to tell what ends them all."""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def roundelay(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the versions of Roundelay and of torch, and exit.")
    ] = False,
) -> None:
    """Train ordinary PyTorch models through a pipeline, planned, explained, and proved bit for bit."""
    if version:
        show_version()
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command(epilog="Example: `roundelay train my_job.py --workers 2 --steps 100`")
@o.choosing
def train(
    job_file: o.JobFile,
    choices: o.Choices,
    steps: o.Steps = None,
    epochs: o.Epochs = None,
    seed: o.Seed = 0,
    plan_file: o.PlanFile = None,
    resume: o.Resume = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder. [default: runs/TIME]")] = None,
    baseline: Annotated[
        bool, typer.Option(help="Measure plain PyTorch for a few seconds first, to stand beside the run.")
    ] = True,
    restarts: Annotated[
        int, typer.Option(help="How often a run that fails goes on from its last checkpoint by itself.", min=0)
    ] = 0,
    checkpoint_every: Annotated[
        int,
        typer.Option(
            help="Also write a checkpoint after every S updates, without draining the stages. [default: epochs' ends]",
            min=0,
            metavar="S",
            show_default=False,
        ),
    ] = 0,
    grace_s: Annotated[
        float,
        typer.Option(
            help="Seconds for a checkpoint when SIGTERM asks for the end; a second signal ends at once. 0: none.", min=0
        ),
    ] = 20.0,
    usr1: Annotated[
        bool, typer.Option("--usr1", help="Take SIGUSR1 as SIGTERM: Slurm sends it ahead, by --signal=USR1@60.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Also draw the run for TensorBoard, below its folder.")
    ] = False,
    check: o.Check = None,
    as_json: o.Json = False,
) -> int:
    """Train a job and leave a run folder: plan, metrics, trace, checkpoint, summary."""
    with o.together(choices, restarts) as (party, choices):
        SIGNALS.join()
        o.exclusive(steps, epochs)
        check_known(check)
        places = PathResolver()
        curves = curve_writer() if tensorboard and (party is None or party.leads) else None
        job = load_job(job_file, seed)
        plan_file, resume, out = places.of(plan_file), places.of(resume), places.of(out)
        restarted = out if party is not None and party.restart else None
        if out is not None and party is None:
            check_vacant(out)  # before anything takes its time
        captured, plan, reasons = o.planned(
            job, choices, seed, plan_file, as_json or party is not None, party, resume, restarted
        )
        grace = Grace(grace_s, (signal.SIGTERM, signal.SIGUSR1) if usr1 else (signal.SIGTERM,))
        if party is not None and not party.leads:
            with SIGNALS.gracefully(grace, lambda: None, lambda: party.met):
                return follow_job(
                    job, captured, plan, party, seed=seed, steps=steps, epochs=epochs, resume=resume, out=out
                )
        summary = train_job(
            job,
            captured,
            plan,
            seed=seed,
            steps=steps,
            epochs=epochs,
            resume=resume,
            out=out,
            runs=places.of(RUNS),
            baseline=baseline,
            restarts=restarts,
            checkpoint_every=checkpoint_every,
            quiet=as_json,
            party=party,
            reasons=reasons,
            curves=curves,
            grace=grace,
            check=check,
        )
        if as_json:
            show_json(summary)
        return 0


@app.command("plan", epilog="Example: `roundelay plan my_job.py --workers 2 -o plan.toml`")
@o.choosing
def plan_command(
    job_file: o.JobFile,
    choices: o.Choices,
    seed: o.Seed = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write it. [default: stdout]")] = None,
    as_json: o.Json = False,
) -> None:
    """Write the plan of a job: readable, editable, versioned text."""
    o.alone("plan")
    places = PathResolver()
    job = load_job(job_file, seed)
    job_file, output = places.of(job_file), places.of(output)
    captured, plan, reasons = o.planned(job, choices, seed, None, as_json)
    text = plan.text(explain(captured, plan, reasons))
    if output is not None:
        write_text(output, text)
    if as_json:
        show_json(
            {"plan": text, "path": str(output) if output else None, "workers": plan.num_workers, "rule": plan.rule}
        )
    elif output is None:
        sys.stdout.write(text)
    else:
        stderr.print(f"Wrote {output}. Read it, edit it, run it: roundelay train {job_file} --plan {output}")


@app.command("simulate", epilog="Example: `roundelay simulate plan.toml --grid`")
def simulate_command(
    plan_file: Annotated[Path, typer.Argument(help="A plan as `roundelay plan` writes it.", metavar="PLAN")],
    batches: Annotated[int, typer.Option(help="Full batches to simulate.", min=1)] = 8,
    grid: Annotated[bool, typer.Option("--grid", help="Print the schedule as a staircase.")] = False,
    programs: Annotated[bool, typer.Option("--programs", help="Print every worker's program.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome/Perfetto trace here.")] = None,
    as_json: o.Json = False,
) -> None:
    """Run a plan's programs on a virtual clock: makespan, bubble, busy share, memory, versions."""
    plan = read_plan(plan_file)
    simulation = simulate(plan, batches=batches)
    if trace is not None:
        t = {(i.stage, i.g): i.version for i in simulation.intervals}
        spans = [
            Span(i.worker, i.opcode, i.g, t[i.stage, i.g], i.reads, i.distance, i.start_s, i.end_s, 0, i.stage)
            for i in simulation.intervals
        ]
        names = {k: "up to " + ", ".join(ends_of(plan, stages)) for k, stages in enumerate(plan.worker_stages)}
        write_trace(trace, spans, gaps=gaps_between(spans, plan), loads=simulation.loads, names=names)
    drawn = staircase(plan, min(batches, 6)) if grid else None
    texts = [str(program) for program in programs_of(plan)] if programs else None
    if as_json:
        show_json(simulation_json(plan, simulation) | {"grid": drawn, "programs": texts})
        return
    show_simulation(plan, simulation, batches)
    if drawn is not None:
        stdout.print(f"\n{drawn}\n\n{LEGEND}", markup=False, soft_wrap=True)
    for text in texts or []:
        stdout.print("\n" + text, markup=False, soft_wrap=True)


@app.command("verify", epilog="Example: `roundelay verify my_job.py --steps 8 --tamper stash`")
@o.choosing
def verify_command(
    job_file: o.JobFile,
    choices: o.Choices,
    steps: Annotated[int | None, typer.Option(help="Updates to compare. [default: 8]")] = None,
    epochs: o.Epochs = None,
    seed: o.Seed = 0,
    plan_file: o.PlanFile = None,
    resume: o.Resume = None,
    tamper: Annotated[str | None, typer.Option(help="Break the run on purpose: " + ", ".join(WAYS) + ".")] = None,
    as_json: o.Json = False,
) -> None:
    """Prove a run: the captured job beside plain PyTorch, then the run beside its one-process reference, bit by bit."""
    o.exclusive(steps, epochs)
    o.alone("verify")
    check_way(tamper)
    places = PathResolver()
    job = load_job(job_file, seed)
    plan_file, resume = places.of(plan_file), places.of(resume)
    captured, plan, _ = o.planned(job, choices, seed, plan_file, as_json, resume=resume)
    first, length = ReferenceStart.of(captured), length_of(steps, epochs)
    announce("Training in plain PyTorch, and as captured ...", as_json)
    fidelity = judged(job, captured, plan, seed, length, resumed=resume is not None)
    announce("Training distributed, then in one process ...", as_json)
    start = None if resume is None else load_checkpoint(resume, captured)
    session = Session(job, captured, plan, seed, length, start)
    result = verify_session(session, tamper, first=first, fidelity=fidelity)
    if as_json:
        show_json(verification_json(plan, result))
    else:
        show_verification(plan, result)
    raise typer.Exit(0 if result.equal else 1)


@app.command("report", epilog="Example: `roundelay report runs/latest -o report.html`")
def report_command(
    run: Annotated[Path, typer.Argument(help="A run's folder.", metavar="RUN")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write it. [default: report.html in the folder]")
    ] = None,
    opened: Annotated[bool, typer.Option("--open/--no-open", help="Show it in the web browser.")] = False,
    as_json: o.Json = False,
) -> None:
    """Draw a run as one HTML page: loss, throughput, timeline, memory."""
    text, path = run_page(run), output or run / "report.html"
    write_text(path, text)
    if as_json:
        show_json({"path": str(path), "bytes": len(text.encode())})
    else:
        stderr.print(f"Wrote {path}.", markup=False)
    if opened:
        webbrowser.open(path.resolve().as_uri())


app.command("compare", epilog="Example: `roundelay compare my_job.py --rules 1f1b,pipeoptim,async`")(compare_command)
app.command("doctor", epilog="Example: `roundelay doctor --json`")(doctor)


def write_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all.

    Raises:
        RunError: it cannot be written.
    """
    with replacing_file(path) as file:
        file.write(text)


def main() -> None:
    """Entry point: every error becomes one screen and an exit code."""
    torch.set_num_threads(1)
    SIGNALS.listen()
    code = guarded(app, "--json" in sys.argv)
    sys.stdout.flush()
    if why := lost():
        stderr.print(f"Not all of the result could be written to stdout: {why}. The command itself ended with {code}.")
        code = code or 1
    SIGNALS.leave_to(signal.SIG_DFL)  # all is told: what would be raised now, libraries would show as they unload
    gc.freeze()  # spares a last collection over all that torch has traced: seconds in which nothing is done any more
    sys.exit(code)


def guarded(command: Callable[..., Any], as_json: bool) -> int:
    """Run a command; returns its exit code."""
    with own_arguments(), only_json() if as_json else nullcontext():
        return _guarded(command, as_json)


def _guarded(command: Callable[..., Any], as_json: bool) -> int:
    traced = False
    try:
        with o.same_in_all():
            traced = env.level() >= 1
            env.check_malloc()
        result = command(standalone_mode=False)
        if result == _INTERRUPTED:  # typer turns Ctrl-C into this
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except RoundelayError as error:
        if SIGNALS.interrupted:
            return _interrupted()
        SIGNALS.leave_to(signal.SIG_IGN)  # a launcher may end this process while it tells why
        show_error(error, as_json, traced)
        SIGNALS.leave_to(signal.SIG_DFL)
        return error.exit_code
    except typer.Exit as ending:
        return ending.exit_code
    except ToldElsewhereError as ending:
        return _behind(ending.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except typer.TyperException as error:
        code = int(getattr(error, "exit_code", 2))
        if not env.first_on_host():
            return _behind(code)
        show_error(_misspelt(error), as_json, traced)
        return code
    except Exception as error:
        if SIGNALS.first is not None:
            return _interrupted()
        known = out_of_threads("starting a thread", error)
        if traced and known is None:
            raise
        told = _bug(error) if known is None else known
        show_error(told, as_json, traced)
        return 70 if known is None else told.exit_code


def _behind(code: int) -> int:
    """The exit code, when the process that tells may have told: the launcher ends all when one has ended."""
    if SIGNALS.first is None:  # else one has
        with suppress(KeyboardInterrupt):
            time.sleep(_BEHIND_S)
    return code


def _interrupted() -> int:
    SIGNALS.leave_to(signal.SIG_IGN)  # a launcher that Ctrl-C meets, too, sends SIGTERM then
    if env.leads():
        stderr.show_cursor()
        stderr.print("Interrupted. Every worker has been ended; a checkpoint, if there was one, is whole.")
    SIGNALS.leave_to(signal.SIG_DFL)  # an end that hangs can still be ended
    return 128 + SIGNALS.cause


def _misspelt(error: typer.TyperException) -> UsageError:
    """What the parser of the command line says, in the words of the house."""
    context = getattr(error, "ctx", None)
    known = {one.name or getattr(one.callback, "__name__", "") for one in app.registered_commands}
    said = next((word for word in sys.argv[1:] if word in known), None)  # the parser of options gives no context
    inside = said if context is None else context.info_name if context.parent is not None else None
    command = "roundelay" if inside is None else f"roundelay {inside}"  # by whatever name it was called
    return UsageError(
        f"the command line of `{command}`",
        got=error.format_message().rstrip("."),
        expected="arguments and options as the command takes them",
        remedy=f"See `{command} --help`.",
    )


def _bug(error: Exception) -> InternalError:
    return InternalError(
        "roundelay itself",
        got=f"{type(error).__name__}: {error}",
        expected="no error that it does not know",
        remedy="Run again with ROUNDELAY_DEBUG=1 and report the traceback as a bug.",
    )
