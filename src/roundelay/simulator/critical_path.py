"""Where the time of a simulated run goes: the chain of what waited for what, from its end back to its start.

Every second of the chain belongs to one term, so the terms add up to the makespan. What lies beside it could take
longer without the run doing so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from roundelay.ir.program import Channel, Program
from roundelay.simulator.simulation_result import Interval, Simulation

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

_SAME_S = 1e-12
"""Two times that differ by less are one."""


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


def critical_path(simulation: Simulation, programs: Sequence[Program]) -> tuple[Piece, ...]:
    """The chain of a run, from its start to its end.

    Args:
        simulation: of the programs.
        programs: one for each worker.
    """
    return tuple(reversed([*_Chain(simulation, programs).back()]))


@final
class _Chain:
    def __init__(self, simulation: Simulation, programs: Sequence[Program]) -> None:
        self._channels: Mapping[int, Channel] = {c.id: c for program in programs for c in program.channels}
        self._last = max(simulation.intervals, key=lambda i: i.end_s)
        self._before: dict[int, Interval | None] = {}  # by identity
        self._given: dict[tuple[int, int], list[Interval]] = defaultdict(list)  # by channel and micro-batch
        self._taken: dict[tuple[int, int], list[Interval]] = defaultdict(list)  # by channel and the worker that takes
        self._giving: dict[tuple[int, int], int] = {}  # by identity and channel: how many were given before
        counts: dict[tuple[int, int], int] = defaultdict(int)
        latest: dict[int, Interval] = {}
        for one in simulation.intervals:
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
        own: Interval | None = self._last
        while own is not None:
            if own.end_s > own.start_s:
                yield Piece(self._term(own), own.worker, own.stage, own.start_s, own.end_s)
            cause, term = self._cause(own)
            end_s = 0.0 if cause is None else cause.end_s
            if own.start_s - end_s > _SAME_S:
                yield Piece(term, own.worker, own.stage, end_s, own.start_s)
            own = cause

    def _term(self, own: Interval) -> str:
        """What an instruction is spent on: one that begins an exchange, on that."""
        given = [OF_CHANNEL[self._channels[channel].kind] for channel in own.gives if self._channels[channel].phases]
        return given[0] if own.opcode == "box" and given else OF_OPCODE.get(own.opcode, OTHER)

    def _cause(self, own: Interval) -> tuple[Interval | None, str]:
        """What an instruction waited for, and what the time since then was spent on."""
        before = self._before[id(own)]
        if before is not None and before.end_s >= own.start_s - _SAME_S:
            return before, OTHER
        freed = [(one, SLOTS) for one in self._that_freed(own)]
        sent = [(one, OF_CHANNEL[self._channels[c].kind]) for c in own.takes for one in self._given[c, own.g]]
        possible = [(one, term) for one, term in (*sent, *freed) if one.end_s <= own.start_s + _SAME_S]
        if before is not None:
            possible.append((before, DATA))
        return max(possible, key=lambda pair: pair[0].end_s, default=(None, DATA))

    def _that_freed(self, own: Interval) -> Iterator[Interval]:
        """Those that took the messages whose slots this one fills."""
        for channel in own.gives:
            place = self._giving[id(own), channel] - self._channels[channel].slots
            taken = self._taken[channel, self._target(channel, own)]
            if 0 <= place < len(taken):
                yield taken[place]

    def _target(self, channel: int, own: Interval) -> int:
        """The worker that takes what an instruction gives; of an exchange itself."""
        known = self._channels[channel]
        return own.worker if known.phases else known.target_of(own.g).worker
