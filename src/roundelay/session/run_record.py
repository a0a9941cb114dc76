"""A finished training, and the record from which it is made: everything that workers report but their state."""

from __future__ import annotations

import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from roundelay.checkpoint.atomic_files import replacing_file
from roundelay.errors import UsageError
from roundelay.ir.micro_batch import Load, MicroBatch
from roundelay.ir.plan import Plan
from roundelay.observe.action_trace import ActionTrace, TraceHead
from roundelay.page.run_page import run_page
from roundelay.runtime.processes.worker_messages import Report
from roundelay.runtime.report_data import misreported
from roundelay.session.events import Evaluated, Event, Observer, Skipped, Traced, Updated
from roundelay.session.state_gather import Snapshot

Rates = Callable[[int], tuple[float, ...]]
Terms = tuple[float, float]
"""A value, and the number of terms summed in it (0 where it is a mean)."""

Computed = tuple[str, int, int, int]
"""(kind, stage, replica, number): ``forward`` and ``backward`` with g, ``update`` with t."""

MOST_AHEAD = 2**16
"""Most batches by which one whose loss is reported may be ahead of the next update."""

_ADDED = ("busy_s", "wall_s", "updates", "skipped")


class ExecutedInstruction(NamedTuple):
    """One instruction, as a worker has executed it; as :class:`~roundelay.observe.trace.Span`, and its text."""

    opcode: str
    g: int
    batch: int
    version: int
    distance: int
    start_s: float
    end_s: float
    num_bytes: int
    stage: int
    of: str
    takes: Sequence[int]
    gives: Sequence[int]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A finished training.

    Args:
        plan: the plan that was run.
        updates: every update's loss.
        evaluations: what ``evaluate`` returned, in order.
        snapshot: the final state.
        samples_per_second: over all updates but the first tenth.
        micro_losses: micro-batch to (loss, number of terms summed); the last 8,192 micro-batches, as in the trace.
        micro_metrics: the same for every metric that the loss function returns in addition to the loss.
        micro_scales: micro-batch to its loss scale; empty where losses are not scaled.
        events: worker to its executed instructions.
        loads: worker that reads to the batches that its reader has loaded.
        digests: of everything computed, if audited.
        workers: worker to its final report.
        stopped: why ``evaluate`` or ``on_update`` ended the training early; empty if neither did.
        numbers: the evaluated metric that ReduceLROnPlateau needs, one number per epoch, from the first epoch on.
        check: how the captured job was compared with plain PyTorch before the run, in one line; empty if it was not.
        folder: the run's folder; None if it has none.
        actions: of stages whose order is free, what they did, by stage.
    """

    plan: Plan
    updates: tuple[Updated, ...]
    evaluations: tuple[Evaluated, ...]
    snapshot: Snapshot
    samples_per_second: float
    micro_losses: dict[int, tuple[float, float]] = field(hash=False)
    micro_metrics: dict[int, dict[str, tuple[float, float]]] = field(hash=False)
    micro_scales: dict[int, float] = field(hash=False)
    events: dict[int, list[ExecutedInstruction]] = field(hash=False)
    loads: dict[int, list[Load]] = field(hash=False)
    digests: dict[Computed, str] = field(hash=False)
    workers: dict[int, dict[str, Any]] = field(hash=False)
    stopped: str = ""
    numbers: tuple[float, ...] = ()
    check: str = ""
    folder: Path | None = None
    actions: dict[int, ActionTrace] = field(default_factory=dict, hash=False)

    def report(self, output: str | Path | None = None) -> Path:
        """Write a page on the run: curves, a timeline, the plan; returns its path.

        Args:
            output: where to; by default ``report.html`` in the run's folder.

        Raises:
            UsageError: the run has no folder.
            RunError: the page cannot be written.
        """
        if self.folder is None:
            raise UsageError(
                "report()",
                got="a run without a folder",
                expected="one whose updates and instructions were written into a folder",
                remedy="Train with out=True, or out=FOLDER.",
            )
        path = self.folder / "report.html" if output is None else Path(output)
        with replacing_file(path) as file:
            file.write(run_page(self.folder))
        return path

    def __repr__(self) -> str:
        losses = f"{self.updates[0].loss:.4f} -> {self.updates[-1].loss:.4f}" if self.updates else "none"
        return (
            f"Trained(rule={self.plan.rule!r}, workers={self.plan.num_workers}, updates={len(self.updates)}, "
            f"loss: {losses}, samples_per_second={self.samples_per_second:.1f})"
        )


class RunRecord:
    """Takes the workers' reports in the order of their arrival, and notifies of updates.

    Args:
        workers: D.
        notify: called with every update, and every update that a stage skips.
        rates: from an update's number to its learning rates.
        kept: number of micro-batches whose loss, metrics and scale are kept; by default all.
        first: the number of the first batch.
        heads: of the traces of stages whose order is free, by stage.
    """

    def __init__(
        self,
        workers: int,
        notify: Observer,
        rates: Rates,
        kept: int = sys.maxsize,
        first: int = 0,
        heads: Mapping[int, TraceHead] | None = None,
    ) -> None:
        self._notify, self.rates, self._kept, self._heads = notify, rates, kept, heads or {}
        #: of stages whose order is free, by stage
        self.actions: dict[int, ActionTrace] = {}
        self._due: deque[Event] = deque()
        self._start = time.perf_counter()
        #: of every micro-batch
        self.losses: dict[int, Terms] = {}
        self._lacking: dict[int, float] = {}  # part of a micro-batch's weight in the mean that has no labels
        #: of every micro-batch, what is returned in addition to the loss
        self.metrics: dict[int, dict[str, Terms]] = {}
        #: micro-batch to its loss scale; empty where losses are not scaled
        self.scales: dict[int, float] = {}
        self.updates: list[Updated] = []
        self._times: list[float] = []
        #: first batch of every epoch
        self.epoch_starts: dict[int, int] = {}
        self.events: dict[int, list[ExecutedInstruction]] = defaultdict(list)
        self.loads: dict[int, list[Load]] = defaultdict(list)
        self.digests: dict[Computed, str] = {}
        #: worker to its final report
        self.workers: dict[int, dict[str, Any]] = {}
        self._next = first  # the batch whose update is reported next
        self._batches: dict[int, list[MicroBatch]] = {}  # by batch, the micro-batches whose losses are known
        self._busy = [0.0] * workers
        self._recent = 0  # the first update of the last few seconds

    def take(self, report: Report) -> None:
        """Take one report of any kind but ``state``.

        Raises:
            RunError: it cannot be true.
        """
        try:
            self._take(report)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise misreported(report, error) from error
        while self._due:
            self._notify(self._due.popleft())

    def _take(self, report: Report) -> None:
        data, worker = report.data, report.worker
        if report.kind == "loss":
            self._loss(data)
        elif report.kind == "progress":
            self._busy[worker] = data["busy_s"] / max(data["wall_s"], 1e-9)
        elif report.kind == "skipped":
            self._due.append(Skipped(data["update"], data["in_a_row"], data["scale"]))
        elif report.kind == "events":
            self.events[worker] += [ExecutedInstruction(*row) for row in data["events"]]
        elif report.kind == "loads":
            self.loads[worker] += [Load(worker, *row) for row in data["loads"]]
        elif report.kind == "letters":
            self._traced(data)
        elif report.kind == "digest":
            self.digests |= {tuple(key): value for *key, value in data["digests"]}
        elif report.kind == "finished":
            self.workers[worker] = _summed(self.workers.get(worker, {}), data)

    def _traced(self, data: Mapping[str, Any]) -> None:
        head, letters, ended = self._heads[data["stage"]], data["letters"], data["ended"]
        digests = dict(data["digests"])
        known = self.actions.get(head.stage) or ActionTrace(head, "", {}, ended=False)
        self.actions[head.stage] = ActionTrace(head, known.letters + letters, {**known.digests, **digests}, ended)
        self._due.append(Traced(head, letters, digests, ended))

    def _loss(self, data: Mapping[str, Any]) -> None:
        header = MicroBatch.of(tuple(data["header"]))
        if not self._next <= header.batch < self._next + MOST_AHEAD or header.rows < 1:
            raise ValueError(f"a loss of batch {header.batch} while {self._next} is the next")
        self.losses[header.number] = (data["loss"], data["count"])
        self._lacking[header.number] = data.get("lacking", 0.0)
        self.metrics[header.number] = {name: tuple(pair) for name, pair in data.get("metrics", {}).items()}
        if "scale" in data:
            self.scales[header.number] = data["scale"]
        self.epoch_starts.setdefault(header.epoch, header.batch)
        batch = self._batches.setdefault(header.batch, [])
        batch.append(header)
        if sum(known.rows for known in batch) > batch[0].batch_rows:
            raise ValueError(f"losses of more rows than batch {header.batch} has")
        while self._complete(self._batches.get(self._next, ())):  # of a short batch, fewer workers report
            self._update(sorted(self._batches.pop(self._next), key=lambda known: known.number))
            self._next += 1
            for values in (self.losses, self._lacking, self.metrics, self.scales):
                _drop_oldest(values, self._kept)

    @staticmethod
    def _complete(batch: Sequence[MicroBatch]) -> bool:
        return bool(batch) and sum(known.rows for known in batch) == batch[0].batch_rows

    def _update(self, batch: Sequence[MicroBatch]) -> None:
        last = batch[-1]
        metrics = {
            name: _mean(batch, {header.number: self.metrics[header.number][name] for header in batch})
            for name in self.metrics[last.number]
        }
        self._times.append(time.perf_counter())
        updated = Updated(
            update=last.batch,
            epoch=last.epoch,
            loss=_mean(batch, self.losses, self._lacking),
            rows=last.batch_rows,
            samples_per_second=self._rate(last.batch_rows),
            busy=tuple(self._busy),
            learning_rates=self.rates(last.batch),
            seconds=self._times[-1] - self._start,
            metrics=metrics,
            loss_scale=self.scales.get(last.number),
        )
        self.updates.append(updated)
        self._due.append(updated)

    def _rate(self, rows: int) -> float:
        """Samples per second over the last few seconds."""
        now = self._times[-1]
        while now - self._times[self._recent] > 5.0 and self._recent < len(self._times) - 1:
            self._recent += 1
        first = self._recent
        rows_since = sum(u.rows for u in self.updates[first + 1 :]) + (rows if first < len(self._times) - 1 else 0)
        return rows_since / (now - self._times[first]) if now > self._times[first] else 0.0


def _drop_oldest(values: dict[int, Any], kept: int) -> None:
    """Remove the oldest entries until ``kept`` are left."""
    while len(values) > kept:
        del values[next(iter(values))]


def _summed(before: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's final report over all parts of a run: seconds, counts and bytes are added up."""
    total = dict(data)
    if not before:
        return total
    for name in _ADDED:
        total[name] += before[name]
    for name in ("bytes_sent", "bytes_received"):
        total[name] = {k: count + before[name].get(k, 0) for k, count in data[name].items()}
    return total | {name: before[name] for name in ("first_event_g", "start_sums")}


def _mean(
    batch: Sequence[MicroBatch], values: Mapping[int, Terms], lacking: Mapping[int, float] | None = None
) -> float:
    """The mean over a batch's micro-batches, weighted by the number of terms where there are any, else by rows.

    Args:
        batch: its micro-batches.
        values: of each micro-batch.
        lacking: micro-batch to the part of its weight by rows that does not count.
    """
    terms, missing = sum(values[header.number][1] for header in batch), lacking or {}
    weights = [1.0 / terms if terms else header.weight - missing.get(header.number, 0.0) for header in batch]
    total = sum(values[header.number][0] * weight for header, weight in zip(batch, weights, strict=True))
    left = 1.0 - sum(missing.get(header.number, 0.0) for header in batch)
    return total / left if left else total
