"""The commands of ``roundelay``, and their exit codes."""

from __future__ import annotations

import gc
import os
import signal
import sys
import webbrowser
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from roundelay import env
from roundelay.api import simulate
from roundelay.api.explain_plan import explain
from roundelay.api.physical_graph import physical_graph
from roundelay.api.planning import read_plan
from roundelay.api.reference_start import ReferenceStart
from roundelay.api.resume import load_checkpoint
from roundelay.api.run_summary import ends_of, gaps_between
from roundelay.api.training import Session
from roundelay.api.verifying import UNPROVED, check_fidelity, length_or_default, verify_session
from roundelay.checkpoint.atomic_files import replacing_file
from roundelay.cli import options as o
from roundelay.cli.compare_command import compare_command
from roundelay.cli.doctor_command import doctor, show_version
from roundelay.cli.job_file import PathResolver, load_job, own_arguments
from roundelay.cli.output_streams import lost
from roundelay.cli.own_processes import own_processes, run_processes
from roundelay.cli.plan_from_options import PlanSource, plan_job
from roundelay.cli.screen import announce, only_json, show_error, show_json, stderr, stdout
from roundelay.cli.signals import SIGNALS
from roundelay.cli.sim_output import show_simulation, show_verification, simulation_json, verification_json
from roundelay.cli.table_command import table_command
from roundelay.cli.train_command import train_command
from roundelay.errors import InternalError, NondeterministicError, RoundelayError, UsageError
from roundelay.lower.verify_schedule import programs_of
from roundelay.observe.trace import write_trace
from roundelay.page.run_page import run_page
from roundelay.runtime.device_failure import has_failed
from roundelay.runtime.tamper import ALL_WAYS, check_tamper
from roundelay.runtime.user_errors import out_of_threads
from roundelay.schedule_grid import legend, staircase

_INTERRUPTED = 130
"""typer's exit code after Ctrl-C: 128 plus the number of the signal."""


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
@o.expand_options
def train(job_file: o.JobFile, choices: o.Choices, run: o.RunOptions, as_json: o.Json = False) -> int:
    """Train a job, and write a run folder: plan, metrics, trace, checkpoint, summary."""
    if (count := own_processes(choices, run.plan_file, run.resume)) > 0:
        return run_processes(count, sys.argv[1:])
    party, choices = o.joined(choices, run.restarts, planned=run.plan_file is not None or run.resume is not None)
    SIGNALS.join()
    return train_command(job_file, choices, run, party, as_json=as_json)


@app.command("plan", epilog="Example: `roundelay plan my_job.py --workers 2 -o plan.toml`")
@o.expand_options
def plan_command(
    job_file: o.JobFile,
    choices: o.Choices,
    seed: o.Seed = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write it. [default: stdout]")] = None,
    show: Annotated[
        str | None,
        typer.Option(help="graph: print what each stage's workers compute, and every exchange, instead of the plan."),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Write a job's plan: readable, editable, versioned text."""
    o.refuse_launcher("plan")
    if show not in (None, "graph"):
        raise UsageError("--show", got=repr(show), expected="graph", remedy="Choose it, or leave the option out.")
    paths = PathResolver()
    job = load_job(job_file, seed)
    job_file, output = paths.of(job_file), paths.of(output)
    planned = plan_job(job, choices, seed, PlanSource(), quiet=as_json)
    plan = planned.plan
    text = plan.text(explain(planned.captured, plan, planned.reasons))
    if output is not None:
        write_text(output, text)
    graph = physical_graph(planned.captured, plan) if show else None
    if as_json:
        path = str(output) if output else None
        show_json({"plan": text, "path": path, "workers": plan.num_workers, "rule": plan.rule, "graph": graph})
    elif graph is not None:
        sys.stdout.write("\n".join(graph) + "\n")
    elif output is None:
        sys.stdout.write(text)
    else:
        stderr.print(f"Wrote {output}. Read it, edit it, run it: roundelay train {job_file} --plan {output}")


@app.command("simulate", epilog="Example: `roundelay simulate plan.toml --grid`")
def simulate_command(
    plan_file: Annotated[Path, typer.Argument(help="A plan as `roundelay plan` writes it.", metavar="PLAN")],
    batches: Annotated[int, typer.Option(help="Full batches to simulate.", min=1)] = 8,
    grid: Annotated[bool, typer.Option("--grid", help="Print the schedule as a grid of actions over time.")] = False,
    programs: Annotated[bool, typer.Option("--programs", help="Print every worker's program.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome/Perfetto trace here.")] = None,
    as_json: o.Json = False,
) -> None:
    """Simulate a plan on a virtual clock: makespan, bubble, busy share, memory, versions."""
    plan = read_plan(plan_file)
    simulation = simulate(plan, batches=batches)
    if trace is not None:
        spans = simulation.spans()
        names = {k: "up to " + ", ".join(ends_of(plan, stages)) for k, stages in enumerate(plan.worker_stages)}
        write_trace(trace, spans, gaps=gaps_between(spans, plan), loads=simulation.loads, names=names)
    drawn = staircase(plan, min(batches, 6)) if grid else None
    texts = [str(program) for program in programs_of(plan)] if programs else None
    if as_json:
        show_json(simulation_json(plan, simulation) | {"grid": drawn, "programs": texts})
        return
    show_simulation(plan, simulation, batches)
    if drawn is not None:
        stdout.print(f"\n{drawn}\n\n{legend(plan)}", markup=False, soft_wrap=True)
    for text in texts or []:
        stdout.print("\n" + text, markup=False, soft_wrap=True)


@app.command("verify", epilog="Example: `roundelay verify my_job.py --steps 8 --tamper stash`")
@o.expand_options
def verify_command(
    job_file: o.JobFile,
    choices: o.Choices,
    steps: Annotated[int | None, typer.Option(help="Updates to compare. [default: 8]")] = None,
    epochs: o.Epochs = None,
    seed: o.Seed = 0,
    plan_file: o.PlanFile = None,
    resume: o.Resume = None,
    tamper: Annotated[str | None, typer.Option(help="Break the run on purpose: " + ", ".join(ALL_WAYS) + ".")] = None,
    as_json: o.Json = False,
) -> None:
    """Verify a run bit by bit: the captured job against plain PyTorch, and the run against a one-process reference.

    Exit code 0: all is proved; 1: there is a difference; 3: something could not be compared.
    """
    o.exclusive(steps, epochs)
    o.refuse_launcher("verify")
    o.refuse_nccl("verify", choices.transport)
    check_tamper(tamper)
    paths = PathResolver()
    job = load_job(job_file, seed)
    plan_file, resume = paths.of(plan_file), paths.of(resume)
    planned = plan_job(job, choices, seed, PlanSource(plan_file, resume), quiet=as_json)
    captured, plan = planned.captured, planned.plan
    first, length = ReferenceStart.of(captured), length_or_default(steps, epochs)
    announce("Training in plain PyTorch, and as captured ...", as_json)
    fidelity = check_fidelity(job, captured, plan, seed, length, resumed=resume is not None)
    announce("Training distributed, then in one process ...", as_json)
    start = None if resume is None else load_checkpoint(resume, captured)
    session = Session(job, captured, plan, seed, length, start)
    try:
        result = verify_session(session, tamper, first=first, fidelity=fidelity)
    except NondeterministicError as error:  # only where the plan asks for none
        error.exit_code = UNPROVED
        raise
    if as_json:
        show_json(verification_json(plan, result))
    else:
        show_verification(plan, result)
    raise typer.Exit(result.exit_code)


@app.command("report", epilog="Example: `roundelay report runs/latest -o report.html`")
def report_command(
    run: Annotated[Path, typer.Argument(help="A run's folder.", metavar="RUN")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write it. [default: report.html in the folder]")
    ] = None,
    opened: Annotated[bool, typer.Option("--open/--no-open", help="Show it in the web browser.")] = False,
    as_json: o.Json = False,
) -> None:
    """Write one HTML page on a run: loss, throughput, timeline, memory."""
    text, path = run_page(run), output or run / "report.html"
    write_text(path, text)
    if as_json:
        show_json({"path": str(path), "bytes": len(text.encode())})
    else:
        stderr.print(f"Wrote {path}.", markup=False)
    if opened:
        webbrowser.open(path.resolve().as_uri())


app.command("compare", epilog="Example: `roundelay compare my_job.py --rules 1f1b,pipeoptim,async`")(compare_command)
app.command("table", epilog="Example: `roundelay table cdp --workers 3`")(table_command)
app.command("doctor", epilog="Example: `roundelay doctor --json`")(doctor)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        RunError: it cannot be written.
    """
    with replacing_file(path) as file:
        file.write(text)


def main() -> None:
    """Entry point: run the command; every error becomes one panel and an exit code."""
    SIGNALS.listen()
    code = guarded(app, "--json" in sys.argv)
    sys.stdout.flush()
    if why := lost():
        stderr.print(f"Not all of the result could be written to stdout: {why}. The command itself ended with {code}.")
        code = code or 1
    SIGNALS.leave_to(signal.SIG_DFL)  # an interrupt raised now would only be printed by libraries as they unload
    if has_failed():  # to unload what uses the device would end the process by a signal
        sys.stderr.flush()
        os._exit(code)
    gc.freeze()  # avoids a last garbage collection over everything that torch has traced, which takes seconds
    sys.exit(code)


def guarded(command: Callable[..., Any], as_json: bool) -> int:
    """Run a command; returns its exit code."""
    with own_arguments(), only_json() if as_json else nullcontext():
        return _guarded(command, as_json)


def _guarded(command: Callable[..., Any], as_json: bool) -> int:
    traced = False
    try:
        traced = env.level() >= 1
        env.check_malloc()
        result = command(standalone_mode=False)
        if result == _INTERRUPTED:
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except RoundelayError as error:
        if SIGNALS.interrupted:
            return _interrupted()
        SIGNALS.leave_to(signal.SIG_IGN)  # a launcher may end this process while it reports the error
        show_error(error, as_json, traced)
        SIGNALS.leave_to(signal.SIG_DFL)
        return error.exit_code
    except typer.Exit as ending:
        return ending.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except typer.TyperException as error:
        show_error(_usage_error(error), as_json, traced)
        return int(getattr(error, "exit_code", 2))
    except Exception as error:
        if SIGNALS.first is not None:
            return _interrupted()
        known = out_of_threads("starting a thread", error)
        if traced and known is None:
            raise
        shown = _bug(error) if known is None else known
        show_error(shown, as_json, traced)
        return 70 if known is None else shown.exit_code


def _interrupted() -> int:
    SIGNALS.leave_to(signal.SIG_IGN)  # a launcher that receives Ctrl-C, too, now sends SIGTERM
    if env.leads():
        stderr.show_cursor()
        stderr.print("Interrupted. Every worker has been ended; a checkpoint, if there was one, is complete.")
    SIGNALS.leave_to(signal.SIG_DFL)  # so that a hanging exit can be interrupted
    return 128 + SIGNALS.cause


def _usage_error(error: typer.TyperException) -> UsageError:
    """An error of the command line's parser as one of ours."""
    context = getattr(error, "ctx", None)
    names = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    named = next((word for word in sys.argv[1:] if word in names), None)  # the parser of options gives no context
    name = named if context is None else context.info_name if context.parent is not None else None
    command = "roundelay" if name is None else f"roundelay {name}"  # whatever the executable is called
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
