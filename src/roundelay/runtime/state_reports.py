"""Hands over the state of a worker's stages when a checkpoint, an evaluation or the end of the run needs it.

A checkpoint's part is written by the worker itself, in a background thread, so that training waits only for the copy on
the CPU. What is gathered by the launcher travels in the report.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, final

import msgspec
import torch
from safetensors import SafetensorError

from roundelay.checkpoint.atomic_files import reason_of
from roundelay.checkpoint.held_state import HeldState, StateTable, encode
from roundelay.checkpoint.shards import Shard
from roundelay.checkpoint.stored_files import StoredState, unfinished_bytes, write_state
from roundelay.errors import DeadlineError, RoundelayError
from roundelay.ir.averages import EMA, EVALUATED
from roundelay.ir.micro_batch import MicroBatch
from roundelay.observe.state_digest import Sums, joined
from roundelay.runtime.grad_norm import GradNorms
from roundelay.runtime.processes.user_errors import unexpected
from roundelay.runtime.processes.worker_messages import Report, Reporter, failure
from roundelay.runtime.stage_state import Stage

Gathered = Literal["nothing", "weights", "everything"]
"""What the launcher gets of a state: weights are parameters, buffers, and the averages to evaluate with."""

AMOUNTS: tuple[Gathered, ...] = ("nothing", "weights", "everything")
"""From the least to the most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateUse:
    """What the states of the stages are needed for during a run.

    Args:
        folder: where each holder writes its part of a checkpoint; None if there are no checkpoints.
        shared: whether this process sees that folder; if not, the launcher gets its state and writes it.
        buffers: names of the buffers that a checkpoint has.
        after_epoch: what the launcher gathers at an epoch's end.
        at_end: what it gathers at the end of the run.
    """

    folder: Path | None = None
    shared: bool = True
    buffers: frozenset[str] = frozenset()
    after_epoch: Gathered = "nothing"
    at_end: Gathered = "everything"

    def saves(self, header: MicroBatch) -> bool:
        """Whether a checkpoint is written after this micro-batch's update."""
        return self.folder is not None and bool(header.saved or header.final)

    def gathers(self, header: MicroBatch) -> Gathered:
        """What the launcher gathers after this micro-batch's update."""
        return self.at_end if header.final else self.after_epoch if header.ends_epoch else "nothing"


class StateReport(msgspec.Struct, forbid_unknown_fields=True):
    """The data of a report of the kind ``state``.

    Args:
        header: the last micro-batch of the update.
        stage: whose state it is.
        table: what the launcher gathers or is to write; its tensors are the report's. None if nothing.
        gathered: whether the launcher gathers it.
        to_write: whether the launcher is to write it, as the holder does not see the folder.
        stored: the part of the checkpoint that the holder has written; None if it has not.
        unwritten: why it could not be written; empty if it could, or need not.
    """

    header: tuple[int, ...]
    stage: int
    table: StateTable | None = None
    gathered: bool = False
    to_write: bool = False
    stored: StoredState | None = None
    unwritten: str = ""


@final
class StateReporter:
    """Reports the state of a worker's stages.

    Args:
        worker: number of the worker.
        use: what it is needed for.
        report: called with the reports, also in a thread of its own.
    """

    def __init__(self, worker: int, use: StateUse, report: Reporter) -> None:
        self._worker, self._use, self._report = worker, use, report
        self._waiting: queue.SimpleQueue[tuple[HeldState, MicroBatch] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: of the state at the ``start`` and at the ``end``, where there are checkpoints
        self.sums: dict[str, Sums] = {}

    def note_sums(self, when: str, stage: Stage) -> None:
        """Note the sums of a stage's newest state, for the digest of all."""
        if self._use.folder is not None:
            self.sums[when] = joined([self.sums.get(when, {}), stage.state_sums(self._use.buffers)])

    def hand_over(self, stage: Stage, header: MicroBatch, norms: GradNorms | None) -> None:
        """Report the state after an update, if it is needed; a file for it is written in the background.

        Args:
            stage: has just made the update.
            header: the update's last micro-batch.
            norms: on stage 0, has what is in flight of norms and loss scales.
        """
        saves, gathers = self._use.saves(header), self._use.gathers(header) != "nothing"
        if header.final:
            self.note_sums("end", stage)
        if saves and self._use.shared:
            self._waiting.put((_held(stage, header, norms), header))
            self._start()
        elif saves or gathers:
            self._send(_held(stage, header, norms), header)
        elif header.final:
            own = HeldState(stage.spec.stage, {}, {}, {}, replica=stage.replica, holder=stage.holder)
            self._send(own, header)

    def finish(self, deadline_s: float) -> None:
        """Return when everything is written and reported.

        Raises:
            DeadlineError: no byte is written for as long as the deadline.
        """
        if self._thread is None:
            return
        self._waiting.put(None)
        before, now = None, self._progress()
        while self._thread.is_alive() and now != before:
            self._thread.join(deadline_s)
            before, now = now, self._progress()
        if self._thread.is_alive():
            raise DeadlineError(
                f"worker {self._worker}, writing its part of a checkpoint",
                got=f"no further byte within {deadline_s:g} s",
                expected="a disk that takes it within the plan's deadline_s",
                remedy=f"Check the disk of {self._use.folder}; raise deadline_s if it is only slow.",
            )

    def _progress(self) -> tuple[int, int]:
        """How many states wait, and the bytes of unfinished files."""
        assert self._use.folder is not None, "only then is anything written"
        return self._waiting.qsize(), unfinished_bytes(self._use.folder)

    def _start(self) -> None:
        """Start the thread with the first state to write: a worker is forked before that."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=f"states {self._worker}", daemon=True)
            self._thread.start()

    def _main(self) -> None:
        torch.set_num_threads(1)
        while (job := self._waiting.get()) is not None:
            try:
                self._write(*job)
            except RoundelayError as error:
                self._report(failure(self._worker, error))
            except Exception as error:  # otherwise the launcher would wait for the report
                self._report(failure(self._worker, unexpected(f"worker {self._worker}, its checkpoint", error)))

    def _write(self, held: HeldState, header: MicroBatch) -> None:
        assert self._use.folder is not None
        try:
            stored = write_state(
                self._use.folder, of_checkpoint(held, self._use.buffers), self._worker, header.batch + 1
            )
        except (OSError, SafetensorError) as error:
            self._send(held, header, unwritten=reason_of(error))
        else:
            self._send(held, header, stored)

    def _send(
        self, held: HeldState, header: MicroBatch, stored: StoredState | None = None, unwritten: str = ""
    ) -> None:
        """Report with what the launcher gathers; all of it, if the launcher is to write the state."""
        gathers, to_write = self._use.gathers(header), self._use.saves(header) and not self._use.shared
        sent = held if to_write else gathered_part(held, gathers)
        table, tensors = (None, {}) if sent is None else encode(sent)
        gathered = gathers != "nothing"
        report = StateReport(header.numbers(), held.stage, table, gathered, to_write, stored, unwritten)
        self._report(Report("state", self._worker, msgspec.to_builtins(report), tensors))


def of_checkpoint(held: HeldState, buffers: Collection[str]) -> HeldState:
    """The part of a holder's state that a checkpoint has: without the buffers that the model's ``state_dict`` lacks."""
    return replace(held, buffers={name: buffer for name, buffer in held.buffers.items() if name in buffers})


def gathered_part(held: HeldState, gathered: Gathered) -> HeldState | None:
    """The part of a holder's state that the launcher gathers; what is in flight never is."""
    if gathered == "nothing":
        return None
    optimizer = held.optimizer
    if gathered == "weights":
        averages = {n: {k: v for k, v in state.items() if k in (EMA, EVALUATED)} for n, state in optimizer.items()}
        optimizer = {name: state for name, state in averages.items() if state}
    return replace(held, optimizer=optimizer, flight=None)


def _held(stage: Stage, header: MicroBatch, norms: GradNorms | None) -> HeldState:
    updates = header.batch + 1
    if stage.replica and not stage.owned.split:
        flight = stage.flight(updates) if header.saved else None
        buffers = stage.own_buffers(updates)
        return HeldState(stage.spec.stage, {}, buffers, {}, flight, replica=stage.replica, holder=stage.holder)
    weights, states, buffers = stage.state(updates)
    if stage.holder:  # what all holders have is the first one's to report
        weights = {name: weight for name, weight in weights.items() if name in stage.owned.names}
        states = {name: state for name, state in states.items() if name in weights}
    flight = stage.flight(updates) if header.saved else None
    if flight is not None and norms is not None:
        flight = norms.in_flight(flight)
    return HeldState(
        stage.spec.stage,
        {name: Shard(stage.owned.ranges(name), weight) for name, weight in weights.items()},
        buffers,
        states,
        flight,
        None if norms is None or norms.scaler is None else norms.scaler.state,
        replica=stage.replica,
        holder=stage.holder,
    )
