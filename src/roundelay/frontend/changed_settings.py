"""Refuse changes that the rest of the user's program makes to the model while it trains.

A graph is fixed to the settings at capture: which parameters are trained, which submodules are in eval mode, every
number and string in an attribute (dropout's p, a temperature). A loader, ``evaluate`` or a callback that changes one of
them would change plain PyTorch's training, and have no effect here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch

from roundelay.errors import JobError
from roundelay.reach.reachable_state import ReachableState, SlotId, StateSlot

_KINDS = (bool, int, float, str, type(None))
_ABSENT = object()

_REMEDIES = {
    "requires_grad": "To train more of the model from some epoch on: train up to there, change it in job(), and "
    "continue with --from RUN.",
    "training": "Put parts of the model in eval mode in job() only; `evaluate` gets the whole model in eval mode.",
}
_OTHER_REMEDY = (
    "Give what varies from update to update as a tensor or a number in the batch, or let forward compute it from a "
    "counter in a buffer. A progress bar or a meter is not needed: the run shows its progress, metrics are returned by "
    "the loss, and train(on_update=...) gets both."
)


@final
class ExternalMutations:
    """The settings a model was captured with, and a check that they have not changed.

    Args:
        model: the model.
        excluded: places of slots that the forward, the loss or ``inputs`` change themselves: not settings.
        functions: name and function of the loss and ``inputs``; numbers and strings that they read are settings.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        excluded: Collection[SlotId] = (),
        functions: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._attributes = list(_attributes(model, set(excluded)))
        self._slots = list(_slots(ReachableState([("model", model), *functions]), set(excluded), model))
        self._turns = 0  # odd while an evaluation has the model in eval mode
        self._trained = [(name, p, p.requires_grad) for name, p in model.named_parameters()]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend :meth:`check` while an evaluation has the model in eval mode."""
        self._turns += 1
        try:
            yield
        finally:
            self._turns += 1

    def check(self) -> None:
        """Refuse a model whose settings have changed; does not wait for an evaluation in another thread.

        Raises:
            JobError: naming the setting, its old and its new value.
        """
        turns = self._turns
        if turns % 2 == 0 and (difference := self._difference()) is not None and turns == self._turns:
            path, before, now = difference
            raise JobError(
                f"{path}, changed by the job while it trains (by batches, evaluate or a callback)",
                got=repr(now),
                expected=f"{before!r}, as when the model was captured: stages would keep using it",
                remedy=_REMEDIES.get(path.rsplit(".", 1)[-1], _OTHER_REMEDY),
            )

    def _difference(self) -> tuple[str, Any, Any] | None:
        for path, entries, key, value in self._attributes:
            now = entries.get(key, _ABSENT)
            if now is not value and now != value and not (now != now and value != value):
                return f"{path}.{key}", value, "nothing" if now is _ABSENT else now
        for slot, value in self._slots:
            now = slot.read()
            if now is not value and now != value and not (now != now and value != value):
                return slot.path, value, now
        for name, parameter, trained in self._trained:
            if parameter.requires_grad != trained:
                return f"model.{name}.requires_grad", trained, parameter.requires_grad
        return None


def _attributes(model: torch.nn.Module, excluded: Collection[SlotId]) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    for name, module in model.named_modules():
        entries = module.__dict__
        for key, value in entries.items():
            if isinstance(value, _KINDS) and (id(module), "attribute", key) not in excluded:
                yield f"model.{name}" if name else "model", entries, key, value


def _slots(
    state: ReachableState, excluded: Collection[SlotId], model: torch.nn.Module
) -> Iterator[tuple[StateSlot, Any]]:
    """Numbers and strings outside the model that the forward, the loss or ``inputs`` read by name and never set."""
    own, (read, written) = {id(module) for module in model.modules()}, state.names()
    for place, slot in state.slots.items():
        if place in excluded or id(slot.holder) in own or slot.kind not in ("attribute", "item", "cell", "class"):
            continue
        value = slot.read()
        known = slot.kind == "cell" or not isinstance(slot.key, str) or slot.key in read
        if isinstance(value, _KINDS) and known and slot.key not in written:
            yield slot, value
