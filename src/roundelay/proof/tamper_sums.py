"""Ways to break a run in how the gradients of a batch are summed; see :mod:`roundelay.proof.tamper`."""

from __future__ import annotations

from typing import final

import torch

from roundelay.actor.machine import Run
from roundelay.ir.micro_batch import MicroBatch
from roundelay.proof.tamper_ways import HOP, STALE_SUM
from roundelay.runtime.collectives import Parts
from roundelay.runtime.handlers import Context, Handler, do_backward, do_sum, do_update

Sums = tuple[dict[str, torch.Tensor], float]


@final
class _Hop:
    """A holder hands a sum on as it has come."""

    def handlers(self) -> dict[str, Handler]:
        return {"sum": self.sum}

    def sum(self, context: Context, run: Run) -> MicroBatch | None:
        context.stage.gradients.clear()
        return do_sum(context, run)


@final
class _StaleSum:
    """An update is made with the sums of the batch before."""

    last: Sums | None = None

    def handlers(self) -> dict[str, Handler]:
        return {"update": self.update}

    def update(self, context: Context, run: Run) -> MicroBatch | None:
        gradients, (sums, count) = context.stage.gradients, context.stage.gradients.replaced(None)
        own = {name: total.clone() for name, total in sums.items()}, count
        if self.last is not None:
            gradients.replaced(self.last)
        self.last = own
        return do_update(context, run)


@final
class _SumOrder:
    """Sums are added in another order: a + (b + c) in place of (a + b) + c.

    Args:
        holders: of the stage.
        several: whether the holder has several micro-batches of a batch.
    """

    def __init__(self, holders: int, *, several: bool) -> None:
        self.holders, self.several = holders, several
        self.first: Sums | None = None

    def handlers(self) -> dict[str, Handler]:
        return {"backward": self.backward} if self.several else {"sum": self.sum}

    def backward(self, context: Context, run: Run) -> MicroBatch | None:
        gradients, header = context.stage.gradients, run.header
        assert header is not None
        if header.index == 1:
            self.first = gradients.replaced(None)
            gradients.replaced(({}, self.first[1]))
        result = do_backward(context, run)
        if header.ends_batch and self.first is not None:
            gradients.add(self.first[0], run.g)
            self.first = None
        return result

    def sum(self, context: Context, run: Run) -> MicroBatch | None:
        gradients, key = context.stage.gradients, [(channel, run.g) for channel, _ in run.takes]
        before: Parts = context.inbox[key[0]].values if key else gradients.carried  # type: ignore[assignment]
        own = gradients.packed("replicas")
        if not own or not before:
            return do_sum(context, run)
        held_back = len(before) > len(own)
        last = context.stage.holder == self.holders - 1
        if held_back:
            pairs = zip(before[: len(own)], before[len(own) :], own, strict=True)
            sent: Parts = tuple([first + (second + third) for first, second, third in pairs])
        else:
            sent = tuple(map(torch.add, before, own)) if last else (*before, *own)
        gradients.clear()
        gradients.carried = () if key else sent
        if key:
            context.inbox[key[0]] = context.inbox[key[0]]._replace(values=sent)
        return do_sum(context, run)


def tampered_sums(way: str, holders: int, *, several: bool) -> dict[str, Handler]:
    """Handlers that break a run in how gradients are summed.

    Args:
        way: one of :data:`SUM_WAYS`.
        holders: of the stage.
        several: whether a holder has several micro-batches of a batch.
    """
    if way == HOP:
        return _Hop().handlers()
    return _StaleSum().handlers() if way == STALE_SUM else _SumOrder(holders, several=several).handlers()
