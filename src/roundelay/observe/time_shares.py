"""Where the time of a run went, worker by worker: computing, waiting, or idle because the schedule had nothing to do.

The time of a run is that from the beginning of its first span to the end of its last, the same for every worker. Of a
worker's time

- ``forward``, ``backward`` (both halves, where it has two), ``update`` is time inside those instructions; together they
  are *busy*;
- ``data`` is time inside ``read``: the person's loader;
- what is left is *idle*, and each gap of it lies before an instruction (or behind the last one). The instruction was
  *possible* as soon as the other workers' instructions had ended that make its messages and free its slots. Until then
  the gap is ``bubble``: the schedule asks for it, or another stage is slower. From then on it is ``wait``: something
  could have been done, but messages, credits, or this worker's own loop took their time.

The six add up to 1. A gap behind the last instruction is bubble.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from roundelay.ir.program import OPCODES, Channel, Port
from roundelay.observe.trace import Gap, Span

SLACK_S = 1e-6
"""Seconds by which an instruction may seem to begin before it was possible, for rounding; more, and clocks differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Where a worker's time went; see the module's docstring. All are shares of the run's time, 0 to 1.

    Args:
        forward: inside forwards.
        backward: inside backwards, both halves where they have two.
        update: inside updates.
        data: inside ``read``.
        idle: the rest.
        wait: what of the rest was waiting; None where the workers' clocks differ, since then nobody can tell.
    """

    forward: float
    backward: float
    update: float
    data: float
    idle: float
    wait: float | None

    @property
    def busy(self) -> float:
        """Share in which it computes."""
        return self.forward + self.backward + self.update

    @property
    def bubble(self) -> float | None:
        """What of the rest the schedule asks for; None as ``wait``."""
        return None if self.wait is None else self.idle - self.wait

    def as_json(self) -> dict[str, float | None]:
        """By name."""
        computed = {"forward": self.forward, "backward": self.backward, "update": self.update}
        return {"busy": self.busy, **computed, "data": self.data, "bubble": self.bubble, "wait": self.wait}


def gaps_of(spans: Sequence[Span], channels: Sequence[Channel], num_workers: int) -> list[Gap]:
    """Every gap of every worker, in order; one of both kinds is two.

    Args:
        spans: of the run, or of its last micro-batches, each worker's in order.
        channels: between the workers.
        num_workers: D.
    """
    if not spans:
        return []
    possible = _possible(spans, channels)
    # on one clock nothing begins before what it needs has ended; another host's clock can make it seem so
    shared = all(turn <= span.start_s + SLACK_S for span, turn in zip(spans, possible, strict=True))
    by_worker: dict[int, list[tuple[Span, float]]] = {k: [] for k in range(num_workers)}
    for span, turn in zip(spans, possible, strict=True):
        by_worker[span.worker].append((span, turn))
    begin, end = min(s.start_s for s in spans), max(s.end_s for s in spans)
    found: list[Gap] = []
    for worker, mine in by_worker.items():
        at = begin
        for span, turn in mine:
            if span.start_s > at:
                found += _split(worker, at, span.start_s, turn, shared)
            at = span.end_s
        found += _split(worker, at, end, end, shared)
    return found


def shares_of(spans: Sequence[Span], gaps: Sequence[Gap], num_workers: int) -> list[Shares]:
    """Where each worker's time went; see the module's docstring.

    Args:
        spans: as in :func:`gaps_of`.
        gaps: what :func:`gaps_of` finds between them.
        num_workers: D.
    """
    begin = min((s.start_s for s in spans), default=0.0)
    total = max((s.end_s for s in spans), default=0.0) - begin
    seconds: dict[tuple[int, str], float] = {}
    for span in spans:
        key = span.worker, OPCODES[span.opcode].share
        seconds[key] = seconds.get(key, 0.0) + span.end_s - span.start_s
    for gap in gaps:
        seconds[gap.worker, gap.kind] = seconds.get((gap.worker, gap.kind), 0.0) + gap.end_s - gap.start_s
    return [_shares(worker, seconds, total) for worker in range(num_workers)]


def _shares(worker: int, seconds: Mapping[tuple[int, str], float], total: float) -> Shares:
    def share(kind: str) -> float:
        return seconds.get((worker, kind), 0.0) / total if total > 0 else 0.0

    unknown, wait = share("idle"), share("wait")
    idle = wait + share("bubble") + unknown
    inside = {kind: share(kind) for kind in ("forward", "backward", "update", "data")}
    return Shares(**inside, idle=idle, wait=None if unknown else wait)


_Ends = Mapping[tuple[int, Port], Mapping[int, float]]


def _possible(spans: Sequence[Span], channels: Sequence[Channel]) -> list[float]:
    """When each instruction became possible; minus infinity for one that needs nobody.

    It needs the other workers' instructions that make its messages, and those that free its slots.
    """
    given: dict[tuple[int, Port], dict[int, float]] = defaultdict(dict)  # by channel and port: when, by micro-batch
    taken: dict[tuple[int, Port], dict[int, float]] = defaultdict(dict)
    for s in spans:
        for ends, numbers in ((given, s.gives), (taken, s.takes)):
            for number in numbers:
                ends[number, Port(s.worker, s.stage)][s.g] = s.end_s
    by_id = {channel.id: channel for channel in channels}
    return [max(_needed(s, by_id, given, taken), default=-math.inf) for s in spans]


def _needed(s: Span, channels: Mapping[int, Channel], given: _Ends, taken: _Ends) -> Iterator[float]:
    """When each message that an instruction takes was made, and each slot that it fills was free."""
    own = Port(s.worker, s.stage)
    for number in s.takes:
        for port in channels[number].sources:
            if port != own and s.g in (made := given[number, port]):
                yield made[s.g]
    for number in s.gives:
        channel = channels[number]
        for port in channel.targets if not OPCODES[s.opcode].once_a_batch or s.of else ():
            if port != own and s.g - channel.slots in (free := taken[number, port]):
                yield free[s.g - channel.slots]


def _split(worker: int, start: float, end: float, possible: float, shared: bool) -> Iterator[Gap]:
    """A gap's two parts, without those of no length."""
    if not shared:
        parts: list[Gap] = [Gap(worker, "idle", start, end)]
    else:
        turn = min(max(start, possible), end)
        parts = [Gap(worker, "bubble", start, turn), Gap(worker, "wait", turn, end)]
    return (gap for gap in parts if gap.end_s > gap.start_s)
