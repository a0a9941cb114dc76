"""Where a reference begins, and with what."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from roundelay.api.resume import values_digest
from roundelay.api.training import Session
from roundelay.errors import UsageError
from roundelay.frontend import Captured
from roundelay.reference import ReferenceResult
from roundelay.runtime.batch_reader import Extent

Note = tuple[tuple[str, int, int], str]
"""(kind, stage, number) of a computation, and its digest."""


@dataclass(frozen=True, slots=True)
class ReferenceStart:
    """The model's own tensors, by name, before a checkpoint takes their place."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]

    @staticmethod
    def of(captured: Captured) -> ReferenceStart:
        """Copies of what the model holds now."""
        parameters = {n: p.detach().clone() for n, p in captured.model.named_parameters()}
        return ReferenceStart(parameters, {n: b.clone() for n, b in captured.buffers().items()})


FARTHEST = 512
"""Updates before a checkpoint up to which a reference makes them again though the stages were empty at it."""


def begins_anew(session: Session, first: ReferenceStart | None) -> bool:
    """Whether the reference begins with the first update of all, and not with what a checkpoint says.

    It does where the session goes on in mid-flight; and where the rule flushes, the checkpoint lies no more than
    :data:`FARTHEST` updates behind the first, and all of these were computed as the session computes, from the values
    that the job's model has now. Then the session is compared with a run that was never interrupted. Else (another
    plan, a rule whose stages were drained at the run's end, other options of the optimizer) both begin with the
    checkpoint's weights, buffers and optimizer state, and what is compared are the updates behind it.
    """
    if session.start is None or session.initial.flight is not None:
        return True
    if first is None or not session.began or session.start.position.updates > FARTHEST:
        return False
    return session.began.startswith(values_digest({**first.parameters, **first.buffers}) + "/")


def reference_start_of(session: Session, first: ReferenceStart | None) -> ReferenceStart:
    """Where the reference begins: with the session, or with the first update; see :func:`begins_anew`.

    Raises:
        UsageError: the session goes on in mid-flight, and its stages were last empty behind another checkpoint.
    """
    if session.start is not None and session.initial.flight is None and begins_anew(session, first):
        assert first is not None
        return first
    if session.initial.flight is None:
        now = ReferenceStart.of(session.captured)
        start = session.start
        parameters = now.parameters if start is None else {n: start.parameters[n].clone() for n in now.parameters}
        return ReferenceStart(parameters, {n: b.clone() for n, b in session.initial.buffers.items()})
    if session.since or first is None:
        raise UsageError(
            "verifying from a checkpoint in mid-flight",
            got=f"a run whose stages were last empty after update {session.since}, at another checkpoint",
            expected="a run that has not been drained since its first update, which the reference begins with",
            remedy="Verify from that other checkpoint, or without --from.",
        )
    return first


def behind(session: Session, reference: ReferenceResult, notes: list[Note]) -> tuple[ReferenceResult, list[Note]]:
    """What the reference has done behind the checkpoint that the session goes on from."""
    extent = session.extent
    begin = {"update": extent.start_batch, "forward": extent.start_g, "backward": extent.start_g}
    losses = {g: loss for g, loss in reference.losses.items() if g >= extent.start_g}
    metrics = {g: told for g, told in reference.metrics.items() if g >= extent.start_g}
    scales = {g: scale for g, scale in reference.scales.items() if g >= extent.start_g}
    return replace(reference, losses=losses, metrics=metrics, scales=scales), [
        note for note in notes if note[0][2] >= begin[note[0][0]]
    ]


def from_the_first(extent: Extent) -> Extent:
    """To the same end, from the first update of all."""
    batches = None if extent.batches is None else extent.start_batch + extent.batches
    return Extent(batches=batches, epochs=extent.epochs)
