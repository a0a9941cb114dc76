"""Accumulates the gradients of one batch on one stage, and averages and clips them for the update."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch

from roundelay.ir.clip import EPSILON, Clip
from roundelay.ir.mesh import REPLICAS
from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.gradient_bucket import GradientBucket
from roundelay.runtime.state_bucket import StateBucket

Tensors = dict[str, torch.Tensor]


@final
class Gradients:
    """The sums of a batch's gradients, and the number that divides them.

    Args:
        names: names of the stage's parameters, in the order in which norms are computed.
        clip: how gradients are clipped.
        scaled: whether losses are scaled, so that sums may not be finite.
        shares: what :meth:`count` counts: True for weights in the batch's mean that ignored labels would have had, so
            that the divisor is 1 minus their sum; False for terms that the losses have summed.
        buckets: how they are exchanged with other holders of the stage, by axis.
        counted: names of those that count in the norm; by default all.
        due: those of which each replica gets a part of the batch's sums.
        made: for each segment, those of which it gets a part of each micro-batch's, which it adds up.
        copied: those of which other replicas have the same part.
        shard: which part this holder has.
    """

    def __init__(  # noqa: PLR0913
        self,
        names: Sequence[str],
        clip: Clip,
        *,
        scaled: bool = False,
        shares: bool = False,
        buckets: Mapping[str, GradientBucket] | None = None,
        counted: Sequence[str] | None = None,
        due: StateBucket | None = None,
        made: Sequence[StateBucket | None] = (),
        copied: StateBucket | None = None,
        shard: int = 0,
    ) -> None:
        self._names, self._clip, self._scaled, self._shares = names, clip, scaled, shares
        self._buckets, self._due, self._made, self._copied, self._shard = buckets or {}, due, made, copied, shard
        self._counted = names if counted is None else counted
        self._sums: Tensors = {}
        self._own: set[str] = set()  # names whose sum is a tensor of ours, which may be modified in place
        self._parts: Tensors = {}  # sums over all replicas of this one's parts
        self._apart = {name for bucket in made if bucket is not None for name in bucket.shapes}
        self._unsummed: dict[int, Tensors] = {}  # of these, by micro-batch, until they are exchanged
        self._own_parts: set[str] = set()
        self._count = 0.0
        #: sums of a batch over this holder and those before it, in flat tensors, that are not handed on yet
        self.carried: tuple[torch.Tensor, ...] = ()
        #: sums and count over all holders of the last batch that :meth:`total` was given
        self._total: tuple[Tensors, float] | None = None
        self._share = 0.0  # fraction of the batch's rows summed so far
        self.rows = 0
        """Rows of the micro-batches summed so far."""

    def add(self, gradients: Mapping[str, torch.Tensor], g: int) -> None:
        """Add the gradients of micro-batch ``g``; the first may be aliased and are never modified in place.

        Those of which each replica gets a part are kept until :meth:`scattered_parts` takes them out.
        """
        apart = {name: gradient for name, gradient in gradients.items() if name in self._apart}
        if apart:
            self._unsummed.setdefault(g, {}).update(apart)
            gradients = {name: gradient for name, gradient in gradients.items() if name not in apart}
        _add(self._sums, self._own, gradients)

    def note(self, header: MicroBatch) -> None:
        """Record that the backward of a micro-batch is done."""
        self.rows += header.rows
        self._share = self.rows / header.batch_rows

    def count(self, count: float) -> None:
        """Add the number of terms that a micro-batch's loss has summed, or the weight that its ignored labels take."""
        self._count += count

    def packed(self, axis: str, room: tuple[torch.Tensor, ...] | None = None) -> tuple[torch.Tensor, ...]:
        """This holder's sums, and what it has counted, in the flat tensors of an axis's bucket, or in those given.

        Over the replicas all of them; over an axis of the mesh those that are partial.
        """
        bucket, split = self._buckets[axis], set() if self._due is None else self._due.shapes.keys()
        if axis == REPLICAS:
            if not self._sums and not self.rows:
                return ()
            sums = {n: g for n, g in self._sums.items() if n not in split}
        else:
            sums = {n: g for n, g in self._sums.items() if n in bucket.shapes}
            if not sums:
                return ()
        return bucket.pack(sums, self._count, room)

    def unpack(self, axis: str, parts: tuple[torch.Tensor, ...]) -> None:
        """Take the sums over all holders along an axis, in its bucket's flat tensors, in place of this one's."""
        sums, count = self._buckets[axis].unpack(parts)
        self._sums |= sums
        self._own -= sums.keys()
        if axis == REPLICAS:
            self._count = count

    def scattered(self) -> tuple[torch.Tensor, ...]:
        """This replica's sums of those parameters of which each replica gets a part; none if it has none."""
        assert self._due is not None, "only then is anything scattered"
        return self._due.scattered({n: g for n, g in self._sums.items() if n in self._due.shapes})

    def reduced(self, rows: tuple[torch.Tensor, ...]) -> None:
        """Take the sums over all replicas of this one's parts in place of its own."""
        assert self._due is not None, "only then is anything scattered"
        own = self._due.own(rows, self._shard) if rows else {}
        self._sums |= own
        self._own -= own.keys()

    def scattered_parts(self, segment: int, g: int) -> tuple[torch.Tensor, ...]:
        """Take out a micro-batch's gradients of which each replica gets a part; none if there are none."""
        bucket, known = self._of_segment(segment), self._unsummed.get(g, {})
        gradients = {name: known.pop(name) for name in bucket.shapes if name in known}
        if not known:
            self._unsummed.pop(g, None)
        return bucket.scattered(gradients)

    def add_parts(self, segment: int, rows: tuple[torch.Tensor, ...]) -> None:
        """Add the sums over all replicas of a micro-batch's gradients, of this one's parts; if anybody had any."""
        if rows:
            _add(self._parts, self._own_parts, self._of_segment(segment).own(rows, self._shard))

    def copied(self) -> tuple[torch.Tensor, ...]:
        """This holder's part of a batch's sums over its group, for replicas with the same part; none if it has none."""
        assert self._copied is not None, "only then is anything exchanged"
        own = {n: g for n, g in (self._sums | self._parts).items() if n in self._copied.shapes}
        return tuple([row.flatten() for row in self._copied.packed(own)]) if own else ()

    def take_copied(self, rows: tuple[torch.Tensor, ...]) -> None:
        """Take the sums over all groups in place of its own group's."""
        assert self._copied is not None, "only then is anything exchanged"
        own = self._copied.own(tuple([row[None] for row in rows]), self._shard)
        self._sums = {n: g for n, g in self._sums.items() if n not in own}
        self._own -= own.keys()
        self._parts |= own
        self._own_parts -= own.keys()

    def _of_segment(self, segment: int) -> StateBucket:
        bucket = self._made[segment]
        assert bucket is not None, "only a segment with such gradients is exchanged"
        return bucket

    def keep_own(self) -> None:
        """Take what this replica itself has of its parts, without the others'; only to tamper with a run."""
        self.reduced(tuple([rows[self._shard : self._shard + 1] for rows in self.scattered()]))

    def added(
        self, before: tuple[torch.Tensor, ...], room: tuple[torch.Tensor, ...] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """End a batch: this holder's sums, in flat tensors, added to those of the holders before it.

        Args:
            before: of these, or none; nobody else has them any more, and they are written to.
            room: where to put this holder's, if it is the first.
        """
        if before and self._sums:
            self._buckets[REPLICAS].add(before, self._sums, self._count)
        else:
            before = self.packed(REPLICAS, room) or before
        self.clear()
        return before

    def total(self, parts: tuple[torch.Tensor, ...]) -> None:
        """Take the sums of a batch over all holders, for the next update."""
        assert self._total is None, "each total has its update before the next one comes"
        self._total = self._buckets[REPLICAS].unpack(parts)

    def replaced(self, sums: tuple[Tensors, float] | None) -> tuple[Tensors, float]:
        """Return the sums of the batch that is updated next, and put others in their place if given; only to tamper."""
        before = self._complete()
        if sums is not None and self._total is not None:
            self._total = sums
        elif sums is not None:
            (self._sums, self._count), self._own = sums, set()
            self._parts, self._own_parts = {}, set()
        return before

    def _complete(self) -> tuple[Tensors, float]:
        """The sums of the batch that is updated next, and what the losses have counted."""
        return (self._sums | self._parts, self._count) if self._total is None else self._total

    def held(self) -> list[torch.Tensor]:
        """Return all that is held of sums, whole or in parts."""
        totals = () if self._total is None else self._total[0].values()
        unsummed = [gradient for own in self._unsummed.values() for gradient in own.values()]
        return [*self._sums.values(), *unsummed, *self._parts.values(), *self.carried, *totals]

    def _divisor(self) -> float:
        """Return what divides the sums of a complete batch; 0 if nothing does."""
        count = self._complete()[1]
        return 1.0 - count if self._shares and count else count

    def square(self) -> float:
        """Return the squared 2-norm of the complete batch's mean gradients, before clipping."""
        sums, _ = self._complete()
        grads = [sums[n] for n in self._counted if n in sums]
        norm = float(_norm_of(grads)) if grads else 0.0
        divisor = self._divisor()
        norm = norm / divisor if divisor else norm
        return norm * norm

    def whole(self, norm: float | None) -> Tensors:
        """Return the complete batch's mean gradients, clipped, for its update.

        Args:
            norm: norm of the whole model's gradient to clip by; None if the plan does not clip by it or none is known.
        """
        sums, _ = self._complete()
        means = {n: sums[n] for n in self._names if n in sums}
        if divisor := self._divisor():
            means = {n: torch.div(total, divisor) for n, total in means.items()}
        return self._clipped(means, norm)

    def begun(self) -> Tensors:
        """Return the mean gradients of the batch so far, clipped if the plan clips by the stage's own norm.

        Empty if losses are scaled and the gradients are not finite, since the update will be skipped.
        """
        divisor = (self._share - self._count) or 1.0 if self._shares else self._count or self._share
        means = {n: torch.div(self._sums[n], divisor) for n in self._names if n in self._sums}
        if self._scaled and means and not math.isfinite(float(_norm_of(list(means.values())))):
            return {}
        return self._clipped(means, None)

    def drop(self) -> None:
        """Discard the gradients: the update of the batch is skipped."""
        self._sums, self._own = {}, set()
        self._parts, self._own_parts = {}, set()

    def updated(self) -> None:
        """Forget the batch of which an update has been made."""
        if self._total is None:
            self.clear()
        self._total = None

    def clear(self) -> None:
        """Reset for the next batch."""
        self.drop()
        self._count = self._share = 0.0
        self.rows = 0

    def _clipped(self, grads: Tensors, norm: float | None) -> Tensors:
        """Return clipped gradients; they may be aliased, so none is modified in place."""
        scale: torch.Tensor | float
        if self._clip.by == "stage" and grads:
            scale = torch.clamp(self._clip.norm / (_norm_of(list(grads.values())) + EPSILON), max=1.0)
        elif norm is not None:
            factor = self._clip.norm / (norm + EPSILON)
            scale = 1.0 if factor > 1.0 else factor  # NaN stays NaN
        else:
            return grads
        return {name: grad * scale for name, grad in grads.items()}


def _add(sums: Tensors, own: set[str], gradients: Mapping[str, torch.Tensor]) -> None:
    """Add to sums, of which ``own`` names those that may be modified in place."""
    for name, gradient in gradients.items():
        if name in own:
            sums[name].add_(gradient)
        elif name in sums:
            sums[name] = torch.add(sums[name], gradient)
            own.add(name)
        else:
            sums[name] = gradient


def _norm_of(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norm of all gradients together: the norm of their norms, in single precision, or that of doubles."""
    wide = any(grad.dtype in (torch.float64, torch.complex128) for grad in grads)
    kind = torch.float64 if wide else torch.float32
    norms = [torch.linalg.vector_norm(torch.view_as_real(g) if g.is_complex() else g, dtype=kind) for g in grads]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
