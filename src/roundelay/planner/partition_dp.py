"""Cut a graph into D stages so that the slowest one, messages included, is as fast as possible.

A piece is what lies between two neighbouring boundaries, that is, legal cuts. Since the cost of a stage depends only on
its own two ends (:mod:`roundelay.planner.cost_model`), dynamic programming is exact: ``best[d][j]``, the smallest
possible time of the slowest of d stages that cover the first j pieces, is the minimum over i of
``max(best[d - 1][i], stage_s(i, j))``. That is O(D·C²) pairs for C legal cuts, fewer in practice: stages whose
computation alone is slower than a cut that is already known are skipped.

Where workers differ, the programme also chooses which :class:`Holders` have which stage: a stage takes its computation
over their speed, and messages what the link to the neighbour takes. A state is then a boundary, how many holders of
each kind are left, and whether the next stage is on another node; it goes from the first stage to the last, so the
tapes in flight are known, and stages that do not fit a memory are left out. That is exact, too.

Cuts whose slowest stage is within 2 % of the best are considered equally good, as costs are no better known than that.
Among them, a second programme over the same pairs takes the one with the fewest bytes over all edges, then the fastest,
then the one whose last cut comes first. :func:`staggered_cuts` allows 10 %, and takes the fewest bytes of activations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise, product
from typing import Final, final

from roundelay.errors import CaptureError
from roundelay.ir.graph import Graph, Op
from roundelay.planner.cluster import ClusterWorker
from roundelay.planner.cost_model import Cuts, Seat, StageCosts, boundaries_of
from roundelay.planner.kept_bytes import KeptBytes
from roundelay.schedules import holders_of

TIE = 0.02
"""Cuts whose slowest stage is within this share of the best are equally good."""

SLOWER = 0.1
"""By which share of the best :func:`staggered_cuts` may make the slowest stage slower."""

MOST_STATES = 512
"""Of so many ways to leave holders the order is searched; where there are more, the fastest come first."""

MORE: Final = (1.05, 1.1, 1.2, 1.35, 1.6, 2.0, 3.0, 5.0)
"""How many times as much memory is tried where nothing fits."""

CROSSING = 1 << 60
"""Price of an edge between two nodes: more than that of any bytes."""

StagePrice = Callable[[int, int, int], int]
"""From the number of a stage and where it starts and stops to its price, or its bytes."""

_StagesByEnd = list[list[tuple[int, float]]]
"""For every boundary j, by index: (i, seconds) of the candidate stages from boundary i to j."""


@dataclass(frozen=True, slots=True)
class Holders:
    """Alike groups of workers, each of which may hold a stage.

    Args:
        groups: the workers of each.
        speed: of the slowest one.
        memory: bytes that each worker may hold.
        nodes: of the workers of a group, where links between nodes are others.
    """

    groups: tuple[tuple[ClusterWorker, ...], ...]
    speed: float = 1.0
    memory: float = math.inf
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Seats:
    """What stages may be held by.

    Args:
        kinds: of holders, the fastest first.
        order: for each stage the number of its kind, where that is given; else it is chosen.
        held: bytes that a worker holds of a stage; None where no memory is limited.
        between: as :class:`~roundelay.planner.cost_model.CostParameters` has it.
    """

    kinds: tuple[Holders, ...]
    order: tuple[int, ...] = ()
    held: StagePrice | None = None
    between: tuple[float, float] | None = None

    def fastest(self, num_stages: int) -> tuple[int, ...]:
        """The kinds of the stages, as given, or of the fastest holders."""
        return self.order or tuple([i for i, kind in enumerate(self.kinds) for _ in kind.groups][:num_stages])

    def following(self, state: _State, stage: int, *, last: bool) -> Iterator[tuple[int, _State]]:
        """The kinds that may hold the next stage, each with the states that follow."""
        left, before, away = state
        for i, kind in enumerate(self.kinds):
            if (i != self.order[stage] if self.order else not left[i]) or (stage and (kind.nodes != before) != away):
                continue
            rest = left if self.order else (*left[:i], left[i] - 1, *left[i + 1 :])
            elsewhere = not last and any(other.nodes != kind.nodes for other in self.kinds)
            for out in (False, True) if elsewhere else (False,):
                yield i, (rest, kind.nodes, out)

    def of_stages(self, order: Sequence[int]) -> tuple[Seat, ...]:
        """The seats of stages that are held by these kinds."""
        held = [self.kinds[i] for i in order]
        away = [False, *(one.nodes != other.nodes for one, other in pairwise(held)), False]
        return tuple([(kind.speed, own) for kind, own in zip(held, pairwise(away), strict=True)])


_State = tuple[tuple[int, ...], tuple[str, ...], bool]
"""How many holders of each kind are left, the nodes of the last stage's, and whether the next stage is elsewhere."""


def best_cuts(costs: StageCosts, num_stages: int, seats: Seats | None = None) -> tuple[Cuts, tuple[int, ...]]:
    """Return the cuts with the fastest slowest stage, and for each stage the kind that has it.

    Args:
        costs: costs of all stages.
        num_stages: D.
        seats: D or more; None: all alike. Where nothing fits their memory, what lacks least of it is taken.

    Raises:
        CaptureError: there are fewer than D pieces.
    """
    return _cheapest(costs, num_stages, 1.0 + TIE, lambda _, start, stop: costs.bytes_in(start, stop), seats)


def staggered_cuts(costs: StageCosts, kept: KeptBytes, num_stages: int, micro_batches: int) -> Cuts:
    """Return the cuts with the fewest bytes of activations at one time, where N micro-batches start one after another.

    Each starts 2S/N time steps after the one before, and a batch takes 2S steps (Cyclic Data Parallelism, Sect. 3.2):
    stage k, from 0, keeps a micro-batch's activations from step k to step 2S - 1 - k, so those of ceil(N (S - k) / S)
    micro-batches at most, which, if S divides N, is their number in every step. The sum over the stages is minimised.
    A step is as long as the slowest stage, which may be 10 % slower than that of the fastest cuts: else all operations
    would best be in the last stage.

    Args:
        costs: costs of all stages.
        kept: bytes of all stages.
        num_stages: S.
        micro_batches: N.

    Raises:
        CaptureError: there are fewer than S pieces.
    """
    held = [holders_of(k, num_stages, micro_batches) for k in range(num_stages)]
    cuts, _ = _cheapest(costs, num_stages, 1.0 + SLOWER, lambda k, *ends: held[k] * kept.of_stage(*ends))
    return cuts


def flops_cuts(graph: Graph, num_stages: int) -> Cuts:
    """Return the cuts nearest to equal FLOPs in every stage (Cyclic Data Parallelism, Sect. 5).

    Raises:
        CaptureError: there are fewer than D pieces.
    """
    work = (*accumulate((float(op.flops) for op in graph.ops), initial=0.0), float(sum(op.flops for op in graph.ops)))
    between = _between_layers(graph)
    boundaries = between if len(between) > num_stages else boundaries_of(graph)
    return nearest_cuts(boundaries, work, num_stages)


def _between_layers(graph: Graph) -> Cuts:
    """One boundary between any two neighbouring operations that have FLOPs: the nearest to where their layers meet."""
    boundaries, between = boundaries_of(graph), [0]
    heavy = [i for i, op in enumerate(graph.ops) if op.flops]
    for first, second in pairwise(heavy):
        legal = [boundary for boundary in boundaries if first < boundary <= second]
        distances = [abs(boundary - _meeting(graph, first, second)) for boundary in legal]
        between += [legal[distances.index(min(distances))]] if legal else []
    return (*between, boundaries[-1])


def _meeting(graph: Graph, first: int, second: int) -> int:
    """Where the layers of two operations meet: at the operation with which that of the second begins.

    An operation without FLOPs, such as a bias, a norm or an activation, counts with that one of the two whose module
    has more of its path in common, and rather with the first.
    """
    ops = graph.ops
    return 1 + max(i for i in range(first, second) if _alike(ops[i], ops[first]) >= _alike(ops[i], ops[second]))


def _alike(one: Op, other: Op) -> int:
    """How many parts the paths of two operations' modules have in common, from the outermost on."""
    pairs = list(zip(one.module.split("."), other.module.split("."), strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def equal_cuts(graph: Graph, num_stages: int) -> Cuts:
    """Return the cuts nearest to equal numbers of operations in every stage.

    Raises:
        CaptureError: there are fewer than D pieces.
    """
    end = len(graph.ops) + 1
    return nearest_cuts(boundaries_of(graph), (*map(float, range(end)), end - 1.0), num_stages)


def nearest_cuts(boundaries: Sequence[int], amount: Sequence[float], num_stages: int) -> Cuts:
    """Return the cuts nearest to equal parts of a cumulative amount, chosen from left to right.

    Every stage has at least one piece.

    Args:
        boundaries: where stages may begin and end.
        amount: entry i is the amount before operation i, for i from 0 to n + 1.
        num_stages: D.

    Raises:
        CaptureError: there are fewer than D pieces.
    """
    pieces = len(boundaries) - 1
    if pieces < num_stages:
        raise CaptureError(
            f"a cut into {num_stages} stages",
            got=f"a model of {pieces} pieces: {boundaries[-1] - 1} operations, {pieces - 1} places to cut",
            expected=f"at least {num_stages} pieces",
            remedy=f"Cut into at most {pieces} stages, or give a model of more operations.",
        )
    chosen = [0]
    for k in range(1, num_stages):
        ideal = amount[boundaries[-1]] * k / num_stages
        free = range(chosen[-1] + 1, pieces - (num_stages - k) + 1)
        chosen.append(min(free, key=lambda i: abs(amount[boundaries[i]] - ideal)))
    return (*(boundaries[i] for i in chosen), boundaries[-1])


def names_of(graph: Graph, cuts: Cuts) -> tuple[str, ...]:
    """Return the names of the operations that end each stage, the graph's last operation included."""
    return tuple(graph.ops[min(stop, len(graph.ops)) - 1].name for stop in cuts[1:])


def _cheapest(
    costs: StageCosts, num_stages: int, margin: float, price: StagePrice, given: Seats | None = None
) -> tuple[Cuts, tuple[int, ...]]:
    """The cuts with the lowest price among those whose slowest stage takes at most ``margin`` times the best."""
    seats = given or Seats((Holders(((),) * num_stages),))
    fixed = replace(seats, order=seats.fastest(num_stages))
    seats = fixed if math.prod([len(kind.groups) + 1 for kind in seats.kinds]) > MOST_STATES else seats
    slowest: Seat = min([seats.kinds[i].speed for i in fixed.order]), (True, True)
    loose = costs.slowest_s(nearest_cuts(costs.boundaries, costs.work, num_stages), [slowest] * num_stages) * margin
    known = _Programme(costs, num_stages, fixed, loose).least(math.inf)[0] * margin
    tries = product((seats, *_with_more_memory(seats), replace(seats, held=None)), (known, math.inf))
    found = ((one, one.least(math.inf)) for one in (_Programme(costs, num_stages, *each) for each in tries))
    programme, (slowest_s, *_) = next(pair for pair in found if pair[1][0] < math.inf)
    return programme.least(slowest_s * margin, price)[1:]


def _with_more_memory(seats: Seats) -> Iterator[Seats]:
    """The same with more and more memory, if it is limited: where nothing fits, what lacks least is best."""
    for more in MORE if seats.held else ():
        yield replace(seats, kinds=tuple([replace(kind, memory=more * kind.memory) for kind in seats.kinds]))


_Value = tuple[float, float, int, int, _State]
"""The price of the stages up to a boundary, the slowest one's seconds, where the last one starts, its kind, and the
state before it."""


@final
class _Programme:
    """The dynamic programme over all stages that are no slower than a bound."""

    def __init__(self, costs: StageCosts, num_stages: int, seats: Seats, bound: float) -> None:
        self._costs, self._num_stages, self._seats, self._bound = costs, num_stages, seats, bound
        self._stages = cache(self._stages_by_end)

    def least(self, limit: float, price: StagePrice | None = None) -> tuple[float, Cuts, tuple[int, ...]]:
        """The fewest crossings, the lowest price, then the fastest, where no stage is slower than ``limit``.

        Returns the slowest stage's seconds, infinite where there is none, the cuts and the kinds.
        """
        start: _State = tuple([len(kind.groups) for kind in self._seats.kinds]), (), False
        none: _Value = (math.inf, math.inf, 0, 0, start)
        unknown = [none] * (len(self._costs.boundaries) - 1)
        layers: list[dict[_State, list[_Value]]] = [{start: [(0, 0.0, 0, 0, start), *unknown]}]
        for k in range(self._num_stages):
            layers.append({})
            for state, values in layers[-2].items():
                for kind, after in self._seats.following(state, k, last=k == self._num_stages - 1):
                    ends = layers[-1].setdefault(after, [none, *unknown])
                    for j, value in self._reached(values, (k, kind, state, after[2]), limit, price):
                        ends[j] = min(ends[j], value)
        best, state = min([(values[-1], state) for state, values in layers[-1].items()], default=(none, start))
        return best[1], *(self._traced(layers, state) if best[1] < math.inf else ((), ()))

    def _reached(
        self, values: Sequence[_Value], step: tuple[int, int, _State, bool], limit: float, price: StagePrice | None
    ) -> Iterator[tuple[int, _Value]]:
        """Where a stage on holders of one kind ends that starts where the stages before it end."""
        k, kind, state, away = step
        at, held, own = self._costs.boundaries, self._seats.held, self._seats.kinds[kind]
        for j, ending in enumerate(self._stages((own.speed, (state[2], away)))):
            for i, seconds in ending:
                spent, slowest, *_ = values[i]
                if seconds > limit or slowest == math.inf or (held and held(k, at[i], at[j]) > own.memory):
                    continue
                cost = 0 if price is None else price(k, at[i], at[j]) + CROSSING * state[2]
                yield j, (spent + cost, max(slowest, seconds), i, kind, state)

    def _traced(self, layers: Sequence[dict[_State, list[_Value]]], state: _State) -> tuple[Cuts, tuple[int, ...]]:
        """The cuts and kinds that lead to the last boundary and a state."""
        chosen, kinds = [len(self._costs.boundaries) - 1], list[int]()
        for layer in reversed(layers[1:]):
            *_, i, kind, state = layer[state][chosen[-1]]
            chosen.append(i)
            kinds.append(kind)
        return tuple([self._costs.boundaries[i] for i in reversed(chosen)]), tuple(reversed(kinds))

    def _stages_by_end(self, seat: Seat) -> _StagesByEnd:
        """All stages no slower than the bound between feasible boundaries."""
        at, feasible = self._costs.boundaries, _feasible(self._costs, self._num_stages, self._seats, self._bound)
        stages: _StagesByEnd = [[] for _ in at]
        for n, j in enumerate(feasible):
            for i in reversed(feasible[:n]):
                if self._costs.compute_s(at[i], at[j]) / seat[0] > self._bound:
                    break
                seconds = self._costs.stage_s(at[i], at[j], seat)
                if seconds <= self._bound:
                    stages[j].append((i, seconds))
        return stages


def _feasible(costs: StageCosts, num_stages: int, seats: Seats, bound: float) -> list[int]:
    """Return the indices of boundaries where some cut fits within ``bound``, counting computation only.

    For some k, all work before the boundary fits into k stages, and all work after it into the remaining ones.
    """
    work, last, most = costs.work, len(costs.boundaries) - 1, bound * (1.0 + 1e-9)
    speeds = sorted([seats.kinds[i].speed for i in seats.fastest(num_stages)], reverse=True)
    done, powers = [work[boundary] for boundary in costs.boundaries], [*accumulate(speeds, initial=0.0)]
    inner = [
        i
        for i in range(1, last)
        if any(done[last] - powers[num_stages - k] * most <= done[i] <= powers[k] * most for k in range(1, num_stages))
    ]
    return [0, *inner, last]


def slots(source: int, target: int) -> int:
    """Return the slots of an edge: one for each stage that it skips, one being read and one arriving."""
    return target - source + 1
