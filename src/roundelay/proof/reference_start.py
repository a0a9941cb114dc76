"""Where the reference of a verification begins, and with which tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from roundelay.errors import UsageError
from roundelay.frontend import Captured
from roundelay.reference import ReferenceResult
from roundelay.runtime.loading.checkpoint_schedule import Extent
from roundelay.session.resume import values_digest
from roundelay.session.run_record import Computed
from roundelay.session.training import Session

Note = tuple[Computed, str]
"""A computation, and its digest."""


@dataclass(frozen=True, slots=True)
class ReferenceStart:
    """The model's own tensors, by name, before a checkpoint replaces them."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    replica_buffers: tuple[dict[str, torch.Tensor], ...] = ()

    def buffers_of(self, replica: int) -> dict[str, torch.Tensor]:
        """The buffers of a replica."""
        own = self.replica_buffers[replica - 1] if 0 < replica <= len(self.replica_buffers) else {}
        return self.buffers | own

    @staticmethod
    def of(captured: Captured) -> ReferenceStart:
        """Copies of the model's current tensors."""
        parameters = {n: p.detach().clone() for n, p in captured.model.named_parameters()}
        return ReferenceStart(parameters, {n: b.clone() for n, b in captured.buffers().items()})


FARTHEST = 512
"""Most updates before a checkpoint with empty stages that a reference repeats."""


def begins_at_update_0(session: Session, first: ReferenceStart | None) -> bool:
    """Whether the reference begins with update 0, and not with the checkpoint.

    It does where the session continues in mid-flight; and where the rule flushes, the checkpoint has at most
    :data:`FARTHEST` updates, and all of them were computed as the session computes, from the values that the job's
    model has now. Then the session is compared with a run that was never interrupted. Otherwise (another plan, a rule
    whose stages were drained at the run's end, other options of the optimizer) both begin with the checkpoint's
    weights, buffers and optimizer state, and the updates after it are compared.
    """
    if session.reading.free:  # whose letters begin where the run did
        return session.start is None
    if session.start is None or session.initial.flight is not None:
        return True
    if first is None or not session.began or session.start.position.updates > FARTHEST:
        return False
    return session.began.startswith(values_digest({**first.parameters, **first.buffers}) + "/")


def reference_start_of(session: Session, first: ReferenceStart | None) -> ReferenceStart:
    """The tensors that the reference begins with: the session's, or those of update 0.

    Raises:
        UsageError: the session continues in mid-flight, and its stages were last empty at an earlier checkpoint.
    """
    if session.start is not None and session.initial.flight is None and begins_at_update_0(session, first):
        assert first is not None
        return first
    if session.initial.flight is None or session.reading.free:
        now = ReferenceStart.of(session.captured)
        start = session.start
        parameters = now.parameters if start is None else {n: start.parameters[n].clone() for n in now.parameters}
        first_of_all, *others = ({n: b.clone() for n, b in own.items()} for own in session.initial.every_buffers)
        return ReferenceStart(parameters, first_of_all, tuple(others))
    if session.since or first is None:
        raise UsageError(
            "verifying from a checkpoint in mid-flight",
            got=f"a run whose stages were last empty after update {session.since}, at another checkpoint",
            expected="a run that has not been drained since its first update, where the reference begins",
            remedy="Verify from that other checkpoint, or without --from.",
        )
    return first


def since_checkpoint(
    session: Session, reference: ReferenceResult, notes: list[Note]
) -> tuple[ReferenceResult, list[Note]]:
    """The reference's results and digests since the checkpoint that the session continues from."""
    extent = session.extent
    begin = {"update": extent.start_batch, "forward": extent.start_g, "backward": extent.start_g}
    first = extent.start_g * session.plan.replicas
    losses = {number: loss for number, loss in reference.losses.items() if number >= first}
    metrics = {number: values for number, values in reference.metrics.items() if number >= first}
    scales = {number: scale for number, scale in reference.scales.items() if number >= first}
    return replace(reference, losses=losses, metrics=metrics, scales=scales), [
        note for note in notes if note[0][-1] >= begin[note[0][0]]
    ]


def from_update_0(extent: Extent) -> Extent:
    """The extent from update 0 to the same end."""
    batches = None if extent.batches is None else extent.start_batch + extent.batches
    return Extent(batches=batches, epochs=extent.epochs)
