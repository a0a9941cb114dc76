"""What the rest of the person's program changes in the model while it trains: found, and refused.

A graph holds what was true when the model was captured: which parameters are trained, which parts are in eval mode,
every number and text in an attribute (dropout's p, a temperature). A loader, ``evaluate`` or a callback that changes
one of them changes plain PyTorch's training, and would change nothing here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch

from roundelay.errors import JobError
from roundelay.frontend.reachable_state import ReachableState, StateSlot

_KINDS = (bool, int, float, str, type(None))
_ABSENT = object()


@final
class ExternalMutations:
    """What a model was captured with.

    Args:
        model: the model.
        apart: places of slots that its own forward changes, or the functions.
        functions: the loss and ``inputs``, with their names for people; numbers and texts that they read are settings.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        apart: Collection[tuple[int, str, Any]] = (),
        functions: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self._attributes = list(_attributes(model, set(apart)))
        self._slots = list(_slots(ReachableState([("model", model), *functions]), set(apart), model))
        self._turns = 0  # odd while an evaluation has the model in eval mode
        self._trained = [(name, p, p.requires_grad) for name, p in model.named_parameters()]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """An evaluation has the model: what differs meanwhile is of that, and :meth:`check` passes it over."""
        self._turns += 1
        try:
            yield
        finally:
            self._turns += 1

    def check(self) -> None:
        """Refuse a model that has been changed since; without waiting for an evaluation in another thread.

        Raises:
            JobError: naming what, from what and to what.
        """
        turns = self._turns
        if turns % 2 == 0 and (found := self._found()) is not None and turns == self._turns:
            raise _changed(*found)

    def _found(self) -> tuple[str, Any, Any] | None:
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


def _attributes(
    model: torch.nn.Module, apart: Collection[tuple[int, str, Any]]
) -> Iterator[tuple[str, dict[str, Any], str, Any]]:
    for name, module in model.named_modules():
        entries = module.__dict__
        for key, value in entries.items():
            if isinstance(value, _KINDS) and (id(module), "attribute", key) not in apart:
                yield f"model.{name}" if name else "model", entries, key, value


def _slots(
    world: ReachableState, apart: Collection[tuple[int, str, Any]], model: torch.nn.Module
) -> Iterator[tuple[StateSlot, Any]]:
    """Numbers and texts outside of the model that the forward, the loss or ``inputs`` read, as far as names tell.

    Not those that they may set themselves, if only now and then.
    """
    own, read, theirs = {id(module) for module in model.modules()}, world.names_read(), world.names_set()
    for place, slot in world.slots.items():
        if place in apart or id(slot.holder) in own or slot.kind not in ("attribute", "item", "cell", "class"):
            continue
        value = slot.read()
        known = slot.kind == "cell" or not isinstance(slot.key, str) or slot.key in read
        if isinstance(value, _KINDS) and known and slot.key not in theirs:
            yield slot, value


def _changed(path: str, before: Any, now: Any) -> JobError:
    remedies = {
        "requires_grad": "To train more of the model from some epoch on: train up to there, change it in job(), and go "
        "on with --from RUN.",
        "training": "Put parts of the model in eval mode in job() alone; `evaluate` gets all of it in eval mode.",
    }
    return JobError(
        f"{path}, changed by the job while it trains (by batches, evaluate or a callback)",
        got=repr(now),
        expected=f"{before!r}, with which the model was captured: stages would go on with it",
        remedy=remedies.get(
            path.rsplit(".", 1)[-1],
            "Give what varies from update to update as a tensor in the batch, or let forward compute it from a buffer "
            "that counts.",
        ),
    )
