"""Breaks a run on purpose, to show that ``verify`` reports it.

Each way replaces handlers of one worker by ones that do something slightly wrong:

===============  =============================================================================
``stash``        backward differentiates at the weights of the version before
``s``            forward reads weights predicted one update too far
``order``        the update happens after the next forward instead of before it
``rng``          forward draws the random numbers of another seed
``drop-update``  the run's second update is left out
===============  =============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from roundelay.actor.machine import Run
from roundelay.frontend import RngKey
from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.handlers import Context, Handler, do_forward, do_update

WAYS = ("stash", "s", "order", "rng", "drop-update")


def tampered_handlers(way: str) -> dict[str, Handler]:
    """Handlers that break a run in one of the :data:`WAYS`."""
    return _CLASSES[way]().handlers()


class _Broken(Protocol):
    def handlers(self) -> dict[str, Handler]: ...


class _Stash:
    """Backward at the weights before the last update."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"forward": self.forward, "update": self.update}

    def forward(self, context: Context, run: Run) -> MicroBatch | None:
        stage = context.stage
        buffers = dict(stage.buffers)
        inputs: dict[str, object] = dict(context.entered.get(run.g, {}))
        for channel, _ in run.takes:
            inputs |= zip(context.edges[channel][1].values, context.inbox[channel, run.g].values, strict=True)
        result = do_forward(context, run)
        if self.before:
            known = {name: inputs[name] for name in stage.function.inputs}
            _, stage.tapes[run.g] = stage.function.forward(
                self.before, buffers, known, RngKey(context.seed, run.g), mode="stash"
            )
        return result

    def update(self, context: Context, run: Run) -> MicroBatch | None:
        self.before = _copies(context.stage.live())
        return do_update(context, run)


class _TooFar:
    """Forward at weights predicted one update too far."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"forward": self.forward, "update": self.update}

    def forward(self, context: Context, run: Run) -> MicroBatch | None:
        stage = context.stage
        right = stage.weights(run)
        if self.before:
            wrong = {n: w.detach() + (stage.live()[n].detach() - self.before[n]) for n, w in right.items()}
            stage.forward_weights = wrong
        result = do_forward(context, run)
        stage.forward_weights = None
        return result

    def update(self, context: Context, run: Run) -> MicroBatch | None:
        self.before = _copies(context.stage.live())
        return do_update(context, run)


class _Late:
    """The update after the next forward instead of before it."""

    def __init__(self) -> None:
        self.waiting: Run | None = None
        self.over = False

    def handlers(self) -> dict[str, Handler]:
        return {"forward": self.forward, "update": self.update}

    def forward(self, context: Context, run: Run) -> MicroBatch | None:
        context.stage.forward_weights = None if self.waiting is None else context.stage.live()
        result = do_forward(context, run)
        context.stage.forward_weights = None
        if self.waiting is not None:
            do_update(context, self.waiting)
            self.waiting = None
        self.over = run.header is not None and bool(run.header.final)
        return result

    def update(self, context: Context, run: Run) -> MicroBatch | None:
        if self.over:  # no forward follows
            return do_update(context, run)
        self.waiting = run
        return None


class _OtherSeed:
    """Forward with the random numbers of another seed."""

    def handlers(self) -> dict[str, Handler]:
        return {"forward": self.forward}

    def forward(self, context: Context, run: Run) -> MicroBatch | None:
        seed = context.seed
        context.seed = seed + 1
        try:
            return do_forward(context, run)
        finally:
            context.seed = seed


class _Dropped:
    """The second update of the run is left out."""

    def __init__(self) -> None:
        self.updates = 0

    def handlers(self) -> dict[str, Handler]:
        return {"update": self.update}

    def update(self, context: Context, run: Run) -> MicroBatch | None:
        self.updates += 1
        if self.updates != 2:
            return do_update(context, run)
        before = _copies(context.stage.live())
        do_update(context, run)
        with torch.no_grad():
            for name, parameter in context.stage.parameters.items():
                parameter.data = before[name]
        return None


def _copies(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}


_CLASSES: dict[str, Callable[[], _Broken]] = {
    "stash": _Stash,
    "s": _TooFar,
    "order": _Late,
    "rng": _OtherSeed,
    "drop-update": _Dropped,
}
