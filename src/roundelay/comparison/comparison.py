"""Compare update rules: train the same job once per rule and seed, each seed with the same weights and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from roundelay.checkpoint.checkpoint import Checkpoint
from roundelay.comparison.comparison_folder import OTHER_FOLDER, ComparisonFolder, write
from roundelay.comparison.comparison_variants import OPTIMIZERS, OWN, Variant, rule_of_cuts, variants
from roundelay.comparison.run_results import RunResult, read_progress
from roundelay.errors import CaptureError, DivergedError, PlanError, UsageError, listed
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.job import Job, OptimizerFactory
from roundelay.observe.run_folder import RunFolder
from roundelay.planner.check_given import check_length
from roundelay.planner.given_layout import in_pipeline
from roundelay.planner.plan_options import DEADLINE_S, OF_A_RULE, AnyRuleKeywords, Choices, from_keywords, shows_choices
from roundelay.planning.check_here import check_here, refuse_launched
from roundelay.planning.examined import default_workers
from roundelay.planning.explain_plan import explain
from roundelay.planning.planning import capture, plan_with_reasons, read_plan, with_warnings
from roundelay.planning.torch_scope import on_threads
from roundelay.runtime.loading.loader_epoch import seed_everything
from roundelay.schedules import schedule_named
from roundelay.session.checkpointing import Saving, evaluate, holding_averages
from roundelay.session.event_writers import RunFolderObserver
from roundelay.session.events import Event, Observer, Updated, samples_per_second
from roundelay.session.restarts import rest_of
from roundelay.session.resume import load_checkpoint
from roundelay.session.run_summary import write_results
from roundelay.session.stop_condition import Length, extent
from roundelay.session.training import Session

Make = Callable[[int], Job]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted:
    """A run of the comparison starts.

    Args:
        number: of the run, from 1, among those that are left to do.
        total: number of runs that are left to do.
        finished_before: number of runs that had been finished already.
        variant: what is trained.
        seed: of the run.
        updates: number of updates; None if it depends on the data.
    """

    number: int
    total: int
    finished_before: int
    variant: Variant
    seed: int
    updates: int | None


@dataclass(frozen=True, slots=True)
class RunFinished:
    """A run of the comparison has finished, and its result is stored."""

    result: RunResult


@dataclass(frozen=True, slots=True)
class RunResumed:
    """The run that has started was interrupted before, and continues after ``updates`` updates."""

    updates: int


ComparisonEvent = RunStarted | RunResumed | RunFinished | Event
Observe = Callable[[ComparisonEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A finished comparison.

    Args:
        variants: in order.
        seeds: of the runs of every variant.
        plans: rule as given by the user to its plan, unless it was refused.
        refused: rule as given by the user to the reason why it cannot be planned.
        results: (variant's name, seed) to the result of the run.
    """

    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    plans: Mapping[str, Plan] = field(hash=False)
    refused: Mapping[str, str] = field(hash=False)
    results: Mapping[tuple[str, int], RunResult] = field(hash=False)

    def __repr__(self) -> str:
        diverged = sum(result.diverged is not None for result in self.results.values())
        names = listed([variant.name for variant in self.variants])
        return (
            f"Compared({names}; seeds={len(self.seeds)}, runs={len(self.results)}, diverged={diverged}, "
            f"refused={len(self.refused)})"
        )

    def of(self, variant: Variant) -> list[RunResult]:
        """The results of a variant's runs, by seed."""
        return [self.results[variant.name, seed] for seed in self.seeds if (variant.name, seed) in self.results]


@shows_choices
def compare(  # noqa: PLR0913  as many parameters as the command has options
    make: Make,
    *,
    out: str | Path,
    rules: Sequence[str] = ("all",),
    seeds: int = 5,
    optimizers: Sequence[str] = (),
    rates: Mapping[str, float] | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    source: str = "",
    notify: Observe | None = None,
    **choices: Unpack[AnyRuleKeywords],
) -> Compared:
    """Train under every rule from the same initial weights, seed by seed; runs that are finished are not repeated.

    All rules share the stages of one plan; rules with two stages per worker share those of another plan for the same
    workers. A rule that cannot be planned and a run that diverges are part of the result, and do not end the
    comparison.

    Args:
        make: seed to job; all random generators are seeded before each call, so that the jobs of a seed start equal.
        out: the folder; a comparison in it is continued, also with other rules, optimizers and seeds.
        rules: each ``RULE[:PREDICTOR][:MODE]``; ``all`` stands for every known rule.
        seeds: number of seeds, 0 and up.
        optimizers: names from ``variants.OPTIMIZERS``, in place of the job's own; its scheduler is kept.
        rates: optimizer to learning rate, in place of its default.
        steps: updates of every run; by default the job's own number, or one epoch.
        epochs: epochs of every run.
        source: identifies the job among others of the same model, such as a digest of its file.
        notify: called with every event, in the caller's thread.
        choices: as of :func:`~roundelay.planning.planning.plan` but for those of a rule: ``workers``, ``cuts`` (chosen
            once per number of stages per worker), ``micro_batches`` (by default each rule's own) and others.

    Raises:
        TypeError: a choice is unknown; predictor and backward mode are part of a rule's text.
        UsageError: an argument cannot be used, or the folder belongs to another comparison.
        RunError: a run failed, other than by a loss that is not finite; finished runs are kept.
    """
    own = from_keywords(compare, choices, OF_A_RULE)
    compared = variants(rules, optimizers, rates)
    if seeds < 1:
        raise UsageError("--seeds", got=str(seeds), expected="at least 1", remedy="Give a positive number of seeds.")
    check_here(replace(own, rule=rule_of_cuts(own.layout)))
    refuse_launched(own.transport or "memory")
    check_length(steps, epochs)
    comparison = _Comparison(make, ComparisonFolder(Path(out)), Length(steps=steps, epochs=epochs), own)
    comparison.begin(source)
    plans, refused = comparison.plans(compared)
    planned = [variant for variant in compared if variant.rule_text in plans]
    results = comparison.run_all(planned, plans, range(seeds), notify or (lambda event: None))
    return Compared(variants=compared, seeds=tuple(range(seeds)), plans=plans, refused=refused, results=results)


class _Comparison:
    """What all runs share: the function that makes jobs, the folder, the length of a run, and the cuts."""

    def __init__(self, make: Make, folder: ComparisonFolder, length: Length, choices: Choices) -> None:
        self._make, self._folder, self._length, self._choices = make, folder, length, choices
        self._job = self._new_job(0)
        self._captured = capture(self._job, seed=0, deadline_s=choices.deadline_s or DEADLINE_S)
        self._extent = extent(self._job, length, None)
        self._settings: dict[str, Any] = {}
        self._in_layout = not in_pipeline(choices)

    def _default_workers(self) -> int:
        return default_workers(devices=self._choices.devices, transport=self._choices.transport or "memory")

    def _new_job(self, seed: int) -> Job:
        seed_everything(seed)
        return self._make(seed)

    def begin(self, source: str) -> None:
        """Check the folder, and take the cuts from it, or choose them now.

        Raises:
            UsageError: the folder belongs to another comparison, or the model cannot be cut in this way.
        """
        own = self._choices
        settings = {
            "job": source,
            "model": self._captured.graph.fingerprint,
            "updates": self._extent.batches,
            "epochs": self._extent.epochs,
            "micro_batches": None,
            **own.given(),
            "workers": own.workers or self._default_workers(),
            "cuts": own.cuts or "measured",
            "torch": torch.__version__,
        }
        settings.pop("deadline_s", None)  # does not change results
        self._folder.check(settings)
        self._settings = settings
        stages = self._stages(1)
        if not self._in_layout:  # a layout says itself how many workers there are
            self._choices = replace(own, workers=len(stages))

    def _stages(self, per_worker: int) -> list[list[str]]:
        """The segments of all stages with ``per_worker`` stages on each worker, from the folder or chosen now."""
        path = self._folder.cuts(per_worker)
        plan = (
            read_plan(path, OTHER_FOLDER)
            if path.exists()
            else self._new_plan(path, Choices(rule=rule_of_cuts(self._choices.layout, per_worker)))
        )
        return [list(stage.segments) for stage in plan.stages]

    def _new_plan(self, path: Path, choices: Choices) -> Plan:
        """Plan, and write the plan into the folder."""
        planned = plan_with_reasons(self._job, choices.over(self._choices), captured=self._captured)
        if not self._folder.settings.exists():
            self._folder.begin(self._settings)
        write(path, planned.plan.text(explain(self._captured, planned.plan, planned.reasons)))
        return with_warnings(planned, stacklevel=2).plan

    def plans(self, compared: Sequence[Variant]) -> tuple[dict[str, Plan], dict[str, str]]:
        """Plans by rule, and by refused rule the reason."""
        plans: dict[str, Plan] = {}
        refused: dict[str, str] = {}
        for text, variant in {variant.rule_text: variant for variant in compared}.items():
            path = self._folder.plan(text)
            plan = read_plan(path, OTHER_FOLDER) if path.exists() else None
            try:
                row = rule_named(variant.rule)
                per_worker = 1 if self._in_layout else schedule_named(row.schedule).stages_per_worker
                plan = plan or self._new_plan(path, _choices_of(variant, self._stages(per_worker)))
            except (PlanError, CaptureError) as error:  # CaptureError: too few places for cuts
                got = "" if error.got == variant.rule else f": {error.got}"  # it stands before the reason
                refused[text] = f"{error.subject}{got}; expected {error.expected}"
            else:
                plans[text] = replace(plan, deadline_s=self._choices.deadline_s or plan.deadline_s)
        return plans, refused

    def run_all(
        self, compared: Sequence[Variant], plans: Mapping[str, Plan], seeds: Sequence[int], notify: Observe
    ) -> dict[tuple[str, int], RunResult]:
        """Do all runs that are not finished, seed by seed; returns the results of all."""
        runs = [(variant, seed, plans[variant.rule_text]) for seed in seeds for variant in compared]
        stored = {(run[0].name, run[1]): self._folder.result(*run) for run in runs}
        results = {key: result for key, result in stored.items() if result is not None}
        left = [run for run in runs if (run[0].name, run[1]) not in results]
        started = partial(RunStarted, total=len(left), finished_before=len(results), updates=self._extent.batches)
        for number, (variant, seed, plan) in enumerate(left, 1):
            notify(started(number=number, variant=variant, seed=seed))
            self._run(variant, seed, plan, notify)
            result = self._folder.result(variant, seed, plan)
            assert result is not None, "a run ends with a summary"
            results[variant.name, seed] = result
            notify(RunFinished(result))
        return results

    def _run(self, variant: Variant, seed: int, plan: Plan, notify: Observe) -> None:
        """Do one run, or the rest of it, with a new job, so that runs do not affect each other."""
        job, factory = self._new_job(seed), optimizer_factory(variant)
        job = job if factory is None else replace(job, optimizer=factory)
        captured = capture(job, seed=seed, deadline_s=plan.deadline_s)
        session = Session(job, captured, plan, seed, self._length)
        folder = self._folder.open_run(variant, seed)
        folder.write_plan(plan.text(explain(captured, plan)))
        _run_in_folder(session, folder, notify, lambda updates: notify(RunResumed(updates)))


def _choices_of(variant: Variant, cuts: Sequence[Sequence[str]]) -> Choices:
    """What a variant chooses of its plan."""
    return Choices(rule=variant.rule, predictor=variant.predictor, backward=variant.backward, cuts=cuts)


def optimizer_factory(variant: Variant) -> OptimizerFactory | None:
    """A function from named parameters to the variant's optimizer; None for the job's own."""
    if variant.optimizer == OWN:
        return None
    kind, _, settings = OPTIMIZERS[variant.optimizer]
    return partial(getattr(torch.optim, kind), lr=variant.rate, **settings)


def _run_in_folder(session: Session, folder: RunFolder, notify: Observer, on_resume: Callable[[int], None]) -> None:
    """Train to the end, from the checkpoint in the folder if there is one; a loss that is not finite is an end, too.

    Times are counted from the start of the first part of the run, without interruptions.

    Args:
        session: the whole run.
        folder: the run's folder, with its plan.
        notify: called with every event.
        on_resume: called with the number of updates that are not repeated, before the run continues.

    Raises:
        UsageError: the files of the interrupted run are damaged.
    """
    rest = rest_of(session, folder.checkpoint)
    start = load_checkpoint(folder.checkpoint, session.captured) if rest is None else rest.start
    with folder.open_metrics() as metrics:
        updates, evaluations = read_progress(folder, 0 if start is None else start.position.updates)
        record = RunFolderObserver(folder, metrics, len(updates))
        if start is not None:
            on_resume(len(updates))
            evaluated = bool(evaluations) and evaluations[-1].update == len(updates) - 1
            if not evaluated and (rest is None or not start.position.batches_into_epoch):
                _evaluate(session, start, record)
        if rest is None:  # interrupted between its last checkpoint and its summary
            folder.write_summary({"steps": len(updates), "samples_per_second": samples_per_second(updates)})
            return
        before_s = updates[-1].seconds if updates else 0.0

        def observe(event: Event) -> None:
            if isinstance(event, Updated):
                event = replace(event, seconds=before_s + event.seconds)
                updates.append(event)
            record(event)
            notify(event)

        try:
            trained = rest.run(notify=observe, saving=Saving(path=folder.checkpoint))
        except DivergedError:
            folder.write_summary({"diverged": len(updates)})
        else:
            whole = replace(trained, updates=tuple(updates), samples_per_second=samples_per_second(updates))
            write_results(rest, whole, folder, {}, "")


def _evaluate(session: Session, start: Checkpoint, notify: Observer) -> None:
    """Evaluate a checkpoint's weights; it was written before that, and an interruption came in between."""
    if session.job.evaluate is not None:
        at = start.position
        with on_threads(session.plan.leader_threads), holding_averages(session.captured, start.optimizer):
            epoch = at.epoch if at.batches_into_epoch else at.epoch - 1
            notify(evaluate(session.job, session.captured.model, at.updates, epoch)[0])
