"""What a simulation gives: every instruction with its times, and the times and peaks of each worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from roundelay.ir.micro_batch import Load
from roundelay.observe.trace import Span


class Interval(NamedTuple):
    """One executed instruction, with its times in seconds from the start of the run, and channels it uses."""

    worker: int
    stage: int
    opcode: str
    g: int
    version: int
    reads: int
    keep: int | None
    distance: int
    entry: int
    start_s: float
    end_s: float
    batch: int
    of: str
    continues: bool
    takes: tuple[int, ...]
    gives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Times and peaks of one simulated worker.

    Args:
        busy_s: seconds in which it computes.
        data_s: seconds in which it waits for data.
        registers_peak: most registers of data in use at one time.
        tapes_peak: most tapes at one time, on all of its stages.
        owed_peak: most backwards at one time whose weight half is pending, on all of its stages.
        tape_bytes_peak: most bytes that both hold at one time.
        versions_read: smallest and largest difference between the batch of a forward and the version it reads.
        weight_bytes_peak: most bytes of its stages' newest weights that it has at one time: all, unless states wander.
        version_bytes_peak: most bytes of all versions of its stages' weights that it has at one time.
        versions_held_peak: most versions of a stage's weights held at one time, predicted copies included.
        unread_peak: for each channel into it, most messages on the way or unread at one time.
        unread_bytes_peak: most bytes of such messages, of all channels together, at one time.
    """

    busy_s: float
    data_s: float
    registers_peak: int
    tapes_peak: int
    owed_peak: int
    tape_bytes_peak: int
    weight_bytes_peak: int
    version_bytes_peak: int
    versions_read: tuple[int, int]
    versions_held_peak: int
    unread_peak: dict[int, int] = field(hash=False)
    unread_bytes_peak: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """A simulated run.

    Args:
        makespan_s: seconds from the first event to the last.
        intervals: every instruction, ordered by start.
        events: for each worker, its fired instructions as text, in order.
        workers: one report for each worker.
        loads: every batch that a reader loaded, in order; empty if loading takes no time.
    """

    makespan_s: float
    intervals: tuple[Interval, ...]
    events: tuple[tuple[str, ...], ...]
    workers: tuple[WorkerReport, ...]
    loads: tuple[Load, ...]

    def __repr__(self) -> str:
        return (
            f"Simulation(makespan_s={self.makespan_s:.6g}, bubble={self.bubble:.3f}, workers={len(self.workers)}, "
            f"intervals={len(self.intervals)})"
        )

    def intervals_of(self, worker: int) -> list[Interval]:
        """Return the instructions of one worker, in order."""
        return [interval for interval in self.intervals if interval.worker == worker]

    def spans(self) -> list[Span]:
        """Every instruction as a trace has it, ordered by start."""
        return [
            Span(
                i.worker,
                i.opcode,
                i.g,
                i.batch,
                i.reads,
                i.distance,
                i.start_s,
                i.end_s,
                num_bytes=0,
                stage=i.stage,
                of=i.of,
                takes=i.takes,
                gives=i.gives,
            )
            for i in self.intervals
        ]

    @property
    def bubble(self) -> float:
        """Fraction of the workers' time in which they do not compute."""
        busy = sum(report.busy_s for report in self.workers)
        return 1.0 - busy / (self.makespan_s * len(self.workers)) if self.makespan_s else 0.0
