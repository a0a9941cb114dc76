"""Where the time of a run goes, simulated or real: the chain of what waited for what, from its end back to its start.

Every second of the chain belongs to one term, so the terms add up to the makespan. What lies beside it could take
longer without the run doing so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from roundelay.ir.program import Channel, Program
from roundelay.observe.trace import Span

COMPUTE, UPDATE, DATA, OTHER = "compute", "update", "data", "other instructions"
MESSAGES, BOXING, SUMS, GATHERS, STATES, NORMS = "messages", "boxing", "gradient sums", "gathers", "states", "norms"
SLOTS = "full slots"

OF_OPCODE = {
    **dict.fromkeys(("forward", "backward", "backward-weight"), COMPUTE),
    **dict.fromkeys(("read", "deal"), DATA),
    "update": UPDATE,
}
OF_CHANNEL = {
    **dict.fromkeys(("data", "forward", "gradient"), MESSAGES),
    **dict.fromkeys(("boxed", "boxed-gradient"), BOXING),
    **dict.fromkeys(("weight-gradient", "gradient-parts", "partial", "total"), SUMS),
    **dict.fromkeys(("weight", "weight-forward", "weight-backward"), GATHERS),
    **dict.fromkeys(("state", "state-back"), STATES),
    **dict.fromkeys(("grad-norm-sq", "grad-norm"), NORMS),
}

SLACK_S = 1e-12
"""In a simulation two times that differ by less are one."""

REAL_SLACK_S = 1e-4
"""In a real run a worker's own loop takes so much of the time between two instructions."""

WARM, LEAST = 3, 8
"""Batches of a run that are left out where its batches are looked at, and how many there must be to do so."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the chain.

    Args:
        term: what it is spent on.
        worker: on which, or which waits.
        stage: whose, or which waits.
        start_s: seconds from the start of the run.
        end_s: likewise.
    """

    term: str
    worker: int
    stage: int
    start_s: float
    end_s: float


def terms(pieces: Iterable[Piece]) -> dict[str, float]:
    """Seconds of each term, the most first."""
    totals: dict[str, float] = defaultdict(float)
    for piece in pieces:
        totals[piece.term] += piece.end_s - piece.start_s
    return dict(sorted(totals.items(), key=lambda pair: -pair[1]))


def batch_terms(spans: Sequence[Span], programs: Sequence[Program], *, real: bool = False) -> dict[str, float]:
    """Seconds of each term of a batch, the most first, of a run that is under way: without its first batches.

    Args:
        spans: what was executed.
        programs: one for each worker.
        real: whether they were executed, and not simulated: then it is not known when a message came.
    """
    ends: dict[int, float] = {}
    for one in spans:
        ends[one.batch] = max(ends.get(one.batch, 0.0), one.end_s)
    times, begin_s = sorted(ends.values()), min(one.start_s for one in spans)
    start_s, count = (times[WARM - 1], len(times) - WARM) if len(times) >= LEAST else (begin_s, len(times))
    pieces = [replace(one, start_s=max(one.start_s, start_s)) for one in critical_path(spans, programs, real=real)]
    return {name: seconds / count for name, seconds in terms([p for p in pieces if p.end_s > start_s]).items()}


def critical_path(spans: Sequence[Span], programs: Sequence[Program], *, real: bool = False) -> tuple[Piece, ...]:
    """The chain of a run, from its start to its end.

    Args:
        spans: what was executed, each worker's in order.
        programs: one for each worker.
        real: whether they were executed, and not simulated: then it is not known when a message came.
    """
    return tuple(reversed([*_Chain(spans, programs, real=real).back()]))


@final
class _Chain:
    def __init__(self, spans: Sequence[Span], programs: Sequence[Program], *, real: bool) -> None:
        self._real, self._slack_s = real, REAL_SLACK_S if real else SLACK_S
        self._channels: Mapping[int, Channel] = {c.id: c for program in programs for c in program.channels}
        self._last = max(spans, key=lambda i: i.end_s)
        self._before: dict[int, Span | None] = {}  # by identity
        self._given: dict[tuple[int, int], list[Span]] = defaultdict(list)  # by channel and micro-batch
        self._taken: dict[tuple[int, int], list[Span]] = defaultdict(list)  # by channel and the worker that takes
        self._giving: dict[tuple[int, int], int] = {}  # by identity and channel: how many were given before
        counts: dict[tuple[int, int], int] = defaultdict(int)
        latest: dict[int, Span] = {}
        for one in spans:
            self._before[id(one)] = latest.get(one.worker)
            latest[one.worker] = one
            for channel in one.gives:
                self._given[channel, one.g].append(one)
                to = self._target(channel, one)
                self._giving[id(one), channel] = counts[channel, to]
                counts[channel, to] += 1
            for channel in one.takes:
                self._taken[channel, one.worker].append(one)

    def back(self) -> Iterator[Piece]:
        """The pieces, the last first."""
        own: Span | None = self._last
        limit_s = self._last.end_s
        while own is not None:
            if (end_s := min(own.end_s, limit_s)) > own.start_s:
                yield Piece(self._term(own), own.worker, own.stage, own.start_s, end_s)
            cause, term = self._cause(own)
            end_s, limit_s = 0.0 if cause is None else cause.end_s, own.start_s
            if own.start_s - end_s > SLACK_S:
                yield Piece(term, own.worker, own.stage, end_s, own.start_s)
            own = cause

    def _term(self, own: Span) -> str:
        """What an instruction is spent on: one that begins or ends an exchange, on that."""
        ends = {"box": own.gives, "unbox": own.takes}.get(own.opcode, ())
        exchanged = [OF_CHANNEL[self._channels[c].kind] for c in ends if self._channels[c].phases]
        return exchanged[0] if exchanged else OF_OPCODE.get(own.opcode, OTHER)

    def _cause(self, own: Span) -> tuple[Span | None, str]:
        """What an instruction waited for, and what the time since then was spent on."""
        before = self._before[id(own)]
        if before is not None and before.end_s >= own.start_s - self._slack_s:
            return before, OTHER
        freed = [(one, SLOTS) for one in self._that_freed(own)]
        sent = [(one, OF_CHANNEL[self._channels[c].kind]) for c in own.takes for one in self._given[c, own.g]]
        possible = [(one, term) for one, term in (*sent, *freed) if one.end_s <= own.start_s + self._slack_s]
        alone = before, DATA if OF_OPCODE.get(own.opcode) == DATA else OTHER
        cause, term = max(possible, key=lambda pair: pair[0].end_s, default=alone)
        if self._real and before is not None and cause is not None and cause.end_s <= before.end_s:
            return before, OTHER if term == SLOTS else term  # sent before, on its way while the worker computed
        return cause, term

    def _that_freed(self, own: Span) -> Iterator[Span]:
        """Those that took the messages whose slots this one fills."""
        for channel in own.gives:
            place = self._giving[id(own), channel] - self._channels[channel].slots
            taken = self._taken[channel, self._target(channel, own)]
            if 0 <= place < len(taken):
                yield taken[place]

    def _target(self, channel: int, own: Span) -> int:
        """The worker that takes what an instruction gives; of an exchange itself."""
        known = self._channels[channel]
        return own.worker if known.phases else known.target_of(own.g).worker
