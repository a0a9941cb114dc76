"""Compare update rules: the same job, from the same weights and on the same data, once for every rule and seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from roundelay.api.comparison_variants import Variant, variants
from roundelay.api.cuts import default_workers
from roundelay.api.events import Evaluated, Event, Updated, samples_per_second
from roundelay.api.explain_plan import explain
from roundelay.api.partial_run import PartialRun
from roundelay.api.planning import CHOICES, capture, check_choices, plan_with_reasons, read_plan
from roundelay.api.run_results import LOSS, TRAINING, Point, Results, RunResult, write
from roundelay.api.stop_condition import Length, extent
from roundelay.api.training import Session
from roundelay.errors import CaptureError, DivergedError, PlanError, UsageError, listed
from roundelay.frontend import Captured
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rule_named
from roundelay.job import Job
from roundelay.runtime.loader_epoch import seed_everything
from roundelay.runtime.loader_probe import DEADLINE_S
from roundelay.schedules import schedule_named

EXACT = {1: "1f1b", 2: "zb-v"}
"""By whose plan the model is cut for all rules that give a worker so many stages."""

Make = Callable[[int], Job]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A run of the comparison begins.

    Args:
        number: which it is of those that are to be done now, from 1.
        total: of those.
        found: runs that were finished before.
        variant: what runs.
        seed: its seed.
        updates: how many it will make; None if only the data can tell.
    """

    number: int
    total: int
    found: int
    variant: Variant
    seed: int
    updates: int | None


@dataclass(frozen=True, slots=True)
class Ended:
    """A run of the comparison has ended, and is kept."""

    outcome: RunResult


@dataclass(frozen=True, slots=True)
class Resumed:
    """The run that has begun was interrupted before, and goes on after so many updates."""

    updates: int


Told = Callable[[Begun | Resumed | Ended | Event], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A comparison that is finished.

    Args:
        variants: its lines, in order.
        seeds: what every line was run with.
        plans: the rule as asked for to its plan; none of a rule that was refused.
        refused: the rule as asked for to why it cannot be had here.
        outcomes: (variant's name, seed) to what came of it.
    """

    variants: tuple[Variant, ...]
    seeds: tuple[int, ...]
    plans: Mapping[str, Plan] = field(hash=False)
    refused: Mapping[str, str] = field(hash=False)
    outcomes: Mapping[tuple[str, int], RunResult] = field(hash=False)

    def __repr__(self) -> str:
        diverged = sum(outcome.diverged is not None for outcome in self.outcomes.values())
        names = listed([variant.name for variant in self.variants])
        return (
            f"Compared({names}; seeds={len(self.seeds)}, runs={len(self.outcomes)}, diverged={diverged}, "
            f"refused={len(self.refused)})"
        )

    def of(self, variant: Variant) -> list[RunResult]:
        """The runs of a line, by seed."""
        return [self.outcomes[variant.name, seed] for seed in self.seeds if (variant.name, seed) in self.outcomes]


def compare(  # noqa: PLR0913  as many parameters as the command has options
    make: Make,
    *,
    out: str | Path,
    rules: Sequence[str] = ("all",),
    seeds: int = 5,
    optimizers: Sequence[str] = (),
    rates: Mapping[str, float] | None = None,
    workers: int | None = None,
    cuts: str | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    source: str = "",
    notify: Told | None = None,
    **choices: Any,
) -> Compared:
    """Train under every rule from the same initial weights, seed by seed; what the folder has is not done again.

    All rules share the stages of one plan; those that give each worker two share those of another one, for the same
    workers. A rule that cannot be had on them, and a run whose loss is no longer finite, are part of the answer and end
    nothing.

    Args:
        make: seed to job; every generator is seeded with it before each call, so that a seed's jobs start alike.
        out: the folder; one of the same comparison is gone on with, also with other rules, optimizers and seeds.
        rules: each ``RULE[:PREDICTOR][:MODE]``; ``all`` stands for every rule that is known.
        seeds: number of seeds, 0 and up.
        optimizers: names from ``variants.OPTIMIZERS``, in place of the job's own; its scheduler stays.
        rates: optimizer to learning rate, where it is not to be the usual one.
        workers: D.
        cuts: as for :func:`~roundelay.api.planning.plan`; chosen once, and once for twice as many stages.
        steps: updates of every run; the job's own number, or one epoch, if neither it nor ``epochs`` is given.
        epochs: epochs of every run.
        source: what tells this job from others of the same model, such as a digest of its file.
        notify: told of everything, in the caller's thread.
        choices: ``micro_batches`` (by default each rule's own), ``recompute``, ``compile``, ``precision``,
            ``loss_scale``, ``clip``, ``ema``, ``transport``, ``deadline_s``, ``devices``.

    Raises:
        TypeError: a choice is unknown; predictor and backward mode are part of a rule's text.
        UsageError: something given cannot be used, or the folder is another comparison's.
        RunError: a run failed otherwise than by its loss; what is finished stays.
    """
    check_choices(compare, choices, [name for name in CHOICES if name not in ("predictor", "backward")])
    lines = variants(rules, optimizers, rates)
    if seeds < 1:
        raise UsageError("--seeds", got=str(seeds), expected="at least 1", remedy="Give a positive number of seeds.")
    length = Length(steps=steps, epochs=epochs)
    common = {"job": source, "workers": workers or default_workers(), "cuts": cuts or "measured"}
    comparison = _Comparison(make, Results(Path(out)), length, {n: v for n, v in choices.items() if v is not None})
    comparison.begin(common, cuts, workers)
    plans, refused = comparison.plans([line.rule_text for line in lines])
    able = [line for line in lines if line.rule_text in plans]
    outcomes = comparison.run_all(able, plans, tuple(range(seeds)), notify or _unheard)
    return Compared(variants=lines, seeds=tuple(range(seeds)), plans=plans, refused=refused, outcomes=outcomes)


def _unheard(event: Begun | Resumed | Ended | Event) -> None:
    """Nobody listens."""


class _Comparison:
    """What all runs share: how a job is made, where results lie, how long a run is, and where the model is cut."""

    def __init__(self, make: Make, results: Results, length: Length, choices: Mapping[str, Any]) -> None:
        self._make, self._results, self._length, self._choices = make, results, length, choices
        self._job = self._made(0)
        self._captured = capture(self._job, seed=0, deadline_s=choices.get("deadline_s") or DEADLINE_S)
        self._extent = extent(self._job, length, None)
        self._asked: str | None = None
        self._workers: int | None = None
        self._settings: dict[str, Any] = {}
        self._cut: dict[int, list[list[str]]] = {}

    def _made(self, seed: int) -> Job:
        seed_everything(seed)
        return self._make(seed)

    def begin(self, common: Mapping[str, Any], cuts: str | None, workers: int | None) -> None:
        """Open the folder, and cut the model as it was cut there, or now.

        Raises:
            UsageError: the folder is another comparison's, or the model cannot be cut so.
        """
        settings = {
            **common,
            "model": self._captured.graph.fingerprint,
            "updates": self._extent.batches,
            "epochs": self._extent.epochs,
            "micro_batches": None,
            **{name: choice for name, choice in self._choices.items() if name != "deadline_s"},  # changes no result
            "torch": torch.__version__,
        }
        self._results.check(settings)
        self._settings, self._asked, self._workers = settings, cuts, workers
        self._workers = len(self._stages(1))

    def _stages(self, each: int) -> list[list[str]]:
        """The stages where each worker gets so many: as the folder has them, or cut now, and kept there."""
        if each not in self._cut:
            path = self._results.cuts(each)
            plan = read_plan(path, "Put the comparison into another folder by --out.") if path.exists() else None
            plan = plan or self._cut_now(EXACT[each], path)
            self._cut[each] = [list(stage.segments) for stage in plan.stages]
        return self._cut[each]

    def _cut_now(self, rule: str, path: Path) -> Plan:
        planned = plan_with_reasons(
            self._job, captured=self._captured, rule=rule, cuts=self._asked, workers=self._workers, **self._choices
        )
        self._results.begin(self._settings)
        write(path, planned.plan.text(explain(self._captured, planned.plan, planned.reasons)))
        return planned.plan

    def plans(self, rules: Sequence[str]) -> tuple[dict[str, Plan], dict[str, str]]:
        """The plan of every rule, or why there is none."""
        plans: dict[str, Plan] = {}
        refused: dict[str, str] = {}
        for text in dict.fromkeys(rules):
            path = self._results.plan(text)
            if path.exists():
                plan = read_plan(path, "Put the comparison into another folder by --out.")
                plans[text] = replace(plan, deadline_s=self._choices.get("deadline_s", plan.deadline_s))
                continue
            try:
                plans[text] = self._planned(text)
            except (PlanError, CaptureError) as error:  # of the latter: no place for so many cuts
                refused[text] = f"{error.subject}: {error.got}; expected {error.expected}"
            else:
                write(path, plans[text].text(explain(self._captured, plans[text])))
        return plans, refused

    def _planned(self, text: str) -> Plan:
        (line,) = variants([text])
        each = schedule_named(rule_named(line.rule).schedule).stages_per_worker
        return plan_with_reasons(
            self._job,
            captured=self._captured,
            rule=line.rule,
            workers=self._workers,
            cuts=self._stages(each),
            predictor=line.predictor,
            backward=line.backward,
            **self._choices,
        ).plan

    def run_all(
        self, lines: Sequence[Variant], plans: Mapping[str, Plan], seeds: Sequence[int], notify: Told
    ) -> dict[tuple[str, int], RunResult]:
        """Every run that the folder does not have yet, seed by seed; and those that it has."""
        wanted = [(line, seed) for seed in seeds for line in lines]
        found = {(line.name, seed): self._results.find(line, seed) for line, seed in wanted}
        outcomes = {key: outcome for key, outcome in found.items() if outcome is not None}
        left = [(line, seed) for line, seed in wanted if (line.name, seed) not in outcomes]
        before = len(outcomes)
        for number, (line, seed) in enumerate(left, 1):
            notify(
                Begun(
                    number=number,
                    total=len(left),
                    found=before,
                    variant=line,
                    seed=seed,
                    updates=self._extent.batches,
                )
            )
            with PartialRun(self._results.under_way(line, seed)) as so_far:
                outcome = self._run(line, seed, plans[line.rule_text], so_far, notify)
                self._results.keep(line, outcome)
                so_far.remove()
            outcomes[line.name, seed] = outcome
            notify(Ended(outcome))
        return outcomes

    def _run(self, line: Variant, seed: int, plan: Plan, so_far: PartialRun, notify: Told) -> RunResult:
        """One run, or what is left of it, with a job of its own: nothing that another run has changed is met again."""
        job, factory = self._made(seed), line.factory()
        job = job if factory is None else replace(job, optimizer=factory)

        def listen(event: Event) -> None:
            notify(so_far.note(event) if isinstance(event, Updated | Evaluated) else event)

        diverged = False
        try:
            captured: Captured = capture(job, seed=seed, deadline_s=plan.deadline_s)
            session = so_far.rest(Session(job, captured, plan, seed, self._length))
            if session.start is not None:
                notify(Resumed(session.start.position.updates))
            session.run(notify=listen, saving=so_far.saving)
        except DivergedError:
            diverged = True
        updates = [event for event in so_far.events if isinstance(event, Updated)]
        return RunResult(
            variant=line.name,
            seed=seed,
            curves=_curves(updates, [event for event in so_far.events if isinstance(event, Evaluated)]),
            samples_per_second=math.nan if diverged else samples_per_second(updates),
            diverged=len(updates) if diverged else None,
        )


def _curves(updates: Sequence[Updated], evaluations: Sequence[Evaluated]) -> dict[str, tuple[Point, ...]]:
    at = {event.update: event.seconds for event in updates}
    curves = {LOSS: [Point(event.update + 1, event.seconds, event.loss) for event in updates]}
    for made in updates:
        for name, value in made.metrics.items():
            point = Point(made.update + 1, made.seconds, value if math.isfinite(value) else math.nan)
            curves.setdefault(TRAINING + name, []).append(point)
    told: set[str] = set()
    for event in evaluations:
        seconds = at.get(event.updates - 1, math.nan)  # when these weights were made: evaluating runs beside
        for name, value in event.metrics.items():
            own = f"evaluate.{name}" if name in curves and name not in told else name
            told.add(own)
            curves.setdefault(own, []).append(
                Point(event.updates, seconds, value if math.isfinite(value) else math.nan)
            )
    return {name: tuple(points) for name, points in curves.items()}
