"""Checks of the search on random models, clusters and graphs: few of them are tests, all of them the long form."""

from __future__ import annotations

import random
import time
from typing import NamedTuple

from roundelay.errors import PlanError, RoundelayError
from roundelay.ir.device_names import CPU
from roundelay.planner.machine_profile import MachineProfile
from roundelay.planner.plan_options import Choices
from roundelay.search.baselines import baselines
from roundelay.search.search import Task, Tried, search, shown, tried
from roundelay.search.signatures.boxing_prices import Link
from roundelay.search.signatures.problem import Machine, problem
from roundelay.search.signatures.searched import signatures_on
from roundelay.search.signatures.tables import Tables, solve
from roundelay.search.space import space
from tests.search.integer_program import least_s
from tests.search.small_graphs import Drawn, brute_force
from tests.search.small_models import DrawnModel, drawn_hardware, drawn_profile

SAME = 1 + 1e-9
MESHES = {"a": 2}, {"a": 2, "b": 2}, {"a": 4}


class Found(NamedTuple):
    """What came of a check; no complaint means that it holds."""

    what: str
    complaint: str = ""


def no_expert_is_faster(seed: int, most_workers: int = 8) -> Found:
    """A random model and cluster: none of the baselines, which are no candidates, is faster than what is found."""
    chance = random.Random(seed)
    workers, drawn, machine = chance.randint(2, most_workers), DrawnModel(chance), drawn_hardware(chance)
    threads = {machine.threads_each((CPU,) * count) for count in range(1, workers + 1)}
    facts = drawn.facts(tuple(threads))
    profiles: dict[str, MachineProfile] = {}
    if chance.random() < 0.8:
        profiles = {name: drawn_profile(chance, name) for name in ("memory", "shm")}
    free = Task(facts, machine, workers, 1 << 60, profiles)
    experts = {name: one for name, own in baselines(Choices(), machine, workers).items() if (one := _tried(free, own))}
    sizes = sorted(one.memory or 0 for one in experts.values())
    limit = chance.choice((1 << 60, sizes[0] * 4 // 5, chance.choice(sizes), sizes[-1] - 1))
    points = space(Choices(), facts, machine, workers)
    what = f"{workers} workers, {len(facts.graph.ops)} operations, {len(points)} plans, {len(experts)} baselines"
    if {one.choices for one in experts.values()} & {*points}:
        return Found(what, "a baseline is a candidate")
    fit = {name: one for name, one in experts.items() if (one.memory or 0) <= limit}
    try:
        best = search(Task(facts, machine, workers, limit, profiles), points).best[0]
    except PlanError as error:
        return Found(f"{what}, nothing fits", f"{error}, but {', '.join(fit)} fit" if fit else "")
    faster = [name for name, one in fit.items() if one.batch_s * SAME < best.batch_s]
    told = f"{', '.join(faster)} faster than {shown(best.choices)}" if faster else ""
    return Found(f"{what}, of which {len(fit)} fit: {best.priced.plan.arrangement}", told)


def _tried(task: Task, choices: Choices) -> Tried | None:
    try:
        return tried(task, choices)
    except RoundelayError:
        return None


def signatures_are_the_best(seed: int, most: int = 40_000) -> Found | None:
    """A random graph on a mesh: brute force and an integer program find as many seconds; None if it is too large."""
    mesh = MESHES[seed % 3]
    drawn = Drawn(seed, 2 + seed % (5 if len(mesh) == 1 else 2))
    facts, profile, links = drawn.facts(), drawn.profile(), dict.fromkeys(mesh, Link(0.0, 1.0))
    brute = brute_force(facts, profile, mesh, most)
    if brute is None:
        return None
    own = signatures_on(facts, mesh, links, profile).seconds
    program = least_s(problem(facts, Machine(mesh, links, profile)).tables)
    what = f"{len(facts.ops)} operations on {mesh}: {own:.6g} s"
    alike = program is not None and max(own, brute, program) < (1 + 1e-6) * min(own, brute, program)
    return Found(what, "" if alike else f"brute force {brute}, integer program {program}")


def tables_are_solved(tables: Tables, limit: float | None = None) -> Found:
    """HiGHS finds as many seconds as we, where it ends; with the time of both."""
    began = time.perf_counter()
    own = solve(tables, limit)
    between = time.perf_counter()
    program = least_s(tables, limit)
    times = f"ours {between - began:.3f} s, HiGHS {time.perf_counter() - between:.3f} s"
    pairs = sum(one.seconds.size for one in tables.pairs.values())
    what = f"{len(tables.own)} variables, {sum(one.seconds.size for one in tables.own)} values, {pairs} pairs: {times}"
    if program is None:
        return Found(f"{what} (not ended)")
    alike = own.bound_s <= (1 + 1e-6) * program and program <= (1 + 1e-6) * own.seconds
    alike = alike and (own.seconds > own.bound_s or own.seconds <= (1 + 1e-6) * program)
    gap = f", gap {1 - own.bound_s / own.seconds:.2%}" if own.bound_s < own.seconds else ""
    return Found(what + gap, "" if alike else f"ours {own.seconds}, HiGHS {program}")
