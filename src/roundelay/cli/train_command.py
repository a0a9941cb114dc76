"""``roundelay train``: the run folder, the live line, the table at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path
from typing import Any, final

import torch
from rich.markup import escape
from rich.progress import Progress, TaskID

from roundelay.api.checkpointing import Saving, evaluating, holding_averages
from roundelay.api.plain_baseline import Baseline, measure
from roundelay.api.planning import explain
from roundelay.api.restarts import rest_of, run_restarting
from roundelay.api.state_gather import (
    Drained,
    Evaluated,
    Event,
    Notify,
    NotSaved,
    Restarted,
    Saved,
    Skipped,
    Stopping,
    Updated,
)
from roundelay.api.stop_condition import Length
from roundelay.api.training import Session, Trained, load_checkpoint
from roundelay.cli.debug_output import show_run
from roundelay.cli.screen import amount, announce, progress, stderr, stdout, table
from roundelay.cli.signals import SIGNALS, Grace
from roundelay.cli.tensorboard_points import draw
from roundelay.cli.utilization import gaps_between, loads_of, show_utilization, spans_of, stage_names, utilization
from roundelay.errors import UsageError, UserCodeError, WorkerLostError, counted
from roundelay.frontend import Captured
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.lower.validate_plan import CPU
from roundelay.observe.metrics_file import MetricsWriter
from roundelay.observe.run_folder import RunFolder
from roundelay.observe.tensorboard import Curves, CurveWriter
from roundelay.observe.trace import write_trace
from roundelay.runtime.rendezvous import ProcessGroup

_NO_GRACE = Grace()
RUNS = Path("runs")
"""Where run folders are made that are given no name."""

_TOLD_SKIPS = (8, 16, 32, 64, 128)
"""Updates in a row that are skipped when it is told: a dynamic scale that is found skips fewer."""


def train_job(
    job: Job,
    captured: Captured,
    plan: Plan,
    *,
    seed: int,
    steps: int | None,
    epochs: int | None,
    resume: Path | None,
    out: Path | None,
    runs: Path,
    baseline: bool,
    restarts: int,
    checkpoint_every: int,
    quiet: bool,
    party: ProcessGroup | None = None,
    reasons: Sequence[str] = (),
    curves: CurveWriter | None = None,
    grace: Grace = _NO_GRACE,
    check: str | None = None,
) -> dict[str, Any]:
    """Train, show it, and leave the run folder; returns the summary.

    Args:
        job: the job.
        captured: its model.
        plan: what to run.
        seed: of the run.
        steps: updates, or None.
        epochs: epochs, or None.
        resume: checkpoint to continue from.
        out: the run's folder, or None for one below ``runs``.
        runs: where the folders of runs without a name are.
        baseline: measure plain PyTorch first.
        restarts: how often a run that fails may go on from its last checkpoint.
        checkpoint_every: updates from one checkpoint to the next, besides those at epochs' ends; 0: only those.
        quiet: show nothing.
        party: the processes that a launcher has started, if one has; this one leads them.
        reasons: for the plan's cuts.
        curves: TensorBoard's writer, if it is to draw the run.
        grace: what the run is granted when a signal asks for its end.
        check: how the captured job is held to plain PyTorch first: ``full``, ``quick`` or ``off``; None by its cost.
    """
    start = None if resume is None else load_checkpoint(resume, captured)
    session = Session(job, captured, plan, seed, Length(steps=steps, epochs=epochs), start)
    checked = session.check(check, party)
    if checked:
        announce(f"{checked[0].upper()}{checked[1:]}.", quiet)
    session, folder = _begun(session, out, runs, party)
    try:
        folder.write_plan(plan.text(explain(captured, plan, reasons)))
        plain = _plain(job, seed, plan.precision, quiet) if baseline and _fits_one(job, plan) else []
        trained = _trained(session, folder, restarts, checkpoint_every, quiet, party, curves, grace)
    except BaseException:
        if not folder.metrics.exists() or not folder.metrics.stat().st_size:
            folder.plan.unlink(missing_ok=True)
            folder.discard()  # nothing was trained: leave nothing half-made
        raise
    show_run(trained)
    spans = spans_of(trained)
    gaps = gaps_between(spans, plan)
    summary = _summary(plan, trained, plain, folder) | utilization(session, trained, spans, gaps) | {"check": checked}
    folder.write_summary(summary)  # first: should the disk be full, the trace is the larger, and the least loss
    write_trace(folder.trace, spans, gaps=gaps, loads=loads_of(trained), names=stage_names(session))
    if not quiet:
        _show(plan, trained, summary)
        show_utilization(summary)
        _showcase(job, captured, trained.snapshot.optimizer)
        stderr.print(f"Run folder: {folder.path} ({runs}/latest points at it)" if out is None else f"Run folder: {out}")
    return summary


def _begun(session: Session, out: Path | None, runs: Path, party: ProcessGroup | None) -> tuple[Session, RunFolder]:
    """The session and its folder; both go on where they were if the launcher has restarted everybody."""
    if out is not None and party is not None and party.restart and (out / "plan.toml").is_file():
        return _rest(session, out, party), RunFolder.reopen(out)
    inside = out is None or out.parent == runs
    root, name = (runs, None) if out is None else (out.parent, out.name)
    return session, RunFolder.create(root, name, point=inside)


def _rest(session: Session, out: Path | None, party: ProcessGroup) -> Session:
    """What is left to do after a launcher's restart; without a folder of a fixed name, everything."""
    if out is None or not party.restart:
        return session
    rest = rest_of(session, out / "checkpoint")
    if rest is None:
        raise UsageError(
            f"restart {party.restart} of the run in {out}",
            got="a checkpoint of its end",
            expected="something left to train",
            remedy="Nothing is to be done: the training is complete.",
        )
    return rest


def follow_job(
    job: Job,
    captured: Captured,
    plan: Plan,
    party: ProcessGroup,
    *,
    seed: int,
    steps: int | None,
    epochs: int | None,
    resume: Path | None,
    out: Path | None,
) -> int:
    """Run one worker of a party that another process leads, which shows and writes everything; the exit code.

    Raises:
        WorkerLostError: the leader is gone, and this is the member that tells so.
    """
    start = None if resume is None else load_checkpoint(resume, captured)
    session = Session(job, captured, plan, seed, Length(steps=steps, epochs=epochs), start)
    try:
        return 0 if _rest(session, out, party).run_follower(party) else 1
    except WorkerLostError:
        if party.deputy:
            raise
        return 1


def _fits_one(job: Job, plan: Plan) -> bool:
    """Whether one process may hold the whole model, and tells something: beside devices, what a CPU does does not."""
    return set(plan.devices) == {CPU} and job.weights is None


def _plain(job: Job, seed: int, precision: str, quiet: bool) -> list[Baseline]:
    counts = sorted({1, os.cpu_count() or 1})
    announce("Measuring plain PyTorch for a few seconds ...", quiet)
    found = {threads: measure(job, seed, threads, precision) for threads in counts}
    for threads in [threads for threads, one in found.items() if one is None]:
        announce(f"Plain PyTorch told no figure with threads: {threads}.", quiet)
    return [one for one in found.values() if one is not None]


def _trained(
    session: Session,
    folder: RunFolder,
    restarts: int,
    every: int,
    quiet: bool,
    party: ProcessGroup | None,
    writer: CurveWriter | None,
    grace: Grace,
) -> Trained:
    with ExitStack() as stack:
        metrics = stack.enter_context(folder.open_metrics())
        start = session.extent.start_batch
        metrics.cut(start if folder.metrics.stat().st_size else 0)
        folder.cut_evaluations(start)
        curves = None if writer is None else stack.enter_context(Curves(folder.tensorboard, writer, start))
        live = None if quiet else progress()
        bar = None if live is None else live.add_task("...", total=session.extent.batches)
        if live is not None:
            stack.callback(live.stop)

        def notify(event: Event) -> None:
            _note(event, folder, metrics, live, bar)
            if curves is not None:
                draw(event, curves)

        def run(session: Session, notify: Notify) -> Trained:
            saving = Saving(path=folder.checkpoint, every=every)
            ending = GracefulStop(session, notify, folder)
            with SIGNALS.gracefully(grace, ending.ask, ending.ready):
                return session.run(notify=ending.heard, saving=saving, party=party)

        return run_restarting(session, restarts, run, notify, folder.checkpoint)


@final
class GracefulStop:
    """The end of a run that a signal has asked for: a checkpoint in mid-flight, and then the interrupt.

    Args:
        session: the run.
        notify: told of every event.
        folder: the run's.
    """

    def __init__(self, session: Session, notify: Notify, folder: RunFolder) -> None:
        self._session, self._notify, self._folder = session, notify, folder
        self._updates = 0
        self._wanted: int | None = None

    def ask(self) -> None:
        """Ask for it."""
        self._wanted = self._updates
        self._session.control.save_soon()

    def ready(self) -> bool:
        """Whether there is anything to save."""
        return self._updates > 0

    def heard(self, event: Event) -> None:
        """Pass an event on; the checkpoint that was asked for ends the run.

        Raises:
            KeyboardInterrupt: it is written, or cannot be.
        """
        self._notify(event)
        if isinstance(event, Updated):
            self._updates = event.update + 1
        if self._wanted is None or not isinstance(event, (Saved, NotSaved)):
            return
        if isinstance(event, Saved) and event.updates >= self._wanted:
            stderr.print(
                f"Asked to end: the checkpoint after update {event.updates - 1} is written. Go on with --from "
                f"{self._folder.path}.",
                markup=False,
            )
        elif isinstance(event, Saved):
            return
        raise KeyboardInterrupt


def _note(event: Event, folder: RunFolder, metrics: MetricsWriter, live: Progress | None, bar: TaskID | None) -> None:
    if isinstance(event, Updated):
        metrics.write(
            update=event.update,
            epoch=event.epoch,
            loss=event.loss,
            samples_per_second=event.samples_per_second,
            busy=event.busy,
            learning_rates=event.learning_rates,
            seconds=event.seconds,
            time=round(time.time(), 3),
            **({"metrics": event.metrics} if event.metrics else {}),
            **({} if event.loss_scale is None else {"loss_scale": event.loss_scale}),
        )
        if live is not None and bar is not None:
            live.start()  # only now: its thread must not be alive while workers are forked
            busy = " ".join(f"{share:.0%}" for share in event.busy)
            told = "".join(f"  {escape(name)} {value:.4f}" for name, value in event.metrics.items())
            text = f"loss {event.loss:.4f}{told}  {event.samples_per_second:.0f} samples/s  busy {busy}"
            live.update(bar, advance=1, description=text)
    elif isinstance(event, Evaluated):
        folder.add_evaluation(event.updates - 1, event.epoch, event.metrics)
        if live is not None:
            told = "  ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
            live.console.print(f"after update {event.updates}: {told}", markup=False)
    elif isinstance(event, Restarted):
        metrics.cut(event.updates)
        folder.cut_evaluations(event.updates)
        if live is not None and bar is not None:
            live.stop()  # workers are forked now
            live.update(bar, completed=event.updates)
        stderr.print(f"{event.cause}\nRestart {event.number}: going on after update {event.updates}.", markup=False)
    elif isinstance(event, Drained):
        stderr.print(
            f"{event.micro_batches} micro-batches that were in flight are dropped and start anew: {event.reason}.",
            markup=False,
        )
    elif isinstance(event, Skipped):
        if event.in_a_row in _TOLD_SKIPS:
            stderr.print(
                f"Updates {event.update - event.in_a_row + 1} to {event.update} are skipped: their gradients are not "
                f"finite, with losses scaled by up to {event.loss_scale:g}.",
                markup=False,
            )
    elif isinstance(event, NotSaved):
        stderr.print(
            f"No checkpoint at {event.path}: {event.reason}. The one before it, if there is one, is whole.",
            markup=False,
        )
    elif isinstance(event, Stopping):
        stderr.print(f"The training ends soon: {event.reason}", markup=False)
    else:
        assert isinstance(event, Saved)


def activation_bytes(trained: Trained) -> list[int]:
    """Most bytes that each worker's tapes, and what backwards in two halves owe, have held at one time."""
    return [
        max(accumulate((_change(data, event[0], event[8]) for event in trained.events.get(k, [])), initial=0))
        for k, data in sorted(trained.workers.items())
    ]


def _change(account: Mapping[str, Any], opcode: str, stage: int) -> int:
    """Bytes that an instruction leaves behind or takes away."""
    tape, debt = int(account["tape_bytes"][str(stage)]), int(account["owed_bytes"][str(stage)])
    return {"forward": tape, "backward": debt - tape, "backward-weight": -debt}.get(opcode, 0)


def _summary(plan: Plan, trained: Trained, plain: list[Baseline], folder: RunFolder) -> dict[str, Any]:
    wall = {k: data["wall_s"] for k, data in trained.workers.items()}
    return {
        "rule": plan.rule,
        "predictor": plan.predictor,
        "backward": plan.backward,
        "workers": plan.num_workers,
        "micro_batches": plan.micro_batches,
        "transport": plan.transport,
        "steps": len(trained.updates),
        "loss_first": trained.updates[0].loss,
        "loss_last": trained.updates[-1].loss,
        "metrics_first": trained.updates[0].metrics,
        "metrics_last": trained.updates[-1].metrics,
        "samples_per_second": trained.samples_per_second,
        "plain_samples_per_second": {str(one.threads): one.samples_per_second for one in plain},
        "evaluation": dict(trained.evaluations[-1].metrics) if trained.evaluations else {},
        "activation_bytes": activation_bytes(trained),
        "skipped_updates": [trained.workers[k]["skipped"] for k in sorted(wall)],
        "bytes_received": [sum(trained.workers[k]["bytes_received"].values()) for k in sorted(wall)],
        "wall_s": max(wall.values()),
        "stopped": trained.stopped,
        "run_folder": str(folder.path),
    }


def _show(plan: Plan, trained: Trained, summary: dict[str, Any]) -> None:
    rows = [
        ["loss, first and last update", f"{summary['loss_first']:.4f} -> {summary['loss_last']:.4f}"],
        *(
            [f"{name}, first and last update", f"{value:.4f} -> {summary['metrics_last'][name]:.4f}"]
            for name, value in summary["metrics_first"].items()
        ),
        *([name, f"{value:.4f}"] for name, value in summary["evaluation"].items()),
        ["samples/s", f"{summary['samples_per_second']:.1f}"],
    ]
    plain = summary["plain_samples_per_second"]
    for threads, rate in plain.items():
        ratio = f"  (this run: {summary['samples_per_second'] / rate:.2f} x)" if rate == max(plain.values()) else ""
        rows.append([f"plain PyTorch, {threads} thread" + ("s" if threads != "1" else ""), f"{rate:.1f}{ratio}"])
    if summary["stopped"]:
        rows.append(["ended early", summary["stopped"]])
    if any(summary["skipped_updates"]):
        rows.append(["updates skipped, by stage", ", ".join(map(str, summary["skipped_updates"]))])
    for k, held in enumerate(summary["activation_bytes"]):
        rows.append([f"worker {k}, activations", amount(held)])
    who, updates = counted(plan.num_workers, "worker"), counted(summary["steps"], "update")
    title = f"{plan.rule} on {who} over {plan.transport}, {updates}"
    stdout.print(table(title, ["", ""], rows))


def _showcase(job: Job, captured: Captured, optimizer: Mapping[str, Mapping[str, Any]]) -> None:
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
    except Exception as error:  # the person's own code
        raise UserCodeError(
            "Job(showcase=...)",
            got=f"{type(error).__name__}: {error}",
            expected="a function from the trained model to text",
            remedy="Correct the function; the run itself is complete.",
        ) from error
    stdout.print("\n" + text, markup=False)
