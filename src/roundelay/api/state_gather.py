"""Join the workers' reports: losses per update, states of all stages, instructions, and final reports."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundelay.checkpoint.in_flight import StageInFlight, decode
from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.worker_messages import Report


@dataclass(frozen=True, slots=True)
class Updated:
    """The last stage has finished a batch: its loss is known. Reported once per update, in order.

    Args:
        update: its number t, from 0; a run that continues from a checkpoint continues to count.
        epoch: its epoch, from 0.
        loss: its mean loss.
        rows: its samples.
        samples_per_second: over the last few seconds.
        busy: share of the time, 0 to 1, that each worker has computed so far.
        learning_rates: of this update, one per parameter group of the optimizer.
        seconds: since this run began.
        metrics: what the job's loss function returned in addition to the loss, averaged over the batch in the same way.
        loss_scale: of its last micro-batch; None where losses are not scaled.
    """

    update: int
    epoch: int
    loss: float
    rows: int
    samples_per_second: float
    busy: tuple[float, ...]
    learning_rates: tuple[float, ...]
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict, hash=False)
    loss_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The job's ``evaluate`` has returned metrics of the weights after ``updates`` updates."""

    updates: int
    epoch: int
    metrics: dict[str, float] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint of the weights after ``updates`` updates has been written."""

    path: str
    updates: int


@dataclass(frozen=True, slots=True)
class NotSaved:
    """A checkpoint could not be written; the previous one is complete, and the training continues."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """A run that failed is restarted from its last checkpoint.

    Args:
        number: of the restart, from 1.
        updates: number of updates in the checkpoint; later ones are repeated.
        cause: why the run failed.
    """

    number: int
    updates: int
    cause: str


@dataclass(frozen=True, slots=True)
class Drained:
    """A run that continues from a checkpoint in mid-flight starts with empty stages, so its results differ.

    Args:
        micro_batches: how many were in flight; they are forwarded again, with the checkpoint's weights.
        reason: what has changed.
    """

    micro_batches: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """``evaluate`` or ``on_update`` has stopped the training: the batch that is read next is the run's last."""

    reason: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """The gradients of a batch are not finite, so the stages skip its update.

    Args:
        update: its number.
        in_a_row: length of the series of skipped updates that ends with this one.
        loss_scale: the largest of its micro-batches.
    """

    update: int
    in_a_row: int
    loss_scale: float


Event = Updated | Evaluated | Saved | NotSaved | Restarted | Drained | Stopping | Skipped
Notify = Callable[[Event], None]
Rates = Callable[[int], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of all stages at one version.

    Args:
        header: the last micro-batch of its last update.
        parameters: by name.
        buffers: by name.
        optimizer: state by parameter name.
        flight: what every stage has in flight, if the snapshot is for a checkpoint.
        loss_scale: if dynamic: the next scale of stage 0, and the number of finite batches in a row; else None.
    """

    header: MicroBatch
    parameters: dict[str, torch.Tensor] = field(hash=False)
    buffers: dict[str, torch.Tensor] = field(hash=False)
    optimizer: dict[str, dict[str, Any]] = field(hash=False)
    flight: tuple[StageInFlight, ...] | None = field(default=None, hash=False)
    loss_scale: tuple[float, int] | None = None


class StateGatherer:
    """Takes reports in the order of their arrival.

    Args:
        num_stages: number of stages, each of which reports its own state.
        num_workers: D.
        notify: called with every update.
        on_snapshot: called when all stages have reported their state of one version, with each epoch's first batch.
        rates: from an update's number to its learning rates.
        kept: number of micro-batches whose loss, metrics and scale are kept; by default all.
    """

    def __init__(
        self,
        num_stages: int,
        num_workers: int,
        notify: Notify,
        on_snapshot: Callable[[Snapshot, Mapping[int, int]], None],
        rates: Rates,
        kept: int = sys.maxsize,
    ) -> None:
        self._kept = kept
        self.num_stages, self.notify, self.on_snapshot, self.rates = num_stages, notify, on_snapshot, rates
        self._began = time.perf_counter()
        #: micro-batch to its loss, and the number of terms summed (0 where the loss is a mean)
        self.micro_losses: dict[int, tuple[float, float]] = {}
        self.micro_lacking: dict[int, float] = {}  # part of a micro-batch's weight in the mean that has no labels
        #: the same for every metric that is returned in addition to the loss
        self.micro_metrics: dict[int, dict[str, tuple[float, float]]] = {}
        #: micro-batch to its loss scale; empty where losses are not scaled
        self.micro_scales: dict[int, float] = {}
        self.updates: list[Updated] = []
        self.times: list[float] = []
        #: first batch of every epoch
        self.epoch_starts: dict[int, int] = {}
        self.events: dict[int, list[list[Any]]] = defaultdict(list)
        self.loads: dict[int, list[list[Any]]] = {}
        self.digests: dict[tuple[str, int, int], str] = {}
        self.summaries: dict[int, dict[str, Any]] = {}
        self._parts: list[MicroBatch] = []
        self._states: dict[int, list[Report]] = defaultdict(list)
        self._busy = [0.0] * num_workers
        self._recent = 0  # the first update of the last few seconds

    def take(self, report: Report) -> None:
        """Take one report."""
        data = report.data
        if report.kind == "loss":
            header = MicroBatch.of(tuple(data["header"]))
            self.micro_losses[header.g] = (data["loss"], data["count"])
            self.micro_lacking[header.g] = data.get("lacking", 0.0)
            self.micro_metrics[header.g] = {name: tuple(pair) for name, pair in data.get("metrics", {}).items()}
            if "scale" in data:
                self.micro_scales[header.g] = data["scale"]
            self._loss(header)
        elif report.kind == "progress":
            self._busy[report.worker] = data["busy_s"] / max(data["wall_s"], 1e-9)
        elif report.kind == "skipped":
            self.notify(Skipped(data["update"], data["in_a_row"], data["scale"]))
        elif report.kind == "events":
            self.events[report.worker] += data["events"]
        elif report.kind == "loads":
            self.loads.setdefault(report.worker, []).extend(data["loads"])
        elif report.kind == "digest":
            self.digests |= {(kind, stage, number): value for kind, stage, number, value in data["digests"]}
        elif report.kind == "finished":
            self.summaries[report.worker] = _summed(self.summaries.get(report.worker, {}), data)
        elif report.kind == "state":
            self._state(report)

    def _loss(self, header: MicroBatch) -> None:
        self.epoch_starts.setdefault(header.epoch, header.batch)
        self._parts.append(header)
        if not header.ends_batch:
            return
        parts, self._parts = self._parts, []
        mean = _mean(parts, self.micro_losses, self.micro_lacking)
        metrics = {
            name: _mean(parts, {h.g: self.micro_metrics[h.g][name] for h in parts})
            for name in self.micro_metrics[header.g]
        }
        self.times.append(time.perf_counter())
        rate = self._rate(header.batch_rows)
        updated = Updated(
            update=header.batch,
            epoch=header.epoch,
            loss=mean,
            rows=header.batch_rows,
            samples_per_second=rate,
            busy=tuple(self._busy),
            learning_rates=self.rates(header.batch),
            seconds=self.times[-1] - self._began,
            metrics=metrics,
            loss_scale=self.micro_scales.get(header.g),
        )
        self.updates.append(updated)
        self.notify(updated)
        for values in (self.micro_losses, self.micro_lacking, self.micro_metrics, self.micro_scales):
            _drop_oldest(values, self._kept)

    def _rate(self, rows: int) -> float:
        """Samples per second over the last few seconds."""
        now = self.times[-1]
        while now - self.times[self._recent] > 5.0 and self._recent < len(self.times) - 1:
            self._recent += 1
        first = self._recent
        rows_since = sum(u.rows for u in self.updates[first + 1 :]) + (rows if first < len(self.times) - 1 else 0)
        return rows_since / (now - self.times[first]) if now > self.times[first] else 0.0

    def _state(self, report: Report) -> None:
        header = MicroBatch.of(tuple(report.data["header"]))
        parts = self._states[header.g]
        parts.append(report)
        if len(parts) < self.num_stages:
            return
        whole = _joined(header, sorted(self._states.pop(header.g), key=lambda r: r.data["stage"]))
        self.on_snapshot(whole, self.epoch_starts)


def _drop_oldest(values: dict[int, Any], kept: int) -> None:
    """Remove the oldest entries until ``kept`` are left."""
    while len(values) > kept:
        del values[next(iter(values))]


def samples_per_second(updates: Sequence[Updated]) -> float:
    """Over all updates of a run but the first tenth, the warm-up."""
    skip = max(1, len(updates) // 10)
    if len(updates) <= skip:
        return 0.0
    seconds = updates[-1].seconds - updates[skip - 1].seconds
    return sum(update.rows for update in updates[skip:]) / seconds if seconds > 0 else 0.0


def _joined(header: MicroBatch, parts: Sequence[Report]) -> Snapshot:
    """Join the states of all stages, in order. A buffer of several stages is the same in all: none changes it."""
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    optimizer: dict[str, dict[str, Any]] = defaultdict(dict)
    flight: list[StageInFlight] = []
    scale: tuple[float, int] | None = None
    for part in parts:
        for name, tensor in part.tensors.items():
            kind, rest = name.split(" ", 1)
            if kind == "state":
                parameter, key = rest.split("\n")
                optimizer[parameter][key] = tensor
            elif kind == "parameter":
                parameters[rest] = tensor
            elif kind == "buffer":
                buffers.setdefault(rest, tensor)
        for parameter, numbers in part.data["numbers"].items():
            optimizer[parameter].update(numbers)
        if "scale" in part.data:
            now, streak = part.data["scale"]
            scale = now, streak
        if "flight" in part.data:
            flight.append(decode(part.data["flight"], part.tensors))
    return Snapshot(header, parameters, buffers, dict(optimizer), tuple(flight) or None, scale)


_ADDED = ("busy_s", "wall_s", "updates", "skipped")


def _summed(before: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's final report over all parts of a run: seconds, counts and bytes are added up."""
    total = dict(data)
    if not before:
        return total
    for name in _ADDED:
        total[name] += before[name]
    for name in ("bytes_sent", "bytes_received"):
        total[name] = {k: count + before[name].get(k, 0) for k, count in data[name].items()}
    return total | {"first_event_g": before["first_event_g"]}


def _mean(
    parts: Sequence[MicroBatch], values: Mapping[int, tuple[float, float]], lacking: Mapping[int, float] | None = None
) -> float:
    """The mean over a batch's micro-batches, weighted by the number of terms where there are any, else by rows.

    Args:
        parts: the batch's micro-batches.
        values: micro-batch to (value, number of terms summed).
        lacking: micro-batch to the part of its weight by rows that does not count.
    """
    terms, missing = sum(values[header.g][1] for header in parts), lacking or {}
    weights = [1.0 / terms if terms else header.weight - missing.get(header.g, 0.0) for header in parts]
    total = sum(values[header.g][0] * weight for header, weight in zip(parts, weights, strict=True))
    left = 1.0 - sum(missing.get(header.g, 0.0) for header in parts)
    return total / left if left else total
