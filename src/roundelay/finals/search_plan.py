"""Plan by search: look at the job, search, run the best for some seconds, and plan as the fastest is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Unpack, final

from roundelay.calibration.calibrate import calibrate
from roundelay.env import cache_folder
from roundelay.errors import PlanError, RoundelayError, UsageError
from roundelay.finals.short_run import ShortRun
from roundelay.frontend import Captured
from roundelay.ir.device_names import CPU
from roundelay.ir.num_bytes import parse_bytes
from roundelay.job import Job
from roundelay.planner.check_given import check_each
from roundelay.planner.costs import with_costs
from roundelay.planner.holder_choices import cluster_of
from roundelay.planner.inherited_choices import inherited
from roundelay.planner.machine_profile import MachineProfile
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_options import DEADLINE_S, Choices, Keywords, from_keywords, shows_choices
from roundelay.planner.prove_plan import prove
from roundelay.planner.source import Hardware
from roundelay.planner.stage_counts import default_devices
from roundelay.planning.collect_facts import collect_facts
from roundelay.planning.examined import Examined, hardware_here
from roundelay.planning.job_file import GivenJob, given_job
from roundelay.planning.machine_profiles import found_profile, keep_profile
from roundelay.planning.make_plan import Planned
from roundelay.planning.planning import capture, plan_with_reasons, with_warnings
from roundelay.runtime.loading.prefetch import OnWait, ignore_wait
from roundelay.search.baselines import baselines
from roundelay.search.search import Found, Task, Tried, search, tried
from roundelay.search.shifted_cuts import with_shifted_cuts
from roundelay.search.space import ALONE, counts_of, space, transports_of

FINALS = 4
"""Of the best that are run, by default."""

ROUNDS = 2
"""How often each final is run, in turns; the fewest seconds count, as disturbances only add to them."""

FINAL_S = 1.5
"""Seconds of each run."""

PROFILE_S = 3.0
"""Seconds of measuring a transport that no profile has."""

SLOWED, LEAST_S = 1.5, 0.02
"""More threads that take so many times as long as fewer, and so many seconds for a batch, had no cores of their own."""

TIE = 1.05
"""Finals that take up to so many times as long as the fastest are as good: a short run tells no better."""

FAR = 3.0
"""A family whose best is predicted to take so many times as long as the best of all is not run."""

MOST_FAMILIES = 6
"""Families that are run, at most."""

Tell = Callable[[str], None]
"""Called with what is done now, in words."""


@dataclass(frozen=True, slots=True)
class Final:
    """A plan that was run.

    Args:
        name: of its family, or its place in the search.
        tried: the plan with what was predicted.
        measured_s: seconds of a batch; None if it could not be run.
        why: it could not.
    """

    name: str
    tried: Tried
    measured_s: float | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search and its finals found.

    Args:
        planned: the plan that was chosen, measured and proved as any other.
        chosen: its choices, with what was predicted.
        found: by the search.
        baselines: what an expert would try first, by name; None if it is no plan of this model.
        finals: what was run, the fastest first.
        seconds: of each phase.
    """

    planned: Planned
    chosen: Tried
    found: Found
    baselines: Mapping[str, Tried | None] = field(hash=False)
    finals: tuple[Final, ...]
    seconds: Mapping[str, float] = field(hash=False)


@shows_choices
def search_plan(
    job: GivenJob,
    *,
    finals: int | None = None,
    allow: Mapping[str, float] | None = None,
    seed: int = 0,
    tell: Tell = lambda words: None,
    **choices: Unpack[Keywords],
) -> Searched:
    """Search for the fastest plan of a job on this host, and run the best; as ``roundelay plan --search``.

    Args:
        job: the job.
        finals: how many of the best are run, beside the best of each kind; 0 trusts the predictions. By default
            :data:`FINALS`, and 0 for a cluster, whose workers are not here.
        allow: rules that may be chosen beside the given one, and how many times as many batches each needs.
        seed: of the data.
        tell: called with what is done now, in words.
        choices: what the plan must have, as of :func:`roundelay.plan`; ``workers`` is how many there are in all.

    Raises:
        CaptureError: the model cannot be captured.
        PlanError: no choices that contain the given ones are a plan of this model, or fit the memory.
        TypeError: a choice is unknown.
        UsageError: there cannot be so many finals.
    """
    own = from_keywords(search_plan, choices)
    check_each(own)
    most = 0 if own.cluster is not None else math.inf
    if finals is not None and not 0 <= finals <= most:
        expected = "0 for a cluster, whose workers are not here" if own.cluster is not None else "0 or more"
        raise UsageError("finals", got=str(finals), expected=expected, remedy="0 trusts the predictions.")
    if wrong := [name for name, factor in (allow or {}).items() if not 0 < factor < math.inf]:
        got = f"{wrong[0]}: {(allow or {})[wrong[0]]}"
        raise UsageError("allow", got=got, expected="rules with numbers above 0", remedy="Correct it.")
    made = given_job(job, seed)
    captured = capture(made, seed=seed, deadline_s=own.deadline_s or DEADLINE_S)
    searched = SearchPlan(made, captured, own, seed, tell, allowed=allow).run(finals)
    with_warnings(searched.planned, stacklevel=3)
    return searched


def workers_of(given: Choices, machine: Hardware) -> int:
    """How many workers a search has: as given, or all of a cluster, or one for each GPU; on the CPU two."""
    if machine.cluster is not None:
        return given.workers or len(machine.cluster.workers)
    on_cpu = device_of(given, machine) == CPU
    return given.workers or (2 if on_cpu else machine.devices)


def device_of(given: Choices, machine: Hardware) -> str:
    """Where a search's workers compute: ``cpu``, or the first GPU."""
    named = (given.devices or default_devices(machine, given.transport or "memory")).split(",")[0]
    return "cuda:0" if named == "cuda" else named


def profiles_of(given: Choices, machine: Hardware, tell: Tell = lambda words: None) -> dict[str, MachineProfile]:
    """What links and operators take on this machine, by the transports that may be used; measured where not known.

    Args:
        given: pins; `workers` is how many there are in all.
        machine: this one; none is measured for the links of a cluster that declares them.
        tell: called with what is measured.
    """
    workers = workers_of(given, machine)
    each = given.threads or machine.threads_each((CPU,) * workers)
    declared = machine.cluster is not None and machine.cluster.links is not None
    links = workers > 1 and device_of(given, machine) == CPU and not declared
    return {name: _profile(name, workers, each, tell) for name in transports_of(given, machine) if links}


def task_of(source: Examined, given: Choices, machine: Hardware, profiles: Mapping[str, MachineProfile]) -> Task:
    """What is searched for on this machine.

    Args:
        source: the job, which is looked at here.
        given: pins; `workers` is how many there are in all.
        machine: this one, with its cluster.
        profiles: of the machine, by transport.
    """
    workers = workers_of(given, machine)
    counts = counts_of(workers) if given.threads is None else []
    threads = {machine.threads_each((CPU,) * count) for count in counts} or {given.threads or 1}
    device = device_of(given, machine)
    threads = threads if device == CPU else {1}
    facts = collect_facts(source, precision=given.precision, threads=sorted(threads), device=device)
    limit = None if given.memory_limit is None else parse_bytes(given.memory_limit, "--memory-limit")
    return Task(facts, machine, workers, limit, profiles)


def _profile(transport: str, workers: int, threads: int, tell: Tell) -> MachineProfile:
    """What links and operators take here: as it was measured before, or now, and kept."""
    known = found_profile(transport, workers, threads)
    if known is not None:
        tell(f"A profile of {transport}, measured {known.age(datetime.now(UTC))} ago ...")
    else:
        tell(f"Measuring {transport} between {workers} workers ...")
        known = calibrate(workers=workers, transport=transport, threads=threads, seconds=PROFILE_S)
        keep_profile(known)
    return known


@final
class SearchPlan:
    """One search.

    Args:
        job: the job.
        captured: its model.
        given: pins; `workers` is how many there are in all.
        seed: of the data.
        tell: called with every phase.
        show_wait: called when waiting for the loader takes long.
        allowed: rules that may be chosen beside the given one, and how many times as many batches each needs.
    """

    def __init__(
        self,
        job: Job,
        captured: Captured,
        given: Choices,
        seed: int,
        tell: Tell,
        show_wait: OnWait = ignore_wait,
        allowed: Mapping[str, float] | None = None,
    ) -> None:
        self._allowed = allowed or {}
        self._machine = replace(hardware_here(), cluster=cluster_of(given))
        self._job, self._captured, self._given, self._seed = job, captured, given, seed
        self._tell, self._show_wait = tell, show_wait
        given = given.over(Choices(ema=job.ema))
        self._pins = replace(given, workers=None, memory_limit=None)
        self._seconds: dict[str, float] = {}
        #: the best so far, for who ends the search early
        self.best: Tried | None = None

    def run(self, finals: int | None = None) -> Searched:
        """Search, and run so many of the best and the best of each family; 0 trusts the predictions.

        By default :data:`FINALS`; 0 for a cluster, whose workers are not here.

        Raises:
            PlanError: no choices that contain the given ones are a plan of this model, or fit the memory.
        """
        finals = (FINALS if self._machine.cluster is None else 0) if finals is None else finals
        with self._phase("profile", "Looking for a profile of this machine ..."):
            profiles = profiles_of(self._given, self._machine, self._tell)
        with self._phase("facts", "Measuring the model's operations ..."):
            examined = Examined(self._job, self._captured, self._seed, self._show_wait)
            task = replace(task_of(examined, self._given, self._machine, profiles), needs=self._allowed)
        with self._phase("search", "Searching ..."):
            pins = [self._pins, *(replace(self._pins, rule=rule) for rule in self._allowed)]
            every = [point for own in pins for point in space(own, task.facts, task.machine, task.workers)]
            found = search(task, [*dict.fromkeys(every)], tell=self._progress)
            found = with_shifted_cuts(task, found, self._progress)
            self.best = found.best[0]
            families = baselines(self._pins, task.machine, task.workers)
            known = {name: _maybe(task, one) for name, one in families.items()}
        with self._phase("finals", "Running the best ..." if finals else "Trusting the predictions ..."):
            run = self._run_finals(_finalists(found, finals))
        winner = self.best = _winner(run) or found.best[0]
        with self._phase("plan", "Planning and measuring the stages ..."):
            chosen, planned = self._first_planned([winner, *(one for one in found.best if one != winner)], profiles)
            planned = replace(planned, notices=(*planned.notices, *busy_notices(task.facts)))
        return Searched(planned, chosen, found, known, tuple(run), self._seconds)

    @contextmanager
    def _phase(self, name: str, words: str) -> Iterator[None]:
        self._tell(words)
        began = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - began

    def _progress(self, done: int, points: int, best: Tried | None) -> None:
        self.best = best or self.best
        takes = "" if best is None else f", the best takes {best.batch_s * 1e3:.3g} ms a batch"
        self._tell(f"Searching: {done} of {points} plans{takes} ...")

    def _run_finals(self, finalists: Sequence[tuple[str, Tried]]) -> list[Final]:
        short = ShortRun(self._job, self._captured, self._seed, FINAL_S)
        measured: dict[str, float] = {}
        failed: dict[str, str] = {}
        for turn in range(ROUNDS):
            for i, (name, one) in enumerate(finalists):
                if name in failed:
                    continue
                self._tell(f"Running plan {i + 1} of {len(finalists)}, {name}, round {turn + 1} of {ROUNDS} ...")
                try:
                    prove(one.priced.plan)
                    took_s = short.batch_s(one.priced.plan, one.batch_s)
                    measured[name] = min(measured.get(name, float("inf")), took_s)
                except RoundelayError as error:
                    failed[name] = str(error)
        run = [Final(name, one, measured.get(name), failed.get(name, "")) for name, one in finalists]
        return sorted(run, key=lambda final: final.tried.batches * (final.measured_s or float("inf")))

    def _first_planned(self, wanted: Sequence[Tried], profiles: Mapping[str, MachineProfile]) -> tuple[Tried, Planned]:
        """The first that is planned: of one that holds more than was predicted the next is taken."""
        for one in wanted[:-1]:
            try:
                return one, self._planned(one, profiles)
            except PlanError:
                if self._given.memory_limit is None and self._machine.cluster is None:
                    raise
        return wanted[-1], self._planned(wanted[-1], profiles)

    def _planned(self, chosen: Tried, profiles: Mapping[str, MachineProfile]) -> Planned:
        cuts = inherited(chosen.priced.plan, Choices()).cuts  # as they were run; elsewhere a mesh's boxings stand there
        own = replace(chosen.choices, memory_limit=self._given.memory_limit, cuts=cuts or chosen.choices.cuts)
        if self._machine.cluster is not None:
            own = replace(own, cluster=self._machine.cluster.as_in(chosen.priced.plan))
        made = plan_with_reasons(self._job, own, seed=self._seed, captured=self._captured, tell=self._show_wait)
        profile, known = profiles.get(made.plan.transport), chosen.priced.plan.stages
        updated = [replace(one, update_s=own.update_s) for one, own in zip(made.plan.stages, known, strict=True)]
        plan = replace(made.plan, stages=tuple(updated))  # the job's own optimizer's seconds, not those of a stand-in
        return replace(made, plan=plan if profile is None else with_costs(plan, profile))


def busy_notices(facts: ModelFacts) -> tuple[str, ...]:
    """What to say of operations that took much longer with more threads than with fewer; nothing if none did."""
    times = facts.seconds
    fewest, slowest = min(times), max(times, key=lambda count: times[count])
    if slowest == fewest or times[slowest] < max(SLOWED * times[fewest], LEAST_S):
        return ()
    folder = cache_folder()
    remedy = "search again" if folder is None else f"delete {folder / 'profiles'} and search again"
    longer = f"{slowest} threads took {times[slowest] / times[fewest]:.2g} times as long as {fewest}"
    return (f"operations were measured while others used the cores, it seems: {longer}; {remedy} when they are idle",)


def _winner(run: Sequence[Final]) -> Tried | None:
    """The best by prediction of those that are as good as the fastest by measurement; None if none could be run."""
    costs = {i: final.tried.batches * final.measured_s for i, final in enumerate(run) if final.measured_s is not None}
    alike = [run[i].tried for i, cost in costs.items() if cost <= TIE * min(costs.values())]
    return min(alike, key=lambda one: one.cost_s, default=None)


def _maybe(task: Task, choices: Choices) -> Tried | None:
    """What a family's plan takes, if it is one of this model."""
    try:
        return tried(task, choices)
    except RoundelayError:
        return None


def _finalists(found: Found, finals: int) -> list[tuple[str, Tried]]:
    """So many of the best, and the best of each family that is not predicted to be far behind."""
    if not finals:
        return []
    wanted = [(f"best {i + 1}", one) for i, one in enumerate(found.best[:finals])]
    near_s = FAR * found.best[0].cost_s
    wanted += [(name, one) for name, one in found.families.items() if one.cost_s < near_s or name == ALONE]
    plans: dict[object, tuple[str, Tried]] = {}
    for name, one in wanted:
        plans.setdefault(one.priced.plan, (name, one))
    return [one for i, one in enumerate(plans.values()) if i < finals + MOST_FAMILIES or one[0] == ALONE]
