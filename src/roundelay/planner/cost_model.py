"""The cost of a stage: seconds per micro-batch of its operations and of the messages that it exchanges.

A stage consists of the operations ``start`` to ``stop - 1`` between two boundaries, where operation n is the loss. Its
cost depends on these two numbers only, and not on the cuts of its neighbours, because values are passed from reader to
reader (:mod:`roundelay.lower.dataflow`): a hop from operation a to operation b

- enters the stage if and only if ``a < start <= b < stop``, and
- leaves it if and only if ``start <= a < stop <= b``.

The neighbours' cuts do decide *which* stage a hop comes from or goes to, and so into how many messages the same bytes
are packed. Messages to several stages are sent at the same time over different channels, so their bytes are added and
their latency counts once: one latency for all incoming activations, one for all outgoing ones, and one each for
gradients. Skip connections and parameters that later stages use are hops like any other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from roundelay.ir.graph import Graph, Op, Profile
from roundelay.lower.dataflow import batch_bytes, hops, sample_micro_batches

Cuts = tuple[int, ...]
"""Boundaries of the stages: 0, then the start of each further stage, then n + 1."""


Seat = tuple[float, tuple[bool, bool]]
"""The speed of a stage's holders, and whether what is before them, and what is behind them, is on another node."""

ALIKE: Seat = 1.0, (False, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostParameters:
    """The choices of a plan on which costs depend.

    Args:
        micro_batches: micro-batches of a full batch.
        latency_s: seconds of an empty message.
        bytes_per_s: bandwidth of a link.
        again: numbers of the operations that backwards recompute.
        between: seconds of an empty message, and bandwidth, of a link between two nodes; None: the same.
    """

    micro_batches: int
    latency_s: float
    bytes_per_s: float
    again: tuple[range, ...] = ()
    between: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class _Boundary:
    """The hops across one boundary. Bytes are those of values and of their gradients.

    Args:
        targets: where they end, sorted.
        bytes_by_target: entry i is the bytes of the i hops that end first.
        sources: where they begin, sorted.
        bytes_by_source: entry i is the bytes of the i hops that begin first.
        first_back: the first target from which a gradient comes back; n + 1 if none does.
        last_back: the last source to which a gradient comes back; -1 if none does.
    """

    targets: tuple[int, ...]
    bytes_by_target: tuple[int, ...]
    sources: tuple[int, ...]
    bytes_by_source: tuple[int, ...]
    first_back: int
    last_back: int


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The cost of every stage between two boundaries.

    Args:
        boundaries: where stages may begin and end, from 0 to n + 1.
        work: entry i is the seconds of the operations before i.
        parameters: choices of the plan.
        sample_micro_batches: micro-batches of the sample; bytes are counted over all of them.
        _across: the hops across each inner boundary.
    """

    boundaries: Cuts
    work: tuple[float, ...]
    parameters: CostParameters
    sample_micro_batches: int
    _across: dict[int, _Boundary]

    def compute_s(self, start: int, stop: int) -> float:
        """Seconds of the operations per micro-batch; an update's are divided by the micro-batches of a batch."""
        return self.work[stop] - self.work[start]

    def bytes_in(self, start: int, stop: int) -> int:
        """Bytes of incoming values and of their gradients, for all micro-batches of the sample."""
        across = self._across.get(start)
        return across.bytes_by_target[bisect_left(across.targets, stop)] if across else 0

    def bytes_out(self, start: int, stop: int) -> int:
        """Bytes of outgoing values and of their gradients, for all micro-batches of the sample."""
        across = self._across.get(stop)
        return across.bytes_by_source[-1] - across.bytes_by_source[bisect_left(across.sources, start)] if across else 0

    def communication_s(self, start: int, stop: int, away: tuple[bool, bool] = ALIKE[1]) -> float:
        """Seconds of messages per micro-batch: activations and gradients, in and out."""
        incoming, outgoing = self._across.get(start), self._across.get(stop)
        into = 0 if incoming is None else 1 + (incoming.first_back < stop)
        out = 0 if outgoing is None else 1 + (outgoing.last_back >= start)
        seconds, own, sizes = 0.0, self.parameters, (self.bytes_in(start, stop), self.bytes_out(start, stop))
        for count, num_bytes, far in zip((into, out), sizes, away, strict=True):
            latency_s, bytes_per_s = (far and own.between) or (own.latency_s, own.bytes_per_s)
            seconds += latency_s * count + num_bytes / (self.sample_micro_batches * bytes_per_s)
        return seconds

    def stage_s(self, start: int, stop: int, seat: Seat = ALIKE) -> float:
        """Seconds of a stage per micro-batch: computation and communication."""
        return self.compute_s(start, stop) / seat[0] + self.communication_s(start, stop, seat[1])

    def slowest_s(self, cuts: Cuts, seats: Sequence[Seat] = ()) -> float:
        """Seconds per micro-batch of the slowest stage of these cuts, in these seats or all alike."""
        pairs = zip(pairwise(cuts), seats or [ALIKE] * (len(cuts) - 1), strict=True)
        return max(self.stage_s(*ends, seat) for ends, seat in pairs)


def boundaries_of(graph: Graph) -> Cuts:
    """Return where stages may begin and end: 0, after every legal cut, and n + 1, after the loss."""
    end = len(graph.ops)
    return (0, *(cut + 1 for cut in graph.cuts if cut + 1 < end), end + 1)


def stage_costs(graph: Graph, profile: Profile, parameters: CostParameters) -> StageCosts:
    """Return the costs of a graph's stages.

    Args:
        graph: the logical graph.
        profile: seconds of its operations on one micro-batch.
        parameters: choices of the plan.
    """
    parts = sample_micro_batches(graph, parameters.micro_batches)
    again = {i for part in parameters.again for i in part}
    rows = zip(profile.forward_s, profile.backward_s, profile.update_s, profile.added_s(parts), strict=True)
    work = accumulate((f * (1 + (i in again)) + b + u / parts + a for i, (f, b, u, a) in enumerate(rows)), initial=0.0)
    boundaries = boundaries_of(graph)
    across = _across(graph, boundaries[1:-1], parameters.micro_batches)
    return StageCosts(boundaries, tuple(work), parameters, parts, across)


def _across(graph: Graph, inner: Sequence[int], micro_batches: int) -> dict[int, _Boundary]:
    """Return the hops across every inner boundary."""
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
        bytes_by_target=tuple(accumulate((num_bytes for _, num_bytes in by_target), initial=0)),
        sources=tuple(source for source, _ in by_source),
        bytes_by_source=tuple(accumulate((num_bytes for _, num_bytes in by_source), initial=0)),
        first_back=min((target for _, target, _, back in crossing if back), default=end),
        last_back=max((source for source, _, _, back in crossing if back), default=-1),
    )


FLOPS_PER_S = 4e10
BYTES_PER_S = 1e10
CALL_S = 4e-6
BACKWARD_RATIO = 2.0
"""A backward computes two matrix products for each of the forward's."""


def forward_seconds(graph: Graph, op: Op, micro_batches: int = 1) -> float:
    """Return the predicted seconds of one forward of ``op`` on one of ``micro_batches`` parts of the sample."""
    touched = sum(graph.values[name].num_bytes for name in (op.name, *op.reads))  # by the whole sample
    touched += sum(graph.parameters[name].num_bytes for name in op.parameters if op.flops)
    return CALL_S + max(op.flops / FLOPS_PER_S, touched / BYTES_PER_S) / micro_batches


def roofline(graph: Graph, micro_batches: int = 1) -> Profile:
    """Return the profile that a roofline model predicts; loss and updates are taken as free.

    Args:
        graph: the logical graph.
        micro_batches: number of micro-batches that the sample is cut into.
    """
    forward = (*(forward_seconds(graph, op, micro_batches) for op in graph.ops), 0.0)
    return Profile(forward, tuple(BACKWARD_RATIO * seconds for seconds in forward), (0.0,) * len(forward))
