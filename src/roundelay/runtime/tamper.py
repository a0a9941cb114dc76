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

import torch

from roundelay.actor.machine import Run
from roundelay.errors import UsageError
from roundelay.frontend import RngKey
from roundelay.ir.graph import Graph
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.stage import Partition
from roundelay.runtime.handlers import Context, Handler, do_forward, do_update


class _Worker:
    """Handlers that do what they should; each way to break a run overrides some of them."""

    def __init__(self) -> None:
        self.before: dict[str, torch.Tensor] = {}  # the weights before the last update

    def forward(self, context: Context, run: Run) -> MicroBatch | None:
        return do_forward(context, run)

    def update(self, context: Context, run: Run) -> MicroBatch | None:
        self.before = {name: weight.detach().clone() for name, weight in context.stage.live().items()}
        return do_update(context, run)


class _Stash(_Worker):
    """Backward at the weights before the last update."""

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


class _TooFar(_Worker):
    """Forward at weights predicted one update too far."""

    def forward(self, context: Context, run: Run) -> MicroBatch | None:
        stage = context.stage
        right = stage.weights(run)
        if self.before:
            wrong = {n: w.detach() + (stage.live()[n].detach() - self.before[n]) for n, w in right.items()}
            stage.forward_weights = wrong
        result = do_forward(context, run)
        stage.forward_weights = None
        return result


class _Late(_Worker):
    """The update after the next forward instead of before it."""

    waiting: Run | None = None
    over = False

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


class _OtherSeed(_Worker):
    """Forward with the random numbers of another seed."""

    def forward(self, context: Context, run: Run) -> MicroBatch | None:
        seed = context.seed
        context.seed = seed + 1
        try:
            return do_forward(context, run)
        finally:
            context.seed = seed


class _Dropped(_Worker):
    """The second update of the run is left out."""

    updates = 0

    def update(self, context: Context, run: Run) -> MicroBatch | None:
        result = super().update(context, run)
        self.updates += 1
        if self.updates == 2:
            for name, parameter in context.stage.parameters.items():
                parameter.data = self.before[name]
        return result


_CLASSES: dict[str, type[_Worker]] = {
    "stash": _Stash,
    "s": _TooFar,
    "order": _Late,
    "rng": _OtherSeed,
    "drop-update": _Dropped,
}

WAYS = tuple(_CLASSES)


def tampered_handlers(way: str) -> dict[str, Handler]:
    """Handlers that break a run in one of the :data:`WAYS`."""
    broken = _CLASSES[way]()
    return {"forward": broken.forward, "update": broken.update}


def check_tamper(tamper: str | None) -> None:
    """Refuse an unknown way to tamper; None is accepted.

    Raises:
        UsageError: the way is unknown.
    """
    if tamper is not None and tamper not in WAYS:
        known = "one of " + ", ".join(WAYS)
        raise UsageError("--tamper", got=repr(tamper), expected=known, remedy="Choose one of these.")


def tampered_stage(way: str, graph: Graph, stages: Partition, batches: int | None) -> int:
    """The stage to break: the last one at which the way makes a difference.

    Args:
        way: one of :data:`WAYS`.
        graph: of the model.
        stages: its stages.
        batches: updates of the run; None if their number is not known.

    Raises:
        UsageError: the way makes no difference anywhere.
    """
    if way != "rng" and batches == 1:
        raise UsageError(
            f"--tamper {way}",
            got="a run of one update, in which it changes nothing",
            expected="at least two updates",
            remedy="Give --steps 2 or more.",
        )
    for spec in reversed(stages.stages):
        draws = any(op.draws >= 0 for part in spec.segments for op in graph.ops[part.start : part.stop])
        trains = any(graph.parameters[n].trainable for n in spec.parameters)
        if draws if way == "rng" else trains:
            return spec.stage
    raise UsageError(
        f"--tamper {way}",
        got="a model that " + ("draws no random numbers" if way == "rng" else "has no trainable parameter"),
        expected="a model on which it makes a difference",
        remedy="Choose another way to tamper.",
    )
