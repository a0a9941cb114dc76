"""What a stage keeps so that a checkpoint can be made in mid-flight, and what it starts with when it resumes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch

from roundelay.actor.machine import Run
from roundelay.checkpoint.in_flight_state import ANY, Key, StageInFlight, Weights
from roundelay.frontend.stages.retarget_device import CPU
from roundelay.ir.micro_batch import MicroBatch
from roundelay.weight_prediction import LastStep


@final
class ResumeState:
    """The weights that forwards in flight have read, and the buffers after the last forward before a checkpoint.

    A batch's header says whether a checkpoint is due after its update. What a stage forwards between that batch's last
    forward and its update is in flight at the checkpoint: the weights of these forwards, and of no others, are kept
    until then. The checkpoint needs no copy: an update never writes weights that are kept.

    Args:
        start: what was in flight at the checkpoint from which the run resumes; None if the stage starts empty.
        device: the stage's device.
        anew: whether a resumed run begins a batch anew, with the version before the newest where a forward reads it.
    """

    def __init__(self, start: StageInFlight | None, device: torch.device = CPU, *, anew: bool = False) -> None:
        self._anew = anew
        self._due: set[int] = set()  # coming checkpoints, by updates made
        #: buffers by updates, of coming checkpoints and ends of epochs
        self.recorded: dict[int, Weights] = {}
        self._read: dict[int, tuple[int, int, Key]] = {}  # micro-batch: batch, version, which weights
        self._weights: dict[Key, Weights] = {}
        #: micro-batches whose forward is still to be replayed
        self.left = set() if start is None else set(start.versions)
        self._recalled = {} if start is None or not start.versions else _copies(start.weights, device)

    def replayed_weights(self, run: Run) -> Weights | None:
        """The weights of a forward that is replayed, or gathers some, after a checkpoint; None for any other."""
        if run.g not in self.left or not run.instruction.reads_forward:
            return None
        own = self._recalled.get((run.reads, run.distance, run.g))
        weights = self._recalled[run.reads, run.distance, ANY] if own is None else own
        if run.instruction.opcode == "forward" and run.instruction.runs_last:
            self.left.remove(run.g)
            if not self.left:
                self._recalled = {}
        return weights

    def record_forward(self, run: Run, header: MicroBatch, weights: Mapping[str, torch.Tensor]) -> None:
        """Keep a forward's weights if a checkpoint needs them."""
        if self._due and not self._anew:
            key = run.reads, run.distance, ANY
            if key in self._weights and not _same(
                self._weights[key], weights
            ):  # predicted from other gradients than before
                key = run.reads, run.distance, header.g
            self._read[header.g] = header.batch, run.version, key
            if key not in self._weights:  # detached: the update replaces a parameter's memory
                self._weights[key] = {name: weight.detach() for name, weight in weights.items()}

    def record_buffers(self, header: MicroBatch, buffers: Mapping[str, torch.Tensor]) -> None:
        """Keep the buffers after a batch's last forward, if they are needed after its update."""
        last = header.ends_batch or self._anew  # of this holder, if it comes to be the last
        if last and not header.final and (header.ends_epoch or header.saved):
            self.recorded[header.batch + 1] = dict(
                buffers
            )  # later forwards replace buffers, and do not write into them
            self._due |= {header.batch + 1} if header.saved else set()

    def held_addresses(self) -> set[int]:
        """Addresses of weights into which no update may write."""
        return {weight.data_ptr() for weights in self._weights.values() for weight in weights.values()}

    def buffers(self, updates: int) -> Weights | None:
        """The buffers after the last forward of the first ``updates`` batches; None if they are the current ones."""
        return self.recorded.pop(updates, None)

    def hand_over(
        self, updates: int, kept: Mapping[int, Weights], keep: int | None, last: Mapping[str, LastStep]
    ) -> StageInFlight:
        """What is in flight after ``updates`` updates, on the CPU; releases what no later checkpoint needs.

        Args:
            updates: made by the stage.
            kept: older versions that a later forward may read.
            keep: the oldest of them.
            last: every parameter's last update.
        """
        weights = self._weights | {(version, 0, ANY): weights for version, weights in kept.items()}
        flight = StageInFlight(
            versions={g: version for g, (_, version, _) in self._read.items()},
            weights={key: {n: w.to(CPU) for n, w in named.items()} for key, named in weights.items()},
            keep=keep,
            last=_moved(last, CPU, copy=False),
        )
        self._due.discard(updates)
        self._read = {g: note for g, note in self._read.items() if any(due <= note[0] for due in self._due)}
        needed = {key for _, _, key in self._read.values()}
        self._weights = {key: weights for key, weights in self._weights.items() if key in needed}
        return flight


def kept_at(start: StageInFlight | None, device: torch.device = CPU) -> dict[int, Weights]:
    """Older versions that will be read by forwards that were not in flight yet."""
    if start is None or start.keep is None:
        return {}
    kept = {key: weights for key, weights in start.weights.items() if not key[1] and key[0] >= start.keep}
    return {version: weights for (version, *_), weights in _copies(kept, device).items()}


def last_steps(start: StageInFlight, device: torch.device = CPU) -> dict[str, LastStep]:
    """Every parameter's last update."""
    return _moved(start.last, device, copy=True)


def _moved(last: Mapping[str, LastStep], device: torch.device, *, copy: bool) -> dict[str, LastStep]:
    def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device, copy=copy)

    return {name: LastStep(step.rate, move(step.displacement), move(step.gradient)) for name, step in last.items()}


def _copies(weights: Mapping[Key, Weights], device: torch.device) -> dict[Key, Weights]:
    """Copies in memory that torch has allocated: with a file's alignment, kernels may give other last bits."""
    return {key: {n: w.to(device, copy=True) for n, w in named.items()} for key, named in weights.items()}


def _same(kept: Weights, weights: Mapping[str, torch.Tensor]) -> bool:
    return all(kept[name].data_ptr() == weight.data_ptr() for name, weight in weights.items())
