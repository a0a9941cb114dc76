"""Stages of a pipeline on whole hosts: how many layers and hosts each has, rows of a micro-batch, and signatures.

A batch takes M - 1 times the slowest stage's seconds for a micro-batch, and those of all stages (1F1B; PipeDream-2BW,
Narayanan and others, 2021, Sect. 3). What a stage takes is bounded by what it computes until the best choice of stages
uses it; then its signatures are searched, over bits, under the limit on memory. Where the best choice uses no stage
that is only bounded, nothing in the space is better. Layers of a stage are computed alike; a stage keeps results of as
many micro-batches as there are stages from it to the end.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from roundelay.errors import PlanError
from roundelay.ir.graph import Profile
from roundelay.planner.mesh_signatures import MeshFacts
from roundelay.search.signatures.boxing_prices import Link, Table
from roundelay.search.signatures.problem import Machine, problem
from roundelay.search.signatures.quotient import Bits
from roundelay.search.signatures.tables import LESS, Priced, Tables, least_memory, solve

PARTS = "first", "layers", "last layer", "end"
"""Of a model: what is before its layers; these but for the last one; the last; what is behind them."""

MOST_WORKERS = 128
"""Of a stage."""

SECONDS = 0.5
"""For branch and bound of a stage."""


@dataclass(frozen=True, slots=True)
class Layered:
    """A model of equal layers, declared by two of them.

    Args:
        facts: by rows of a micro-batch: of the model with two layers.
        profile: of these facts, seconds of operations.
        parts: by name of an operation to which of PARTS it belongs.
        layers: that there are.
        boundary: bytes of what a layer gives to the next one, of a row.
    """

    facts: Callable[[int], MeshFacts]
    profile: Callable[[MeshFacts], Profile]
    parts: Mapping[str, str] = field(hash=False)
    layers: int
    boundary: float


@dataclass(frozen=True, slots=True)
class Hosts:
    """Equal hosts.

    Args:
        count: of hosts.
        workers: of each, a power of two.
        inside: links between the workers of a host.
        between: links between hosts, of each worker.
        memory: bytes that a worker may hold; None for any number.
    """

    count: int
    workers: int
    inside: Link
    between: Link
    memory: int | None = None


class Stage(NamedTuple):
    """One stage: its layers and hosts, seconds of a micro-batch and what they cannot be less than, a worker's bytes."""

    layers: int
    hosts: int
    seconds: float
    bound_s: float
    memory: float


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What was found.

    Args:
        rows: of a micro-batch.
        micro_batches: of a batch.
        stages: in order.
        seconds: of a batch.
        bound_s: that no choice of the space undercuts.
        solved: stages of which the signatures were searched.
    """

    rows: int
    micro_batches: int
    stages: tuple[Stage, ...]
    seconds: float
    bound_s: float
    solved: int

    @property
    def gap(self) -> float:
        """By how much of its seconds at most it is not the best."""
        return (self.seconds - self.bound_s) / self.seconds


Key = tuple[int, int, int, bool, bool]
"""A stage: the logarithm of its hosts, layers, stages to the end, whether it is the first, the last."""


class _OfRows:
    """Stages for micro-batches of so many rows: bounds, and what is solved."""

    def __init__(self, model: Layered, hosts: Hosts, rows: int, micro_batches: int) -> None:
        self._model, self._hosts, self.rows, self.micro_batches = model, hosts, rows, micro_batches
        self._facts = model.facts(rows)
        self._profile = model.profile(self._facts)
        self.logs = range(min(hosts.count, max(1, MOST_WORKERS // hosts.workers)).bit_length())
        self.most = min(hosts.count, model.layers)
        self.solved: dict[Key, Stage] = {}
        self._tables: dict[int, list[tuple[Tables, Tables]]] = {}
        names = [op.name for op in self._facts.graph.ops] + ["loss"]
        both_s = np.add(self._profile.forward_s, self._profile.backward_s)
        of = {part: math.fsum(s for n, s in zip(names, both_s, strict=True) if self._part(n) == part) for part in PARTS}
        per_host = 1.0 / hosts.workers
        inner = np.array([of["layers"] * n for n in range(model.layers + 1)]) * per_host
        self.bounds: dict[tuple[bool, bool], Table] = {}
        for first in (False, True):
            for last in (False, True):
                ends_s = (of["first"] * first + of["end"] * last) * per_host
                each = np.array([(inner + ends_s) / 2**log + self._message_s(log, first) for log in self.logs])
                each[:, 0] = math.inf
                self.bounds[first, last] = np.repeat(each[None], self.most + 1, axis=0)

    def _part(self, name: str) -> str:
        return self._model.parts.get(name, PARTS[3])

    def _message_s(self, log: int, first: bool) -> float:
        """Of what comes from the stage before and of its gradient, each worker of this one has a part."""
        link, workers = self._hosts.between, self._hosts.workers << log
        num_bytes = self._model.boundary * self.rows
        return 0.0 if first else 2 * (link.latency_s + num_bytes / workers / link.bytes_per_s)

    def bound(self, key: Key) -> float:
        log, layers, to_end, first, last = key
        return float(self.bounds[first, last][to_end, log, layers])

    def solve(self, key: Key) -> None:
        """Search the signatures of a stage; no larger one, and none that keeps more, takes less."""
        log, layers, to_end, first, last = key
        if log not in self._tables:
            self._bound_all(log)
        rest_s = self._message_s(log, first)
        try:
            found = solve(self._of(log, layers, to_end, first, last), self._hosts.memory, SECONDS)
            seconds, bound_s = (own / self.micro_batches + rest_s for own in (found.seconds, found.bound_s))
            self.solved[key] = Stage(layers, 1 << log, seconds, bound_s, found.memory)
            self._raise(key, layers, bound_s - rest_s)
        except PlanError:
            self.solved[key] = Stage(layers, 1 << log, math.inf, math.inf, math.inf)
            self._raise(key, self._least_that_does_not_fit(key), math.inf)

    def _raise(self, key: Key, layers: int, bound_s: float) -> None:
        """Neither with so many layers or more, nor with what is at an end, nor keeping more, a stage takes less."""
        log, _, to_end, first, last = key
        for (other_first, other_last), table in self.bounds.items():
            if other_first >= first and other_last >= last:
                part = table[to_end:, log, layers:]
                np.maximum(part, bound_s + self._message_s(log, other_first), out=part)

    def _least_that_does_not_fit(self, key: Key) -> int:
        log, layers, to_end, first, last = key
        memory = math.inf if self._hosts.memory is None else self._hosts.memory
        return 1 + bisect_right(
            range(1, layers), memory, key=lambda n: least_memory(self._of(log, n, to_end, first, last))
        )

    def _bound_all(self, log: int) -> None:
        """The tables on so many hosts; of all layers without a limit, each stage's share of seconds is a bound."""
        bits = Bits(_classes(self._hosts.workers, log), full=True)
        links = {"host": self._hosts.inside, "hosts": self._hosts.between}
        machine = Machine(
            bits.mesh, {axis: links[name] for axis, (name, _) in bits.axes.items()}, self._profile, self.micro_batches
        )
        made: dict[Hashable, object] = {}
        names = [op.name for op in self._facts.ops]
        self._tables[log] = []
        for part in PARTS:
            times = {name: int(self._part(name) == part) for name in names}
            both = [
                problem(
                    self._facts, replace(machine, in_flight=kept), bits, variants=True, times=times, made=made
                ).tables
                for kept in (0, 1)
            ]
            self._tables[log].append((both[0], both[1]))
        for first, last in self.bounds:
            layers = self._model.layers
            free_s = solve(self._of(log, layers, 1, first, last)).seconds / self.micro_batches
            share_s = free_s * np.arange(layers + 1) / layers + self._message_s(log, first)
            table = self.bounds[first, last]
            table[:, log] = np.maximum(table[:, log], share_s)

    def _of(self, log: int, layers: int, in_flight: int, first: bool, last: bool) -> Tables:
        times = int(first), layers - 1, 1, int(last)
        kept = min(in_flight, self.micro_batches)
        return _sum(self._tables[log], times, kept)

    def best(self, below: float) -> tuple[float, list[Key]]:
        """The stages of the fewest seconds by what is known, if these are fewer than so many; else none."""
        every = np.unique(np.concatenate([table[np.isfinite(table)] for table in self.bounds.values()]))
        least = bisect_left(range(len(every)), True, key=lambda i: self._reaches(float(every[i])))
        rest = self.micro_batches - 1
        found: tuple[float, list[Key]] = (below, [])
        waiting = [(least, least)] if least < len(every) else []
        while waiting:  # between two slowest stages nothing takes less than the first of them and the sum at the second
            low, high = waiting.pop()
            total, keys = self._least_sum(every[high], found[0] - rest * every[low])
            if keys:
                found = min(found, (rest * max(map(self.bound, keys)) + total, keys), key=lambda one: one[0])
            if high == least:
                waiting.append((least + 1, int(np.searchsorted(every, found[0] / (rest + 1))) - 1))
            elif keys and rest * every[low] + total < found[0] * LESS:
                middle = (low + high) // 2
                waiting += [(middle + 1, high), (low, middle)]
            waiting = [(i, k) for i, k in waiting if i <= k and rest * every[i] < found[0]]
        return found

    def _reaches(self, slowest: float) -> bool:
        """Whether the hosts are enough for stages of which none takes longer."""
        before = np.where(np.arange(self._model.layers + 1) == 0, 0.0, math.inf)
        for to_end in range(1, self.most + 1):
            all_s, inner_s = (
                np.min(self._fewest(slowest, to_end, first)[:, None] + _shifted(before), axis=0)
                for first in (True, False)
            )
            if all_s[-1] <= self._hosts.count:
                return True
            before = np.where(inner_s < self._hosts.count, inner_s, math.inf)
            if not np.isfinite(before).any():
                return False
        return False

    def _fewest(self, slowest: float, to_end: int, first: bool) -> Table:
        """By layers the fewest hosts of a stage that takes no longer."""
        fits = self.bounds[first, to_end == 1][to_end] <= slowest
        return np.where(fits.any(axis=0), 2.0 ** fits.argmax(axis=0), math.inf)

    def _least_sum(self, slowest: float, below: float) -> tuple[float, list[Key]]:
        """The least sum of seconds of stages of which none takes longer, if it is less than so many."""
        layers, hosts = self._model.layers, self._hosts.count
        sums = np.full((layers + 1, hosts + 1), math.inf)
        sums[0, 0] = 0.0
        every, best = [sums], (below, 0, 0)
        for to_end in range(1, self.most + 1):
            last = to_end == 1
            for log, n in self._within(slowest, to_end, True, last):
                total = sums[layers - n, : hosts - (1 << log) + 1].min() + self.bound((log, n, to_end, True, last))
                best = min(best, (float(total), to_end, log * (layers + 1) + n))
            after = np.full_like(sums, math.inf)
            for log, n in self._within(slowest, to_end, False, last):
                to = after[n:, 1 << log :]
                own = self.bound((log, n, to_end, False, last))
                np.minimum(to, sums[: layers - n + 1, : hosts - (1 << log) + 1] + own, out=to)
            sums = np.where(after < best[0], after, math.inf)
            if not np.isfinite(sums).any():
                break
            every.append(sums)
        if not best[1]:
            return below, []
        log, n = divmod(best[2], layers + 1)
        return best[0], self._back(every, slowest, best[1], log, n)

    def _within(self, slowest: float, to_end: int, first: bool, last: bool) -> list[tuple[int, int]]:
        return [(int(log), int(n)) for log, n in np.argwhere(self.bounds[first, last][to_end] <= slowest)]

    def _back(self, every: Sequence[Table], slowest: float, to_end: int, log: int, n: int) -> list[Key]:
        """The stages of a least sum, the first one first."""
        keys: list[Key] = [(log, n, to_end, True, to_end == 1)]
        layers = self._model.layers - n
        hosts = int(every[to_end - 1][layers, : self._hosts.count - (1 << log) + 1].argmin())
        for left in range(to_end - 1, 0, -1):
            options = [
                (every[left - 1][layers - n, hosts - (1 << log)] + self.bound((log, n, left, False, left == 1)), log, n)
                for log, n in self._within(slowest, left, False, left == 1)
                if n <= layers and 1 << log <= hosts
            ]
            _, log, n = min(options)
            keys.append((log, n, left, False, left == 1))
            layers, hosts = layers - n, hosts - (1 << log)
        return keys


def _shifted(before: Table) -> Table:
    """By layers of a stage, and of it with those behind it, what is so by the layers behind it."""
    behind = np.arange(len(before)) - np.arange(len(before))[:, None]
    return np.where(behind >= 0, before[behind], math.inf)


def _classes(workers: int, log: int) -> dict[str, int]:
    every = {"host": workers.bit_length() - 1, "hosts": log}
    return {name: bits for name, bits in every.items() if bits} or {"host": 0}


def _sum(parts: Sequence[tuple[Tables, Tables]], times: Sequence[int], in_flight: int) -> Tables:
    """Tables of parts, each so many times, that keep results of so many micro-batches."""

    def of(each: Sequence[tuple[Priced, Priced]]) -> Priced:
        seconds = sum(n * without.seconds for n, (without, _) in zip(times, each, strict=True) if n)
        memory = sum(
            n * (without.memory + in_flight * (kept.memory - without.memory))
            for n, (without, kept) in zip(times, each, strict=True)
            if n
        )
        return Priced(np.asarray(seconds), np.asarray(memory))

    own = [of([(a.own[i], b.own[i]) for a, b in parts]) for i in range(len(parts[0][0].own))]
    pairs = {scope: of([(a.pairs[scope], b.pairs[scope]) for a, b in parts]) for scope in parts[0][0].pairs}
    return Tables(tuple(own), pairs)


def pipeline(model: Layered, hosts: Hosts, rows: int, tell: Callable[[str], None] = lambda _: None) -> Pipeline:
    """The stages and micro-batches of the fewest seconds for a batch.

    Args:
        model: of equal layers.
        hosts: where.
        rows: of a batch; those of a micro-batch are a power of two that divides it.
        tell: called with what is being done.

    Raises:
        PlanError: nothing fits into the memory.
    """
    sizes = [1 << i for i in range(rows.bit_length()) if rows % (1 << i) == 0]
    waiting = [(-math.inf, _OfRows(model, hosts, size, rows // size), list[Key]()) for size in sizes]
    every = [one for _, one, _ in waiting]
    best: tuple[float, _OfRows | None, list[Key]] = (math.inf, None, [])
    bound_s = math.inf
    while waiting:
        waiting.sort(key=lambda each: -each[0])
        bound_s, one, keys = waiting.pop()
        unknown = [key for key in keys if key not in one.solved]
        if bound_s >= best[0] * LESS or (keys and not unknown):
            break
        tell(f"micro-batches of {one.rows} rows: {bound_s:.6f} s or more; the best so far {best[0]:.6f} s")
        for key in unknown:
            one.solve(key)
        bound_s, keys = one.best(best[0])
        if keys:
            waiting.append((bound_s, one, keys))
        if keys and all(key in one.solved for key in keys):
            seconds = _batch_s([one.solved[key].seconds for key in keys], one.micro_batches)
            best = min(best, (seconds, one, keys), key=lambda each: each[0])
    if best[1] is None:
        raise PlanError(
            "the search over stages",
            got="no stages that fit into the memory",
            expected=f"at most {hosts.memory} bytes on a worker",
            remedy="Give more memory, or more hosts.",
        )
    stages = tuple([best[1].solved[key] for key in best[2]])
    solved = sum(len(one.solved) for one in every)
    return Pipeline(best[1].rows, best[1].micro_batches, stages, best[0], min(bound_s, best[0]), solved)


def _batch_s(each: Sequence[float], micro_batches: int) -> float:
    return (micro_batches - 1) * max(each) + math.fsum(each)
