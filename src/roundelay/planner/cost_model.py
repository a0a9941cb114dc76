"""What a stage costs: seconds of its operations, and of the messages it exchanges, for one micro-batch.

A stage is what lies between two boundaries, ``start`` and ``stop``: operations ``start`` to ``stop - 1``, where number
n is the loss. Its price depends on these two numbers alone, wherever its neighbours are cut. That is because of the
chain of readers (:mod:`roundelay.lower.dataflow`): a hop from operation a to operation b

- enters the stage if and only if ``a < start <= b < stop``, and
- leaves it if and only if ``start <= a < stop <= b``.

Which *other* stage a hop comes from or goes to does depend on the neighbours' cuts, and with it into how many messages
the same bytes are packed. Messages to several stages travel at the same time, over channels of their own, so their
bytes are added and their latency is waited for once: one latency for all that comes in forward, one for all that goes
out, one each for gradients. Skips and parameters that later stages use are priced as what they are, hops like others.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from roundelay.ir.graph import Graph, Op, Profile
from roundelay.lower.dataflow import batch_bytes, hops, share

Cuts = tuple[int, ...]
"""Boundaries of the stages: 0, then where each begins, then n + 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostParameters:
    """What a plan has settled before it is cut.

    Args:
        micro_batches: micro-batches of a full batch.
        latency_s: seconds of an empty message.
        bytes_per_s: of a link.
        again: numbers of the operations whose forward a backward runs again.
    """

    micro_batches: int
    latency_s: float
    bytes_per_s: float
    again: tuple[range, ...] = ()


@dataclass(frozen=True, slots=True)
class _Boundary:
    """The hops over one boundary.

    Args:
        targets: where they end, sorted.
        before: bytes there and back of the first so many of them, by target.
        sources: where they begin, sorted.
        until: bytes there and back of the first so many of them, by source.
        first_back: the first target from which a gradient comes back; n + 1 if none does.
        last_back: the last source to which a gradient comes back; -1 if none does.
    """

    targets: tuple[int, ...]
    before: tuple[int, ...]
    sources: tuple[int, ...]
    until: tuple[int, ...]
    first_back: int
    last_back: int


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The price of every stage.

    Args:
        boundaries: where stages may begin and end, from 0 to n + 1.
        work: at each number, the seconds of all operations before it.
        terms: of the plan.
        share: micro-batches of the sample, over all of which bytes are counted.
        _over: the hops over each inner boundary.
    """

    boundaries: Cuts
    work: tuple[float, ...]
    terms: CostParameters
    share: int
    _over: dict[int, _Boundary]

    def compute_s(self, start: int, stop: int) -> float:
        """Seconds of the operations, per micro-batch; updates count by the micro-batches of their batch."""
        return self.work[stop] - self.work[start]

    def bytes_in(self, start: int, stop: int) -> int:
        """Bytes that come in and whose gradients go out again, for all micro-batches of the sample."""
        over = self._over.get(start)
        return over.before[bisect_left(over.targets, stop)] if over else 0

    def bytes_out(self, start: int, stop: int) -> int:
        """Bytes that go out and whose gradients come in again, for all micro-batches of the sample."""
        over = self._over.get(stop)
        return over.until[-1] - over.until[bisect_left(over.sources, start)] if over else 0

    def communication_s(self, start: int, stop: int) -> float:
        """Seconds of messages, in and out, forward and back."""
        before, behind = self._over.get(start), self._over.get(stop)
        messages = 0
        if before is not None:
            messages += 1 + (before.first_back < stop)
        if behind is not None:
            messages += 1 + (behind.last_back >= start)
        num_bytes = self.bytes_in(start, stop) + self.bytes_out(start, stop)
        return self.terms.latency_s * messages + num_bytes / (self.share * self.terms.bytes_per_s)

    def stage_s(self, start: int, stop: int) -> float:
        """Seconds of a stage per micro-batch: computing and communicating."""
        return self.compute_s(start, stop) + self.communication_s(start, stop)

    def slowest_s(self, cuts: Cuts) -> float:
        """Seconds of the slowest of the stages between these boundaries, 0 and n + 1 included."""
        return max(self.stage_s(start, stop) for start, stop in pairwise(cuts))


def boundaries_of(graph: Graph) -> Cuts:
    """Where stages may begin and end: 0, behind every legal cut, and n + 1, behind the loss."""
    end = len(graph.ops)
    return (0, *(cut + 1 for cut in graph.cuts if cut + 1 < end), end + 1)


def stage_costs(graph: Graph, profile: Profile, terms: CostParameters) -> StageCosts:
    """The prices of a graph's stages.

    Args:
        graph: the logical graph.
        profile: seconds of its operations on one micro-batch.
        terms: of the plan.
    """
    parts = share(graph, terms.micro_batches)
    again = {i for part in terms.again for i in part}
    rows = zip(profile.forward_s, profile.backward_s, profile.update_s, strict=True)
    work = accumulate((f * (1 + (i in again)) + b + u / parts for i, (f, b, u) in enumerate(rows)), initial=0.0)
    boundaries = boundaries_of(graph)
    return StageCosts(boundaries, tuple(work), terms, parts, _over(graph, boundaries[1:-1], terms.micro_batches))


def _over(graph: Graph, inner: Sequence[int], micro_batches: int) -> dict[int, _Boundary]:
    """For every inner boundary, the hops over it."""
    live: dict[int, list[tuple[int, int, int, bool]]] = {boundary: [] for boundary in inner}
    for hop in hops(graph):
        num_bytes = batch_bytes(graph, hop.name, micro_batches) * (1 + hop.gradient)
        for boundary in inner[bisect_right(inner, hop.source) : bisect_right(inner, hop.target)]:
            live[boundary].append((hop.source, hop.target, num_bytes, hop.gradient))
    return {boundary: _boundary(crossing, len(graph.ops) + 1) for boundary, crossing in live.items()}


def _boundary(crossing: Sequence[tuple[int, int, int, bool]], end: int) -> _Boundary:
    by_target = sorted((target, num_bytes) for _, target, num_bytes, _ in crossing)
    by_source = sorted((source, num_bytes) for source, _, num_bytes, _ in crossing)
    return _Boundary(
        targets=tuple(target for target, _ in by_target),
        before=tuple(accumulate((num_bytes for _, num_bytes in by_target), initial=0)),
        sources=tuple(source for source, _ in by_source),
        until=tuple(accumulate((num_bytes for _, num_bytes in by_source), initial=0)),
        first_back=min((target for _, target, _, back in crossing if back), default=end),
        last_back=max((source for source, _, _, back in crossing if back), default=-1),
    )


FLOPS_PER_S = 4e10
BYTES_PER_S = 1e10
CALL_S = 4e-6
BACKWARD_RATIO = 2.0
"""A backward computes two products for each of the forward's."""


def touched_bytes(graph: Graph, op: Op) -> int:
    """Bytes that one forward of ``op`` reads and writes, on the sample, a whole batch."""
    values = sum(graph.values[name].num_bytes for name in (op.name, *op.reads))
    return values + sum(graph.parameters[name].num_bytes for name in op.parameters if op.flops)


def forward_seconds(graph: Graph, op: Op, micro_batches: int = 1) -> float:
    """Predicted seconds of one forward of ``op`` on one of so many micro-batches of the sample."""
    return CALL_S + max(op.flops / FLOPS_PER_S, touched_bytes(graph, op) / BYTES_PER_S) / micro_batches


def roofline(graph: Graph, micro_batches: int = 1) -> Profile:
    """The predicted profile of a graph. Loss and updates cost nothing in it.

    Args:
        graph: the logical graph.
        micro_batches: how many the sample is cut into.
    """
    forward = (*(forward_seconds(graph, op, micro_batches) for op in graph.ops), 0.0)
    return Profile(forward, tuple(BACKWARD_RATIO * seconds for seconds in forward), (0.0,) * len(forward))
