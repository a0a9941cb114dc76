"""What the rest of the person's program changes in the model while it trains: found, and refused.

A graph holds what was true when the model was captured: which parameters are trained, which parts are in eval mode,
every number and text in an attribute (dropout's p, a temperature). A loader, ``evaluate`` or a callback that changes
one of them changes plain PyTorch's training, and would change nothing here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch

from roundelay.errors import JobError

_KINDS = (bool, int, float, str, type(None))
_ABSENT = object()


@final
class Settings:
    """What a model was captured with.

    Args:
        model: the model.
        apart: (id of the module, "attribute", name) of attributes that its own forward changes.
    """

    def __init__(self, model: torch.nn.Module, apart: Collection[tuple[int, str, Any]] = ()) -> None:
        self._attributes = list(_attributes(model, set(apart)))
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
            "Give what varies as a tensor in the batch, or let forward compute it from a buffer that counts.",
        ),
    )
