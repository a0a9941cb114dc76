"""What the person's code does besides computing a loss from a batch, as capture has seen it."""

from __future__ import annotations

from dataclasses import dataclass

from roundelay.frontend.changed_settings import ExternalMutations
from roundelay.reach.reachable_state import Change


@dataclass(frozen=True, slots=True)
class SideEffects:
    """What a call of the person's code leaves behind, and what it takes for given.

    Args:
        settings: those at capture, which must not change.
        of_forward: slots that the forward changes, except buffers.
        of_loss: slots that the loss changes.
        written_by_inputs: batch fields that ``inputs`` writes into.
        written_by_forward: batch fields that the forward writes into.
        read_by_metric: the slot that the loss sets and one of its metrics reads in the next call, in words; or empty.
    """

    settings: ExternalMutations
    of_forward: tuple[Change, ...]
    of_loss: tuple[Change, ...]
    written_by_inputs: tuple[str, ...]
    written_by_forward: tuple[str, ...]
    read_by_metric: str = ""

    @property
    def changes(self) -> tuple[Change, ...]:
        """All changed slots."""
        return (*self.of_forward, *self.of_loss)

    @property
    def written(self) -> tuple[str, ...]:
        """All batch fields that are written into."""
        return (*self.written_by_inputs, *self.written_by_forward)
