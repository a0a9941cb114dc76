"""Activation memory over time: as measured, as CDP (2024) extrapolates it, and of the program's stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from torch.profiler import ProfilerActivity, profile

from roundelay.comparison.cyclic_costs import chain
from roundelay.frontend import Captured
from roundelay.frontend.stages.keyed_rng import RngKey
from roundelay.ir.graph import Profile
from roundelay.ir.micro_batch import stream
from roundelay.ir.plan import Plan
from roundelay.lower.emit import emit
from roundelay.lower.partition import partition
from roundelay.lower.reading import read
from roundelay.planner.cost_model import Cuts
from roundelay.simulator import Simulation, simulate

BATCHES = 5
"""Simulated; the curve is that of the fourth, when no worker waits for a first batch any more."""

Changes = Sequence[tuple[float, float]]
"""Times, from 0 on, and by how many bytes the memory changes then."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes over a period, after which they repeat.

    Args:
        period_s: length of the period.
        points: (seconds, bytes from then on), from 0 seconds on.
    """

    period_s: float
    points: Sequence[tuple[float, float]]

    @property
    def peak(self) -> float:
        return max(held for _, held in self.points)

    def saved_of(self, other: Memory) -> float:
        """By which share the peak is lower than another's."""
        return 1 - self.peak / other.peak


def of_changes(changes: Changes, start: float, period_s: float) -> Memory:
    """Add up changes, which need not be in order; of those at one time the freed bytes come first."""
    ordered = sorted(changes)
    held = accumulate((change for _, change in ordered), initial=start)
    return Memory(period_s, list(zip((0.0, *(time for time, _ in ordered)), held, strict=True)))


def measured(step: Callable[[], object], repeats: int) -> Memory:
    """Memory that the CPU's allocator has given out since the start of a forward and backward.

    Each pause between two allocations is the shortest of all runs, as disturbances only make it longer.

    Args:
        step: computes forward and backward; gradients are there already, so that none stays behind.
        repeats: runs.
    """
    step()
    runs = [_allocations(step) for _ in range(repeats)]
    usual, _ = Counter(len(run) for run in runs).most_common(1)[0]
    alike = [run for run in runs if len(run) == usual]
    pauses = [min(run[i + 1][0] - run[i][0] for run in alike) for i in range(usual - 1)]
    times = list(accumulate(pauses, initial=0.0))
    return of_changes([(time, change) for time, (_, change) in zip(times, alike[-1], strict=True)], 0.0, times[-1])


def _allocations(step: Callable[[], object]) -> list[tuple[float, int]]:
    """Seconds and bytes of each allocation; negative where memory is given back."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    events = found.profiler.kineto_results.events()
    return sorted((event.start_ns() / 1e9, event.nbytes()) for event in events if event.name() == "[memory]")


def staggered(memory: Memory, size: int) -> Memory:
    """The mean of N workers, each 1/N of the period after the one before: the paper's extrapolation (Sect. 5)."""
    period_s, own = memory.period_s, [(t, b - a) for (_, a), (t, b) in pairwise(memory.points)]
    again = memory.points[0][1] - memory.points[-1][1]  # at the end of the period
    changes, start = [], 0.0
    for i in range(size):
        shift = period_s * i / size
        start += next(held for time, held in reversed(memory.points) if time <= shift)
        later = [((time - shift) % period_s or period_s, change) for time, change in (*own, (period_s, again))]
        changes += [(time, change / size) for time, change in later]
    return of_changes(changes, start / size, period_s)


def kept_by_tapes(captured: Captured, ends: Sequence[Sequence[str]], micro_batch: Any) -> list[int]:
    """Bytes that each stage's tape holds of a micro-batch, without what tapes of earlier stages hold.

    Args:
        captured: the model.
        ends: names of the operations that end the segments of each stage.
        micro_batch: in memory of its own.
    """
    values: dict[str, Any] = dict(captured.values(micro_batch))
    buffers, tapes, kept = {n: b.clone() for n, b in captured.buffers().items()}, [], []
    weights, before = {n: p.detach() for n, p in captured.parameters().items()}, set[int]()
    for stage in partition(captured.graph, ends).stages:
        function = captured.stage(stage)
        own = {n: weights[n] for n in stage.parameters}
        inputs = {n: values[n] for n in function.inputs}
        outputs, tape = function.forward(own, buffers, inputs, RngKey(0, 0), mode="stash", measure=True)
        values.update(outputs)
        tapes.append(tape)  # so that no address is used twice
        held = {address: size for part in tape.tapes for address, size in part.storages.items()}
        kept.append(sum(size for address, size in held.items() if address not in before))
        before |= held.keys()
    return kept


def in_time(layout: str, rule: str, cuts: Cuts, kept: Sequence[int], seconds: Profile) -> Plan:
    """A plan of N stages and N micro-batches with the bytes and the times of stages; messages take no time."""
    size = len(kept)
    made = chain(size, rule=rule, layout=layout, **{"replicas" if layout == "dp" else "micro_batches": size})
    stages = [
        replace(
            stage,
            forward_s=sum(seconds.forward_s[start:stop]),
            backward_s=sum(seconds.backward_s[start:stop]),
            tape_bytes=own,
        )
        for stage, own, (start, stop) in zip(made.stages, kept, pairwise(cuts), strict=True)
    ]
    return replace(made, stages=tuple(stages))


def simulated(plan: Plan) -> Memory:
    """What all workers together hold in a run at their own pace, as a mean of the micro-batches."""
    run = simulate(plan, emit(read(plan)), stream([plan.micro_batches] * BATCHES))
    start, end = (_begin(run, batch) for batch in (BATCHES - 2, BATCHES - 1))
    changes: list[tuple[float, float]] = []
    for interval in run.intervals:
        num_bytes = plan.stages[interval.stage].tape_bytes / plan.batch_parts
        if interval.opcode == "forward":
            changes.append((interval.start_s - start, num_bytes))
        elif interval.opcode == "backward":
            changes.append((interval.end_s - start, -num_bytes))
    before = sum(change for time, change in changes if time < 0)
    return of_changes([change for change in changes if 0 <= change[0] < end - start], before, end - start)


def _begin(run: Simulation, batch: int) -> float:
    """When the first forward of a batch starts."""
    return min(
        interval.start_s for interval in run.intervals if interval.opcode == "forward" and interval.batch == batch
    )
