"""The commands of ``roundelay``, and their exit codes.

Command lines are parsed and judged here without torch; what carries a command out is imported when it is called.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from roundelay import env
from roundelay.calibration import SECONDS
from roundelay.cli import options as o
from roundelay.cli.arithmetic import Arithmetic, choose_arithmetic
from roundelay.cli.changed_by_job import own_arguments
from roundelay.cli.check_options import (
    allowed_rules,
    check_choices,
    check_comparison,
    check_explained,
    check_lengths,
    check_run,
    check_search,
    check_space,
)
from roundelay.cli.compare_options import CompareOptions
from roundelay.cli.doctor_command import doctor, show_version
from roundelay.cli.host_options import Advertise, HostedChoices, HostOptions, Listen, check_hosted
from roundelay.cli.loading import load
from roundelay.cli.output_streams import lost
from roundelay.cli.screen import only_json, show_error, stderr
from roundelay.cli.signals import SIGNALS
from roundelay.cli.table_command import table_command
from roundelay.cli.verify_options import VerifyOptions, check_window
from roundelay.errors import InternalError, RoundelayError, UsageError
from roundelay.planner.plan_options import Choices
from roundelay.proof.tamper_ways import check_tamper

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
def train(job_file: o.JobFile, choices: Choices, run: o.RunOptions, as_json: o.Json = False) -> int:
    """Train a job, and write a run folder: plan, metrics, trace, checkpoint, summary."""
    planned = run.plan_file is not None or run.resume is not None
    check_run(run)
    check_choices(job_file, choices, planned=planned)
    command, processes = load("cli.train_command"), load("cli.own_processes")
    if (count := processes.own_processes(choices, run.plan_file, run.resume)) > 0:
        return int(processes.run_processes(count, sys.argv[1:]))
    process_group, choices = load("cli.launched_choices").joined(choices, run.restarts, planned=planned)
    SIGNALS.join()
    return int(command.train_command(job_file, choices, run, process_group, as_json=as_json))


@app.command("plan", epilog="Example: `roundelay plan my_job.py --workers 2 -o plan.toml`")
@o.expand_options
def plan(
    job_file: o.JobFile,
    choices: Choices,
    seed: o.Seed = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write it. [default: stdout]")] = None,
    show: Annotated[
        str | None,
        typer.Option(help="graph: print what each stage's workers compute, and every exchange, instead of the plan."),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Search for the fastest plan on at most --workers workers in all; other options are kept as given.",
        ),
    ] = False,
    finals: Annotated[
        int | None,
        typer.Option(
            help="With --search: run so many of the best, and the best of each kind, for some seconds each, and take "
            "the fastest; 0 trusts the predictions. [default: 4]",
            min=0,
        ),
    ] = None,
    space: Annotated[
        str | None,
        typer.Option(
            help="With --search: runnable (plans that can be run here), or all: signatures of every operation over the "
            "axes of --cluster, priced and not run. [default: runnable]",
            metavar="runnable|all",
        ),
    ] = None,
    allow: Annotated[
        str | None,
        typer.Option(
            help="With --search: other rules that may be chosen, each with how many times as many batches it needs to "
            "reach the same loss.",
            metavar="RULE=FACTOR[,...]",
        ),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Write a job's plan: readable, editable, versioned text."""
    o.refuse_launcher("plan")
    check_space(space, choices, output, search=search, finals=bool(finals))
    allowed = allowed_rules(job_file, allow, search=search and space != "all")
    if space == "all":
        check_choices(job_file, replace(choices, cluster=None))
        load("cli.signatures_command").signatures_command(job_file, choices, seed, as_json=as_json)
        return
    if search:
        check_search(job_file, choices, show)
        command = load("cli.search_command").search_command
        command(job_file, choices, seed, output, finals=finals, allowed=allowed, as_json=as_json)
        return
    if finals is not None:
        raise UsageError("--finals", got="no --search", expected="--search", remedy="Give --search, or leave it out.")
    if show not in (None, "graph"):
        raise UsageError("--show", got=repr(show), expected="graph", remedy="Choose it, or leave the option out.")
    check_choices(job_file, choices)
    load("cli.plan_command").plan_command(job_file, choices, seed, output, graph=show is not None, as_json=as_json)


@app.command("simulate", epilog="Example: `roundelay simulate plan.toml --grid`")
def simulate(
    plan_file: Annotated[Path, typer.Argument(help="A plan as `roundelay plan` writes it.", metavar="PLAN")],
    batches: Annotated[int, typer.Option(help="Full batches to simulate.", min=1)] = 8,
    grid: Annotated[bool, typer.Option("--grid", help="Print the schedule as a grid of actions over time.")] = False,
    programs: Annotated[bool, typer.Option("--programs", help="Print every worker's program.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome/Perfetto trace here.")] = None,
    as_json: o.Json = False,
) -> None:
    """Simulate a plan on a virtual clock: makespan, bubble, busy share, memory, versions."""
    load("cli.simulate_command").simulate_command(
        plan_file, batches, trace, grid=grid, programs=programs, as_json=as_json
    )


@app.command("verify", epilog="Example: `roundelay verify my_job.py --steps 8 --tamper stash`")
@o.expand_options
def verify(job_file: o.JobFile, choices: Choices, options: VerifyOptions, as_json: o.Json = False) -> int:
    """Verify a run bit by bit: the captured job against plain PyTorch, and the run against a one-process reference.

    With --trace no new run is made: what one by rule ravnest has written down is replayed.

    Exit code 0: all is proved; 1: there is a difference; 3: something could not be compared. Under a launcher all its
    processes end with it.
    """
    planned = options.plan_file is not None or options.resume is not None
    check_lengths(options.steps, options.epochs)
    o.refuse_nccl("verify", choices.transport)
    check_tamper(options.tamper)
    if options.trace is not None:
        return int(load("cli.trace_command").verify_trace(job_file, choices, options, options.trace, as_json=as_json))
    check_window(options)
    check_choices(job_file, choices, planned=planned)
    command = load("cli.verify_command")
    process_group, choices = load("cli.launched_choices").joined(choices, 0, planned=planned)
    SIGNALS.join()
    return int(command.verify_command(job_file, choices, options, process_group, as_json=as_json))


@app.command("host", epilog="Example: `roundelay host my_job.py --peers 3 --listen 192.168.1.20:7700 --out shared`")
@o.expand_options
def host(
    job_file: o.JobFile,
    options: HostOptions,
    choices: HostedChoices,
    arithmetic: Arithmetic = None,
    as_json: o.Json = False,
) -> int:
    """Train with machines that join: print an invitation for each other one, and begin when all are here.

    Each runs one worker, on its CPU, over grpc with mutual TLS. Machines that join get a part of the model as data, and
    run nothing of the job's Python. Stage 0, here, sees the data, and the last stage what the loss reads of them; each
    machine sees, and may keep, the weights of its own stage and what it gets from the others.
    """
    check_lengths(options.steps, options.epochs)
    o.refuse_launcher("host")
    check_hosted(choices)
    choose_arithmetic(arithmetic)
    check_choices(job_file, replace(choices, workers=options.peers, transport="grpc"), planned=True)
    SIGNALS.join()
    return int(load("cli.host_command").host_command(job_file, choices, options, as_json=as_json))


@app.command("join", epilog="Example: `roundelay join roundelay-1-...`, the line that the host has printed")
def join(
    invitation: Annotated[str, typer.Argument(help="The line that the host has printed for this machine.")],
    listen: Listen = None,
    advertise: Advertise = None,
    memory_limit: Annotated[
        int | None,
        typer.Option(help="Bytes that this machine's part may need. [default: 0.8 of what is free]", min=1),
    ] = None,
    arithmetic: Arithmetic = None,
) -> int:
    """Put this machine to work in a run that another hosts. Nothing of that one's Python comes here.

    This machine sees, and may keep, the weights of its own stage and what it gets from the others; with the last stage
    also what the loss reads of the data. Others see its speed, memory and address.
    """
    o.refuse_launcher("join")
    choose_arithmetic(arithmetic)
    SIGNALS.join()
    return int(load("cli.join_command").join_command(invitation, listen, advertise, memory_limit))


@app.command("report", epilog="Example: `roundelay report runs/latest -o report.html`")
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder.", metavar="RUN")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write it. [default: report.html in the folder]")
    ] = None,
    opened: Annotated[bool, typer.Option("--open/--no-open", help="Show it in the web browser.")] = False,
    as_json: o.Json = False,
) -> None:
    """Write one HTML page on a run: loss, throughput, timeline, memory."""
    load("cli.report_command").report_command(run, output, opened=opened, as_json=as_json)


@app.command("compare", epilog="Example: `roundelay compare my_job.py --rules 1f1b,pipeoptim,async`")
@o.expand_options
def compare(job_file: o.JobFile, options: CompareOptions, choices: o.AnyRule, as_json: o.Json = False) -> None:
    """Train under several rules from the same weights, seed by seed; leave a table and learning curves."""
    check_lengths(options.steps, options.epochs)
    o.refuse_launcher("compare")
    o.refuse_nccl("compare", choices.transport)
    check_comparison(job_file, choices, options.rule_texts, options.optimizer_names, options.rates or [])
    load("cli.compare_command").compare_command(job_file, options, choices, as_json=as_json)


@app.command("explain", epilog="Example: `roundelay explain plan.toml --diff other.toml`")
def explain(
    plan_file: Annotated[Path, typer.Argument(help="A plan as `roundelay plan` writes it.", metavar="PLAN")],
    diff: Annotated[
        Path | None, typer.Option(help="Another plan: what each term of it takes beside.", metavar="PLAN")
    ] = None,
    job_file: Annotated[Path | None, typer.Option("--job", help="The job, for --why-not.", metavar="JOB.py")] = None,
    why_not: Annotated[
        str | None,
        typer.Option(
            help="Show the best plan that has this beside the plan, both predicted from the job: a choice such as "
            "zero=3, or a parameter's signature such as 'layers.0.up.weight=S(1)'.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a self-contained page of it.")] = None,
    search: Annotated[
        Path | None,
        typer.Option(help="With --html: what `roundelay plan --search --json` has printed; the page lists its plans."),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Explain a plan: where its predicted time and memory go, term by term."""
    check_explained(diff, job_file, why_not, html, search)
    load("cli.explain_command").explain_command(plan_file, diff, job_file, why_not, html, search, as_json=as_json)


@app.command("calibrate", epilog="Example: `roundelay calibrate --workers 2 --transport shm`")
def calibrate(
    workers: Annotated[
        int | None, typer.Option(help="How many. [default: 2; under a launcher one for each process]", min=1)
    ] = None,
    transport: Annotated[
        str | None, typer.Option(help="memory, shm, gloo or grpc. [default: memory; under a launcher gloo]")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Intra-op threads of each worker. [default: the cores, shared]", min=1)
    ] = None,
    seconds: Annotated[float, typer.Option(help="Measure again and again for so many seconds.", min=0)] = SECONDS,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write it. [default: the cache, for later plans]")
    ] = None,
    as_json: o.Json = False,
) -> int:
    """Measure this machine for planning: messages, exchanges, instructions, operators."""
    command = load("cli.calibrate_command")
    choices = Choices(workers=workers, transport=transport, threads=threads, devices="cpu")
    process_group, choices = load("cli.launched_choices").joined(choices, 0)
    SIGNALS.join()
    return int(command.calibrate_command(choices, seconds, output, process_group, as_json=as_json))


app.command("table", epilog="Example: `roundelay table cdp --workers 3`")(table_command)
app.command("doctor", epilog="Example: `roundelay doctor --json`")(doctor)


def main() -> None:
    """Entry point: run the command; every error becomes one panel and an exit code."""
    SIGNALS.listen()
    code = guarded(app, "--json" in sys.argv)
    sys.stdout.flush()
    if why := lost():
        stderr.print(f"Not all of the result could be written to stdout: {why}. The command itself ended with {code}.")
        code = code or 1
    SIGNALS.leave_to(signal.SIG_DFL)  # an interrupt raised now would only be printed by libraries as they unload
    if _device_has_failed():  # to unload what uses the device would end the process by a signal
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
        known = _out_of_threads(error)
        if traced and known is None:
            raise
        shown = _bug(error) if known is None else known
        show_error(shown, as_json, traced)
        return 70 if known is None else shown.exit_code


def _interrupted() -> int:
    SIGNALS.leave_to(signal.SIG_IGN)  # a launcher that receives Ctrl-C, too, now sends SIGTERM
    if env.leads():
        stderr.show_cursor()
        stderr.print("Interrupted. All that was started has ended; a checkpoint, if there was one, is complete.")
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


def _device_has_failed() -> bool:
    """Whether a device has failed in this process, if it has come so far."""
    module: Any = sys.modules.get("roundelay.runtime.processes.device_failure")
    return module is not None and bool(module.has_failed())


def _out_of_threads(error: Exception) -> RoundelayError | None:
    """The error of a host that has no more threads, if it is that, and this process has come so far."""
    module: Any = sys.modules.get("roundelay.runtime.processes.user_errors")
    known: RoundelayError | None = None if module is None else module.out_of_threads("starting a thread", error)
    return known


def _bug(error: Exception) -> InternalError:
    return InternalError(
        "roundelay itself",
        got=f"{type(error).__name__}: {error}",
        expected="no error that it does not know",
        remedy="Run again with ROUNDELAY_DEBUG=1 and report the traceback as a bug.",
    )
