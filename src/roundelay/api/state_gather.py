"""Put together what workers report: losses per update, states of all stages, events, and the final account."""

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
    """One batch has been through the last stage, whose loss is known; told once per update, in their order.

    Args:
        update: its number t, from 0; a run that continues a checkpoint goes on counting.
        epoch: its epoch, from 0.
        loss: its mean loss.
        rows: its samples.
        samples_per_second: over the last few seconds.
        busy: share of its time, 0 to 1, that each worker has computed so far.
        learning_rates: of this update, one per parameter group of the optimizer.
        seconds: since this run began.
        metrics: what the job's loss returned beside the loss, weighed over the batch as the loss is.
        loss_scale: what its last micro-batch's loss was multiplied by; None where losses are not scaled.
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
    """The job's own metrics of the weights after ``updates`` updates."""

    updates: int
    epoch: int
    metrics: dict[str, float] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint has been written: of the weights after ``updates`` updates."""

    path: str
    updates: int


@dataclass(frozen=True, slots=True)
class NotSaved:
    """A checkpoint could not be written; the one before it is whole, and the training goes on."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Restarted:
    """A run that failed goes on from its last checkpoint.

    Args:
        number: which restart it is, from 1.
        updates: updates that the checkpoint has; those made after it are made again.
        cause: why the run failed.
    """

    number: int
    updates: int
    cause: str


@dataclass(frozen=True, slots=True)
class Drained:
    """A run that goes on from a checkpoint in mid-flight starts with empty stages: it is another run that follows.

    Args:
        micro_batches: how many were in flight, and are forwarded anew with the weights of the checkpoint.
        reason: what has changed.
    """

    micro_batches: int
    reason: str


@dataclass(frozen=True, slots=True)
class Stopping:
    """``evaluate`` or ``on_update`` has asked for the end: the batch that is read next is the run's last."""

    reason: str


@dataclass(frozen=True, slots=True)
class Skipped:
    """The gradients of a batch are not finite, so that stages skip its update.

    Args:
        update: its number.
        in_a_row: how many it is, with those before it.
        loss_scale: what its losses were multiplied by, at most.
    """

    update: int
    in_a_row: int
    loss_scale: float


Event = Updated | Evaluated | Saved | NotSaved | Restarted | Drained | Stopping | Skipped
Notify = Callable[[Event], None]
Rates = Callable[[int], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All stages at one version.

    Args:
        header: the last micro-batch that its updates have seen.
        parameters: by name.
        buffers: by name.
        optimizer: state by parameter name.
        flight: what every stage has in flight, if a checkpoint is to be made of it.
        loss_scale: a dynamic one: what stage 0 would give next, and the finite batches in a row behind it; else None.
    """

    header: MicroBatch
    parameters: dict[str, torch.Tensor] = field(hash=False)
    buffers: dict[str, torch.Tensor] = field(hash=False)
    optimizer: dict[str, dict[str, Any]] = field(hash=False)
    flight: tuple[StageInFlight, ...] | None = field(default=None, hash=False)
    loss_scale: tuple[float, int] | None = None


class StateGatherer:
    """Takes reports in the order they come.

    Args:
        num_stages: stages, each of which hands over its own state.
        num_workers: D.
        notify: told of every update.
        on_snapshot: told when every stage has handed over its state of one version, and each epoch's first batch.
        rates: from an update's number to its learning rates.
        kept: micro-batches of which loss, metrics and scale are kept; by default all.
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
        #: loss of every micro-batch, and terms summed in it (0 where the loss is a mean)
        self.micro_losses: dict[int, tuple[float, float]] = {}
        self.micro_lacking: dict[int, float] = {}  # of a micro-batch's share of the mean, for want of labels
        #: the same of every metric that the loss returns beside it
        self.micro_metrics: dict[int, dict[str, tuple[float, float]]] = {}
        #: what every micro-batch's loss was multiplied by; empty where losses are not scaled
        self.micro_scales: dict[int, float] = {}
        #: (update, epoch, mean loss, rows, seconds since the start)
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
            self.summaries[report.worker] = _together(self.summaries.get(report.worker, {}), data)
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
        made = Updated(
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
        self.updates.append(made)
        self.notify(made)
        for known in (self.micro_losses, self.micro_lacking, self.micro_metrics, self.micro_scales):
            _forget_oldest(known, self._kept)

    def _rate(self, rows: int) -> float:
        """Samples per second over the last few seconds."""
        now = self.times[-1]
        while now - self.times[self._recent] > 5.0 and self._recent < len(self.times) - 1:
            self._recent += 1
        first = self._recent
        seen = sum(u.rows for u in self.updates[first + 1 :]) + (rows if first < len(self.times) - 1 else 0)
        return seen / (now - self.times[first]) if now > self.times[first] else 0.0

    def _state(self, report: Report) -> None:
        header = MicroBatch.of(tuple(report.data["header"]))
        parts = self._states[header.g]
        parts.append(report)
        if len(parts) < self.num_stages:
            return
        whole = _joined(header, sorted(self._states.pop(header.g), key=lambda r: r.data["stage"]))
        self.on_snapshot(whole, self.epoch_starts)


def _forget_oldest(known: dict[int, Any], kept: int) -> None:
    """Have no more entries than so many."""
    while len(known) > kept:
        del known[next(iter(known))]


def samples_per_second(updates: Sequence[Updated]) -> float:
    """Over all updates of a run, its first tenth left out as a warm-up."""
    skip = max(1, len(updates) // 10)
    if len(updates) <= skip:
        return 0.0
    seconds = updates[-1].seconds - updates[skip - 1].seconds
    return sum(update.rows for update in updates[skip:]) / seconds if seconds > 0 else 0.0


def _joined(header: MicroBatch, parts: Sequence[Report]) -> Snapshot:
    """The states of all stages, in order, as one. A buffer that several have is the same in all: none changes it."""
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


def _together(before: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """A worker's account of all parts of a run: what it has spent is added up."""
    account = dict(data)
    if not before:
        return account
    for name in _ADDED:
        account[name] += before[name]
    for name in ("bytes_sent", "bytes_received"):
        account[name] = {k: count + before[name].get(k, 0) for k, count in data[name].items()}
    return account | {"first_event_g": before["first_event_g"]}


def _mean(
    parts: Sequence[MicroBatch], values: Mapping[int, tuple[float, float]], lacking: Mapping[int, float] | None = None
) -> float:
    """Of a batch's micro-batches, each (value, terms summed in it): by terms where there are any, else by rows.

    By rows, a micro-batch may lack some of its share.
    """
    terms, less = sum(values[header.g][1] for header in parts), lacking or {}
    weights = [1.0 / terms if terms else header.weight - less.get(header.g, 0.0) for header in parts]
    total = sum(values[header.g][0] * weight for header, weight in zip(parts, weights, strict=True))
    left = 1.0 - sum(less.get(header.g, 0.0) for header in parts)
    return total / left if left else total
