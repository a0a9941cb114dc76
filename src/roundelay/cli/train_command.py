"""``roundelay train``: train in a run folder, with progress on the screen and a table at the end."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from roundelay import env
from roundelay.cli.changed_by_job import PathResolver
from roundelay.cli.options import RunOptions
from roundelay.cli.plan_from_options import PlannedJob, PlanSource, check_source, plan_job
from roundelay.cli.screen import announce, show_json, stderr, stdout, table
from roundelay.cli.signals import SIGNALS
from roundelay.cli.train_progress import GracefulStop, ScreenObserver
from roundelay.cores import all_threads
from roundelay.errors import UsageError, UserCodeError, counted
from roundelay.frontend import Captured
from roundelay.ir.device_names import CPU
from roundelay.ir.num_bytes import bytes_text
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.launching.process_group import ProcessGroup
from roundelay.observe.run_folder import RunFolder, check_vacant
from roundelay.observe.tensorboard import Curves
from roundelay.observe.tensorboard import writer as curve_writer
from roundelay.planner.plan_options import Choices
from roundelay.planning.explain_plan import explain
from roundelay.planning.job_file import load_job
from roundelay.proof.fidelity_precheck import check_before_training
from roundelay.proof.plain_baseline import measure
from roundelay.runtime.state_reports import Gathered
from roundelay.session.checkpointing import Saving, evaluating, holding_averages
from roundelay.session.event_writers import RunFolderObserver, tensorboard_observer
from roundelay.session.events import Observer, broadcast
from roundelay.session.restarts import rest_of, run_restarting
from roundelay.session.run_record import Trained
from roundelay.session.run_summary import UNCHECKED, summary_lines, write_results
from roundelay.session.stop_condition import Length
from roundelay.session.training import Session

RUNS = Path("runs")
"""Parent of the run folders without a name of their own."""


def train_command(
    job_file: Path, choices: Choices, run: RunOptions, process_group: ProcessGroup | None, *, as_json: bool
) -> int:
    """Plan and train a job as the command line says; returns the exit code.

    Args:
        job_file: defines the job.
        choices: for the plan.
        run: for the run.
        process_group: the launcher's processes, if one has started this process.
        as_json: print the summary as JSON, and nothing else on stdout.
    """
    if run.tensorboard and (process_group is None or process_group.leads):
        curve_writer()  # an error here, before anything that takes time
    paths = PathResolver()
    if process_group is None:
        check_source(choices, PlanSource(run.plan_file, run.resume))
    if run.out is not None and process_group is None:
        check_vacant(run.out)
    job = load_job(job_file, run.seed)
    run = run.resolved(paths)
    source = PlanSource(
        run.plan_file, run.resume, run.out if process_group is not None and process_group.restart else None
    )
    planned = plan_job(
        job, choices, run.seed, source, quiet=as_json or process_group is not None, process_group=process_group
    )
    if process_group is not None and not process_group.leads:
        with SIGNALS.gracefully(run.grace, lambda: None, lambda: process_group.met):
            return follow_job(planned, run, process_group)
    summary = train_job(planned, run, paths.of(RUNS), quiet=as_json, process_group=process_group)
    if as_json:
        show_json(summary)
    return 0


@final
@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that may begin.

    Args:
        planned: the job and its plan.
        session: the training.
        folder: of the run.
        checked: how the job was compared with plain PyTorch.
    """

    planned: PlannedJob
    session: Session
    folder: RunFolder
    checked: str


def train_job(
    planned: PlannedJob, run: RunOptions, runs: Path, *, quiet: bool, process_group: ProcessGroup | None
) -> dict[str, Any]:
    """Train in a run folder, with progress and results on the screen; returns the summary.

    Args:
        planned: the job and its plan.
        run: options of the run.
        runs: parent of the folders of runs without a name.
        quiet: print messages only.
        process_group: the launcher's processes, if one has started this process; this one leads them.
    """
    return train_prepared(
        prepare(planned, run, runs, process_group, quiet=quiet), run, runs, process_group, quiet=quiet
    )


def prepare(
    planned: PlannedJob, run: RunOptions, runs: Path, process_group: ProcessGroup | None, *, quiet: bool
) -> Prepared:
    """Check a job, and create the folder of its run; arguments as of :func:`train_job`."""
    session = _session(planned, run)
    checked = check_before_training(session, run.check, launched=process_group is not None)
    if checked:
        announce(f"{checked[0].upper()}{checked[1:]}.", quiet and UNCHECKED not in checked)
    session, folder = _begun(session, run.out, runs, process_group)
    return Prepared(planned, session, folder, checked)


def train_prepared(
    prepared: Prepared, run: RunOptions, runs: Path, process_group: ProcessGroup | None, *, quiet: bool
) -> dict[str, Any]:
    """Train, with progress and results on the screen; returns the summary. Arguments as of :func:`train_job`."""
    planned, session, folder = prepared.planned, prepared.session, prepared.folder
    job, plan = planned.job, planned.plan
    with discarding(folder):
        folder.write_plan(plan.text(explain(planned.captured, plan, planned.reasons)))
        baselines = _measure_plain(job, plan, run.seed, quiet=quiet) if run.baseline else {}
        trained = _trained(session, folder, run, quiet=quiet, process_group=process_group)
    _show_debug(trained)
    summary = write_results(session, trained, folder, baselines, prepared.checked, planned.notices)
    if not quiet:
        for line in summary_lines(summary, plan):
            stdout.print(line, markup=False)
        if run.verbose:
            _show(plan, summary)
            _show_utilization(summary)
        _show_preview(job, planned.captured, trained.snapshot.optimizer)
        link = f" ({runs}/latest points at it)" if run.out is None else ""
        place = folder.path if run.out is None else run.out
        stderr.print(f"Run folder: {place}{link}; `roundelay report {place}` draws it", markup=False, soft_wrap=True)
    return summary


@contextmanager
def discarding(folder: RunFolder) -> Iterator[None]:
    """Discard the folder of a run that fails within the context before anything is trained."""
    try:
        yield
    except BaseException:
        if not folder.metrics.exists() or not folder.metrics.stat().st_size:
            folder.plan.unlink(missing_ok=True)
            folder.discard()
        raise


def _session(planned: PlannedJob, run: RunOptions) -> Session:
    return planned.session(run.seed, Length(steps=run.steps, epochs=run.epochs), run.resume)


def _begun(
    session: Session, out: Path | None, runs: Path, process_group: ProcessGroup | None
) -> tuple[Session, RunFolder]:
    """The session and its folder; after a launcher's restart, the rest of the session and the same folder."""
    if out is not None and process_group is not None and process_group.restart and (out / "plan.toml").is_file():
        return _rest(session, out, process_group), RunFolder.reopen(out)
    inside = out is None or out.parent == runs
    root, name = (runs, None) if out is None else (out.parent, out.name)
    return session, RunFolder.create(root, name, point=inside)


def _rest(session: Session, out: Path | None, process_group: ProcessGroup) -> Session:
    """The rest of a session after a launcher's restart; the whole session without a folder of a fixed name."""
    if out is None or not process_group.restart:
        return session
    rest = rest_of(session, out / "checkpoint")
    if rest is None:
        raise UsageError(
            f"restart {process_group.restart} of the run in {out}",
            got="a checkpoint of its end",
            expected="something left to train",
            remedy="Nothing to do: the training is complete.",
        )
    return rest


def follow_job(planned: PlannedJob, run: RunOptions, process_group: ProcessGroup) -> int:
    """Run one worker under a launcher, while another process leads, prints and writes; returns the exit code.

    Raises:
        WorkerLostError: the leader is lost.
    """
    return _rest(_session(planned, run), run.out, process_group).run_follower(process_group)


def _measure_plain(job: Job, plan: Plan, seed: int, *, quiet: bool) -> dict[int, float]:
    """Samples per second of plain PyTorch by number of threads; on the CPU only, and if the model fits one process."""
    if set(plan.devices) != {CPU} or job.weights is not None:
        announce("Plain PyTorch is not measured: that needs stages on the CPU, and the whole model here.", quiet)
        return {}
    announce("Measuring plain PyTorch for a few seconds ...", quiet)
    counts = sorted({plan.threads, all_threads(torch.get_num_threads)})
    measured = {threads: measure(job, seed, threads, plan.precision) for threads in counts}
    for threads in [threads for threads, rate in measured.items() if not rate]:
        announce(f"Plain PyTorch could not be measured with threads: {threads}.", quiet)
    return {threads: rate for threads, rate in measured.items() if rate}


def _trained(
    session: Session, folder: RunFolder, run: RunOptions, *, quiet: bool, process_group: ProcessGroup | None
) -> Trained:
    start = session.extent.start_batch
    with ExitStack() as stack:
        screen = ScreenObserver(session.run_length(), quiet=quiet)
        stack.callback(screen.close)
        metrics = stack.enter_context(folder.open_metrics())
        observers: list[Observer] = [RunFolderObserver(folder, metrics, start), screen]
        if run.tensorboard:
            curves = stack.enter_context(Curves(folder.tensorboard, curve_writer(), start))
            observers.append(tensorboard_observer(curves))

        def attempt(session: Session, notify: Observer) -> Trained:
            saving = Saving(path=folder.checkpoint, every=run.checkpoint_every)
            stop = GracefulStop(session.control, folder)
            with SIGNALS.gracefully(run.grace, stop.request, stop.ready):
                gathers: Gathered = "nothing" if session.job.showcase is None else "weights"
                return session.run(
                    notify=broadcast([notify, stop]), saving=saving, process_group=process_group, gathers=gathers
                )

        return run_restarting(session, run.restarts, attempt, broadcast(observers), folder.checkpoint)


def _show(plan: Plan, summary: dict[str, Any]) -> None:
    rows = []
    plain = summary["plain_samples_per_second"]
    for threads, rate in plain.items():
        ratio = f"  (this run: {summary['samples_per_second'] / rate:.2f} x)" if rate == max(plain.values()) else ""
        rows.append([f"plain PyTorch, {threads} thread" + ("s" if threads != "1" else ""), f"{rate:.1f}{ratio}"])
    for k, num_bytes in enumerate(summary["activation_bytes"]):
        rows.append([f"worker {k}, activations", bytes_text(num_bytes)])
    title = f"{plan.rule} on {plan.arrangement} over {plan.transport}, {counted(summary['steps'], 'update')}"
    stdout.print(table(title, ["", ""], rows))


def _show_preview(job: Job, captured: Captured, optimizer: Mapping[str, Mapping[str, Any]]) -> None:
    if job.showcase is None:
        return
    try:
        with (
            holding_averages(captured, optimizer),
            evaluating(captured.model),
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
        ):
            text = str(job.showcase(captured.model))
    except Exception as error:  # user code
        raise UserCodeError(
            "Job(showcase=...)",
            got=f"{type(error).__name__}: {error}",
            expected="a function from the trained model to text",
            remedy="Correct the function; the run itself is complete.",
        ) from error
    stdout.print("\n" + text, markup=False)


def _show_utilization(summary: dict[str, Any]) -> None:
    """Print time and memory as tables."""
    kinds = ["forward", "backward", "update", "data", "bubble", "wait"]
    columns = ["", "busy", *kinds]
    rows = [[f"worker {k}", *(_as_share(row[kind]) for kind in columns[1:])] for k, row in enumerate(summary["shares"])]
    stdout.print()
    since = summary["shares_since_micro_batch"]
    stretch = f" since micro-batch {since}" if since else ""
    stdout.print(
        table(f"Time{stretch}: bubble is what the schedule asks for, wait is what messages take", columns, rows)
    )
    names = dict.fromkeys(name for terms in summary["terms"].values() for name in terms)
    rows = [[name, *(f"{own.get(name, 0.0) * 1e3:.4g}" for own in summary["terms"].values())] for name in names]
    if rows:
        stdout.print()
        stdout.print(table("Milliseconds of a batch along the critical path", ["", *summary["terms"]], rows))
    shared = any(row["process_shared"] for row in summary["memory"])
    rows = [[f"worker {k}", *_memory(row)] for k, row in enumerate(summary["memory"])]
    note = "; the workers are threads of one process, so the measured values are those of all" if shared else ""
    stdout.print()
    stdout.print(table(f"Memory{note}", ["", "predicted", "private", "peak resident", "of it at the start"], rows))


def _as_share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _memory(row: dict[str, Any]) -> list[str]:
    measured = [row["private_bytes"], row["peak_rss_bytes"], row["rss_at_start_bytes"]]
    return ["-" if value is None else bytes_text(value) for value in (row["predicted"]["total"], *measured)]


def _show_debug(trained: Trained) -> None:
    """What ROUNDELAY_DEBUG shows of a run: times from level 2 on, every instruction from level 4 on."""
    if env.level() >= 2:
        for worker, stages in enumerate(trained.plan.worker_stages):
            for k in stages:
                _show_times(trained, worker, k)
        for worker, loads in sorted(trained.loads.items()):
            mean_s = statistics.fmean(load.end_s - load.start_s for load in loads) / trained.plan.batch_parts
            stderr.print(f"worker {worker} data: {mean_s * 1e3:.3f} ms, planned {trained.plan.read_s * 1e3:.3f} ms")
    if env.level() >= 4:
        for worker, events in sorted(trained.events.items()):
            for event in events:
                stderr.print(f"worker {worker} {event.text}", markup=False, soft_wrap=True)


def _show_times(trained: Trained, worker: int, k: int) -> None:
    """Median measured and planned seconds of a stage's instructions."""
    stage, label = trained.plan.stages[k], "" if k == worker else f", stage {k}:"
    planned = {"forward": stage.forward_s, "backward": stage.backward_s}
    planned |= {"backward-weight": stage.weights_s, "update": stage.update_s}
    for opcode, seconds in planned.items():
        executed = [event for event in trained.events[worker] if (event.opcode, event.stage) == (opcode, k)]
        if executed:
            median_s = statistics.median(event.end_s - event.start_s for event in executed)
            stderr.print(f"worker {worker}{label} {opcode}: {median_s * 1e3:.3f} ms, planned {seconds * 1e3:.3f} ms")
