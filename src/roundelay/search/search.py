"""The best plans of a space by the simulator: those with the least bounds first. No torch is needed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from roundelay.errors import PlanError, RoundelayError
from roundelay.ir.num_bytes import bytes_text
from roundelay.ir.plan import Plan
from roundelay.planner.machine_profile import MachineProfile
from roundelay.planner.memory_model import estimate_memory, limits_of
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_options import Choices
from roundelay.planner.price import Priced, priced
from roundelay.planner.source import Hardware
from roundelay.search.bounds import Bounds
from roundelay.search.space import family

KEPT = 10
"""The best that are told of."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is searched for.

    Args:
        facts: of the model.
        machine: where it will run.
        workers: that there are.
        memory: bytes that a worker may hold by prediction; None for any number.
        profiles: of the machine, by transport.
        needs: how many times as many batches as the others a rule needs to get as far; by default as many.
    """

    facts: ModelFacts
    machine: Hardware
    workers: int
    memory: int | None = None
    profiles: Mapping[str, MachineProfile] = field(default_factory=dict, hash=False)
    needs: Mapping[str, float] = field(default_factory=dict, hash=False)

    def batches(self, choices: Choices) -> float:
        """How many batches of these choices do what one does."""
        return self.needs.get(choices.rule or "", 1.0)

    def limits(self, plan: Plan) -> list[float]:
        """Bytes that each worker of a plan may hold."""
        return limits_of(plan, math.inf if self.memory is None else self.memory, self.machine.cluster)

    @property
    def is_limited(self) -> bool:
        """Whether some worker may hold so many bytes only."""
        own = [] if self.machine.cluster is None else self.machine.cluster.workers
        return self.memory is not None or any(worker.memory < math.inf for worker in own)


@dataclass(frozen=True, slots=True)
class Tried:
    """Choices with their plan and its prices.

    Args:
        choices: complete.
        priced: the plan, with seconds.
        memory: bytes of the worker that would hold most; None where the optimizer does not tell.
        lacking: bytes that a worker would hold beyond its limit, at most; 0 where all fit.
        batches: how many of its batches do what one of the given rule does.
    """

    choices: Choices
    priced: Priced
    memory: int | None
    lacking: float = 0.0
    batches: float = 1.0

    @property
    def batch_s(self) -> float:
        """Predicted seconds of a batch."""
        return self.priced.batch_s

    @property
    def cost_s(self) -> float:
        """Predicted seconds of as many batches as do what one does: by these plans are compared."""
        return self.batches * self.batch_s


Tell = Callable[[int, int, Tried | None], None]
"""Called with how many were simulated, the size of the space, and the best so far."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search found.

    Args:
        best: the best, the first before all others: what is not among them takes longer.
        families: the best of each family, by its name, the fastest first.
        points: size of the space.
        simulated: how many of it were simulated; all others are bounded by what they compute.
        refused: why others are no plans of this model, by how many.
        bound_s: seconds (:attr:`Tried.cost_s`) that no plan of the space undercuts, wherever it is cut; layouts have no
            bound.
    """

    best: tuple[Tried, ...]
    families: Mapping[str, Tried] = field(hash=False)
    points: int
    simulated: int
    refused: Mapping[str, int] = field(hash=False)
    bound_s: float

    @property
    def gap(self) -> float:
        """By how much of its seconds the best could be undercut at most, by a plan that is cut elsewhere too."""
        best_s = self.best[0].cost_s
        return max(0.0, best_s - self.bound_s) / best_s if best_s else 0.0


def search(task: Task, points: Sequence[Choices], kept: int = KEPT, tell: Tell = lambda *_: None) -> Found:
    """The best choices of a space.

    Args:
        task: the model and where it will run.
        points: the space.
        kept: how many of the best are wanted.
        tell: called before each simulation.

    Raises:
        PlanError: none of them is a plan of this model, or all would hold too much.
    """
    if task.is_limited and task.facts.state_bytes is None:
        raise PlanError(
            "--memory-limit",
            got="an optimizer whose state is not known before its first step",
            expected="one that can step on tensors without memory, as those of torch.optim can",
            remedy="Leave --memory-limit out.",
        )
    bounds = Bounds(task.facts, task.machine)
    ordered = sorted(((task.batches(point) * bounds.least_s(point), i) for i, point in enumerate(points)))
    best: list[Tried] = []
    families: dict[str, Tried] = {}
    refused: Counter[str] = Counter()
    smallest: Tried | None = None
    count = 0
    for least_s, i in ordered:
        own = families.get(family(points[i]))
        if len(best) == kept and least_s >= best[-1].cost_s and own is not None and least_s >= own.cost_s:
            continue
        tell(count, len(points), best[0] if best else None)
        count += 1
        try:
            one = tried(task, points[i])
        except RoundelayError as error:
            refused[_why(error)] += 1
            continue
        if one.lacking > 0:
            smallest = one if smallest is None or one.lacking < smallest.lacking else smallest
            continue
        best = sorted([*best, one], key=lambda each: each.cost_s)[:kept]
        if own is None or one.cost_s < own.cost_s:
            families[family(one.choices)] = one
    if not best:
        raise _nothing(task, refused, smallest)
    fastest = dict(sorted(families.items(), key=lambda pair: pair[1].cost_s))
    bound_s = min((least_s for least_s, _ in ordered if least_s), default=0.0)
    return Found(tuple(best), fastest, len(points), count, dict(refused), bound_s)


def tried(task: Task, choices: Choices) -> Tried:
    """Choices priced.

    Raises:
        PlanError: they cannot be combined, or not for this model.
        CaptureError: the model cannot be cut into so many stages.
    """
    made = priced(task.facts, choices, task.machine, task.profiles.get(choices.transport or "memory"))
    if (count := made.plan.num_workers) > task.workers:
        raise PlanError("workers of the plan", got=str(count), expected=f"at most {task.workers}", remedy="Give more.")
    if not task.is_limited or made.state_bytes is None:
        return Tried(choices, made, None, batches=task.batches(choices))
    totals = [own.total for own in estimate_memory(made.plan, made.state_bytes, made.again_bytes)]
    beyond = [total - limit for total, limit in zip(totals, task.limits(made.plan), strict=True)]
    return Tried(choices, made, max(totals), max(0.0, *beyond), task.batches(choices))


def _why(error: RoundelayError) -> str:
    return f"{error.subject}: {error.got}"


def _nothing(task: Task, refused: Mapping[str, int], smallest: Tried | None) -> PlanError:
    if smallest is None or smallest.memory is None:
        why = "; ".join(f"{count} times {text}" for text, count in list(refused.items())[:3])
        return PlanError(
            "the search",
            got=why or "no choices that contain what is given",
            expected="a plan of this model",
            remedy="Give less of it, or more --workers.",
        )
    limits = dict.fromkeys([bytes_text(own) for own in task.limits(smallest.priced.plan) if own < math.inf])
    lacking = bytes_text(smallest.lacking)
    return PlanError(
        "the search",
        got=f"no plan that fits: the smallest holds {bytes_text(smallest.memory)} on a worker",
        expected=f"at most {' or '.join(limits)} on each, by "
        + ("--memory-limit" if task.machine.cluster is None else "the cluster file"),
        remedy=f"Smallest fix: {lacking} more on each worker; then {shown(smallest.choices)} fits.",
    )


def shown(choices: Choices) -> str:
    """Choices as options of the command line, but for those that say what is so by default."""
    words = []
    for name, value in choices.given().items():
        if value in (False, 0.0, ()) and name != "zero":
            continue
        option = "--" + name.replace("_", "-")
        words.append(option if value is True else f"{option} {value}")
    return " ".join(words)
