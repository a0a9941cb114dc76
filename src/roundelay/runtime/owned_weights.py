"""What one holder of a stage updates: its parameters, or, of some, a part that it alone of the replicas updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from roundelay.checkpoint.shards import Ranges
from roundelay.frontend.worker_model import WorkerModel
from roundelay.ir.mesh import COPIES
from roundelay.ir.work import StageWork
from roundelay.runtime.state_bucket import StateBucket


@final
class OwnedWeights:
    """A stage's parameters as one holder updates them.

    Args:
        captured: the model; :attr:`Captured.states` says of which parameters each replica updates a part (ZeRO-1).
        own: the stage on this holder.
        shards: S, among how many replicas parameters are split.
        parameters: by name, what this worker of the mesh has of them; shared. Of those that are gathered before use,
            the part that this holder stores takes their place.
        segments: for each segment the names of its parameters.
    """

    def __init__(
        self,
        captured: WorkerModel,
        own: StageWork,
        shards: int,
        parameters: dict[str, torch.nn.Parameter],
        segments: Sequence[Sequence[str]],
    ) -> None:
        replica, part = own.replica, own.place
        self._captured, self._kept, self._part = captured, parameters, part
        self._place = shards, replica % shards
        #: names of parameters of which this holder updates a part
        self.split = {n for n in parameters if n in captured.states}
        #: what it updates, by name; where nothing is split, the parameters themselves
        self.weights = {
            n: torch.nn.Parameter(self._owned(n, p.detach()), p.requires_grad) if n in self.split else p
            for n, p in parameters.items()
        }
        exchanged = [(n, p.detach()) for n, p in parameters.items() if n in self.split and n not in own.unused]
        #: names of those that are gathered before each use
        self.stored = {n for n in self.split if captured.residences[n].is_gathered}
        updated = [(n, p) for n, p in exchanged if n not in self.stored]
        #: how replicas exchange what they have updated; None where each updates all
        self.bucket = _bucket(updated, captured, shards)
        self._segments = [
            _bucket(
                [(n, _as_gathered(captured, n, parameters[n])) for n in names if n in self.stored], captured, shards
            )
            for names in segments
        ]
        made = {n for n, residence in captured.residences.items() if residence.sums_parts}
        #: how they exchange a batch's gradients, and each segment's of a micro-batch; None where they exchange none
        self.due = _bucket([(n, p) for n, p in exchanged if n not in made], captured, shards)
        self.made = [
            _bucket([(n, p) for n, p in exchanged if n in made and n in names], captured, shards) for names in segments
        ]
        #: how replicas with the same parts add up their gradients of them; None where they exchange none
        copies = any(exchange.axis == COPIES for exchange in own.exchanges)
        self.copied = _bucket(exchanged, captured, shards) if copies else None
        #: those that it reports, and counts in norms: each part of a parameter has one such holder
        self.names = [
            n for n in parameters if (not part or captured.is_split(n)) and replica < (shards if n in self.split else 1)
        ]
        self._ranges = {n: captured.ranges(n, part, self._place) for n in parameters}
        #: whole weights of the segments that are in use, by name
        self.gathered: dict[str, torch.Tensor] = {}
        parameters |= {name: self.weights[name] for name in self.stored}

    def ranges(self, name: str) -> Ranges:
        """Where what this holder updates lies in the whole parameter."""
        return self._ranges[name]

    def state(self, name: str, whole: Mapping[str, Any], shape: torch.Size) -> Mapping[str, Any]:
        """This holder's optimizer state of a parameter of that shape: entries of its shape are split as it is."""
        return {
            key: self._owned(name, self._captured.local(name, value, self._part))
            if isinstance(value, torch.Tensor) and value.shape == shape
            else value
            for key, value in whole.items()
        }

    def packed(self) -> tuple[torch.Tensor, ...]:
        """What this replica has updated, for the others."""
        assert self.bucket is not None, "else each updates all"
        return self.bucket.packed(self.weights)

    def gather(self, rows: tuple[torch.Tensor, ...]) -> None:
        """Make the parameters of what all replicas have updated; tensors that a tape holds are not written to."""
        assert self.bucket is not None, "else each updates all"
        for name, weight in self.bucket.gathered(rows).items():
            self._kept[name].data = weight

    def packed_segment(self, segment: int, weights: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """This replica's parts of a segment's weights, of some version, for the others."""
        return self._of_segment(segment).packed(weights)

    def use(self, segment: int, rows: tuple[torch.Tensor, ...]) -> None:
        """Make a segment's weights whole, of all replicas' parts, until :meth:`drop`."""
        whole = self._of_segment(segment).gathered(rows)
        self.gathered |= {name: weight.to(self.weights[name].dtype) for name, weight in whole.items()}

    def drop(self) -> None:
        """Have whole weights no more of those that are gathered before each use."""
        self.gathered = {}

    def _of_segment(self, segment: int) -> StateBucket:
        bucket = self._segments[segment]
        assert bucket is not None, "only a segment with such weights is gathered"
        return bucket

    def _owned(self, name: str, local: torch.Tensor) -> torch.Tensor:
        return self._captured.owned(name, local, self._place)


def _as_gathered(captured: WorkerModel, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Of the shape and dtype in which a weight is gathered."""
    dtype = captured.residences[name].cast
    return torch.empty(weight.shape, dtype=getattr(torch, dtype) if dtype else weight.dtype, device="meta")


def _bucket(named: list[tuple[str, torch.Tensor]], captured: WorkerModel, shards: int) -> StateBucket | None:
    return StateBucket.of(named, captured.states, shards) if named else None
