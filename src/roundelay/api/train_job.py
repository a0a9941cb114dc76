"""The public ``train``: a training with its folder, its progress and its results."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from roundelay.env import launched_as, runs_folder
from roundelay.errors import PlanWarning, UsageError
from roundelay.frontend import Captured
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.observe.progress_lines import ProgressLines
from roundelay.observe.run_folder import RunFolder, check_vacant
from roundelay.planner.check_given import check_length, validate_check
from roundelay.planner.plan_options import Keywords, shows_choices
from roundelay.planning.job_file import GivenJob
from roundelay.planning.planning import captured_and_planned
from roundelay.proof.fidelity_precheck import check_before_training
from roundelay.session.checkpointing import Saving
from roundelay.session.event_writers import RunFolderObserver, user_observer
from roundelay.session.events import Evaluated, Event, Observer, Updated, broadcast
from roundelay.session.resume import load_checkpoint
from roundelay.session.run_record import Trained
from roundelay.session.run_summary import write_results
from roundelay.session.stop_condition import Length
from roundelay.session.training import Session


@shows_choices
def train(  # noqa: PLR0913  as many parameters as the command has options
    job: GivenJob,
    *,
    plan: Plan | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    resume: str | Path | None = None,
    save_to: str | Path | None = None,
    checkpoint_every: int | None = None,
    out: str | Path | bool | None = None,
    progress: bool = True,
    on_update: Callable[[Updated], None] | None = None,
    observers: Sequence[Observer] = (),
    check: str | None = None,
    **choices: Unpack[Keywords],
) -> Trained:
    """Train by a plan, or plan and train.

    Args:
        job: the job, whose model has the trained weights afterwards; or a function from the seed to a job, or the
            path of a file that defines ``def job(seed)``: then it is made here, with all generators seeded.
        plan: what to run; by default :func:`roundelay.plan` makes one from the choices below.
        steps: number of updates. If neither it nor ``epochs`` is given: the rest of the run that ``resume`` is a
            checkpoint of, if it was interrupted; else the job's own number, or one epoch.
        epochs: number of epochs, including those of a resumed checkpoint.
        seed: of data order and of every random number in the model.
        resume: checkpoint to continue from. With the plan of the run that wrote it, training continues as if it had
            not been interrupted; with any other plan it starts with empty stages.
        save_to: where to write a checkpoint after every epoch and at the end; by default in the run's folder.
        checkpoint_every: also after every so many updates, without draining the stages.
        out: the run's folder; by default a new one in ``runs`` (or where ``ROUNDELAY_RUNS`` says). False: none.
        progress: print a line after two seconds and then every ten, and where the folder is, on stderr.
        on_update: called once per update, in order, in the caller's thread. The training does not wait for it: a slow
            function is called late. An exception ends the training; the last checkpoint is complete.
            :class:`roundelay.StopTraining` ends it in good order, soon after.
        observers: called in the same way with every event: updates, evaluations, checkpoints and others
            (``roundelay.session.events``).
        check: ``full`` first trains the captured job and plain PyTorch over two updates, in processes of their own, and
            refuses a job that differs; ``quick`` relies on what capture has detected; ``off`` checks nothing. By
            default ``full`` where it is expected to take less than five seconds and a quarter of the free memory.
        choices: for the plan, as of :func:`roundelay.plan`: ``workers``, ``rule``, ``micro_batches`` and others.

    Raises:
        TypeError: a choice is unknown.
        UsageError: an argument cannot be used, or both a plan and a choice were given.
        FidelityError: the captured job trains differently from plain PyTorch.
        UserCodeError: ``on_update`` or an observer raises, or other user code does on a worker.
        RunError: the run failed; the last checkpoint is complete.
    """
    folder = _asked_folder(out)
    _check_saving(checkpoint_every, save_to, folder)
    validate_check(check)
    check_length(steps, epochs)
    _warn_of_launcher()
    made, captured, planned = captured_and_planned(train, job, plan, seed, choices)
    session = _session(made, captured, planned.plan, seed, Length(steps=steps, epochs=epochs), resume)
    checked = check_before_training(session, check)
    own = user_observer(on_update, observers, captured.effects.settings.check)
    watching = [_Progress(session), own] if progress else [own]
    checkpoint = None if save_to is None else Path(save_to)
    if folder is None:
        saving = None if checkpoint is None else Saving(path=checkpoint, every=checkpoint_every or 0)
        return replace(session.run(notify=broadcast(watching), saving=saving), check=checked)
    return _recorded(
        session, folder, checkpoint, checkpoint_every or 0, watching, (checked, planned.notices), report=progress
    )


def _session(job: Job, captured: Captured, plan: Plan, seed: int, length: Length, resume: str | Path | None) -> Session:
    start = None if resume is None else load_checkpoint(Path(resume), captured, lazily=job.weights is not None)
    session = Session(job, captured, plan, seed, length, start)
    if session.drained is not None:
        warnings.warn(f"{session.drained.reason}: the first batches read newer weights", PlanWarning, stacklevel=3)
    return session


def _warn_of_launcher() -> None:
    if (process := launched_as()) is not None:
        warnings.warn(
            f"this process is {process} of a launcher's, and roundelay.train() trains the whole job in each of them; "
            "`roundelay train JOB.py` under the launcher makes them the workers of one training",
            stacklevel=3,
        )


def _asked_folder(out: str | Path | bool | None) -> tuple[Path, str | None] | None:
    """The parent and the name of the run's folder; a name of its own if there is none. None: no folder."""
    if out is None or out is True:
        runs = runs_folder()
        return None if runs is None and out is None else (runs or Path("runs"), None)
    if out is False:
        return None
    path = Path(out)
    check_vacant(path)
    return path.parent, path.name


def _recorded(
    session: Session,
    where: tuple[Path, str | None],
    checkpoint: Path | None,
    every: int,
    watching: Sequence[Observer],
    said: tuple[str, Sequence[str]],
    *,
    report: bool,
) -> Trained:
    """Train, and write what happens into a folder; ``said``: how the job was checked, and notices of its plan."""
    checked, notices = said
    folder = RunFolder.create(*where, point=where[1] is None)
    try:
        folder.write_plan(session.plan.text())
        with ExitStack() as stack:
            metrics = stack.enter_context(folder.open_metrics())
            files = RunFolderObserver(folder, metrics, session.extent.start_batch)
            saving = Saving(path=checkpoint or folder.checkpoint, every=every)
            trained = session.run(notify=broadcast([files, *watching]), saving=saving)
    except BaseException:
        if not folder.metrics.exists() or not folder.metrics.stat().st_size:  # nothing was trained
            folder.plan.unlink(missing_ok=True)
            folder.discard()
        raise
    write_results(session, trained, folder, {}, checked, notices)
    if report:
        _say(f"Run folder: {folder.path}")
    return replace(trained, check=checked, folder=folder.path)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


class _Progress:
    """Prints the progress of a run."""

    def __init__(self, session: Session) -> None:
        self._length = session.run_length()
        self._lines = ProgressLines(self._length, _say)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Updated):
            self._length.see(event.epoch)
            self._lines.update(event.update, event.loss, event.metrics, event.samples_per_second)
        elif isinstance(event, Evaluated):
            self._lines.evaluated(event.updates, event.metrics)


def _check_saving(checkpoint_every: int | None, save_to: str | Path | None, folder: object) -> None:
    if checkpoint_every is not None and (checkpoint_every < 1 or (save_to is None and folder is None)):
        raise UsageError(
            "checkpoint_every",
            got=str(checkpoint_every) if checkpoint_every < 1 else "neither a folder nor save_to",
            expected="a positive number of updates, and out or save_to",
            remedy="Give both, or leave checkpoint_every out.",
        )
