"""Collect what all holders report of their state after one update: a snapshot, and the parts of a checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from roundelay.checkpoint.held_state import HeldState, decode, disagreement, join, missing_part
from roundelay.checkpoint.stored_files import StoredState
from roundelay.detect_launcher import LEADER
from roundelay.errors import InternalError
from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.processes.worker_messages import Report
from roundelay.runtime.report_data import misreported
from roundelay.runtime.state_reports import StateReport


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of all stages at one version, as far as the run gathers it.

    Args:
        header: the last micro-batch of its last update.
        parameters: by name; empty if nothing was gathered.
        buffers: by name, likewise.
        optimizer: state by parameter name; only the averages to evaluate with, if only weights were gathered.
        loss_scale: if dynamic: the next scale of stage 0, and the number of finite batches in a row; else None.
        replica_buffers: buffers of the replicas after the first, in order.
    """

    header: MicroBatch
    parameters: dict[str, torch.Tensor] = field(hash=False)
    buffers: dict[str, torch.Tensor] = field(hash=False)
    optimizer: dict[str, dict[str, Any]] = field(hash=False)
    loss_scale: tuple[float, int] | None = None
    replica_buffers: tuple[dict[str, torch.Tensor], ...] = field(default=(), hash=False)


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointParts:
    """What the holders report of one checkpoint.

    Args:
        stored: what they have written, in the order of stages.
        unstored: worker and state of holders that do not see the folder.
        unwritten: why one of them could not write its part; empty if all could.
    """

    stored: tuple[StoredState, ...]
    unstored: tuple[tuple[int, HeldState], ...]
    unwritten: str


MOST_VERSIONS = 256
"""Most versions of which not all holders have reported yet."""

OnComplete = Callable[[Snapshot, CheckpointParts], None]


class StateGatherer:
    """Takes the holders' reports of their state, in the order of their arrival.

    Args:
        holders: number of holders, each of which reports once per version.
        shapes: of the parameters that they have, whole, by name.
        on_complete: called when all holders have reported on one version.
        compares: whether holders of the same elements must agree in every bit.
        trusting: whether the other holders write parts of checkpoints themselves.
    """

    def __init__(
        self,
        holders: int,
        shapes: Mapping[str, Sequence[int]],
        on_complete: OnComplete,
        *,
        compares: bool = False,
        trusting: bool = True,
    ) -> None:
        self._trusting = trusting
        self._holders, self._shapes, self._on_complete, self._compares = holders, shapes, on_complete, compares
        self._parts: dict[int, list[_HolderState]] = defaultdict(list)

    def take(self, report: Report) -> None:
        """Take one report of the kind ``state``.

        Raises:
            InternalError: an element of a parameter is missing, or two holders of it disagree.
            RunError: the report cannot be true.
        """
        try:
            part = self._part(report)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise misreported(report, error) from error
        header = MicroBatch.of(part.report.header)
        parts = self._parts[header.g]
        if len(self._parts) > MOST_VERSIONS or any(
            (known.worker, known.report.stage) == (part.worker, part.report.stage) for known in parts
        ):
            raise misreported(report, f"stage {part.report.stage} after micro-batch {header.g}")
        parts.append(part)
        if len(parts) == self._holders:
            parts = sorted(self._parts.pop(header.g), key=lambda part: (part.report.stage, part.worker))
            self._on_complete(self._snapshot(header, parts), _checkpoint_parts(parts))

    def _part(self, report: Report) -> _HolderState:
        """What a holder reports, if it can be."""
        state = msgspec.convert(report.data, StateReport)
        MicroBatch.of(state.header)
        held = None if state.table is None else decode(state.table, report.tensors)
        for name, shard in () if held is None else held.parameters.items():
            whole = self._shapes[name]
            fits = len(shard.ranges) == len(whole) == shard.tensor.dim() and all(
                0 <= first <= end <= size for (first, end, *_), size in zip(shard.ranges, whole, strict=True)
            )
            if not fits:
                raise ValueError(f"{name} of shape {tuple(shard.tensor.shape)}")
        if state.stored is not None and not self._trusting and report.worker != LEADER:
            raise ValueError("a file that it says to have written")
        return _HolderState(report.worker, state, held)

    def _snapshot(self, header: MicroBatch, parts: Sequence[_HolderState]) -> Snapshot:
        """Join what was gathered; the first of several holders of the same counts."""
        states = [part.held for part in parts if part.held is not None and part.report.gathered]
        if not states:
            return Snapshot(header, {}, {}, {})
        missing = missing_part(self._shapes, [state.parameters for state in states])
        differing = disagreement(states) if self._compares else ""
        if missing or differing:
            raise InternalError(
                f"the stages' state after update {header.batch}",
                got=f"no holder of {missing}" if missing else f"two holders with different values of {differing}",
                expected="every element of every parameter, and the same values in all that hold it",
                remedy="Report this as a bug of Roundelay.",
            )
        joined = join(self._shapes, states)
        own = joined.parameters, joined.buffers, joined.optimizer
        return Snapshot(header, *own, joined.loss_scale, joined.replica_buffers)


@dataclass(frozen=True, slots=True, eq=False)
class _HolderState:
    """One holder's report, and the state that came with it."""

    worker: int
    report: StateReport
    held: HeldState | None


def _checkpoint_parts(parts: Sequence[_HolderState]) -> CheckpointParts:
    return CheckpointParts(
        tuple([part.report.stored for part in parts if part.report.stored is not None]),
        tuple([(part.worker, part.held) for part in parts if part.held is not None and part.report.to_write]),
        next((part.report.unwritten for part in parts if part.report.unwritten), ""),
    )
