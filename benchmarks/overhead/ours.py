"""Our worker with its computing written out by hand for the benchmark's model: machine and messages are what is left.

The worker's loop, the machine that the simulator drives too, channels with credits, headers and checks, the log and the
reports are Roundelay's. The handlers are not: they know the model, its layer and its loss, and call torch as `kept.py`
does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch

from roundelay.actor.machine import Run
from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.handlers import Context, do_read, do_update
from roundelay.runtime.processes.worker_messages import Report
from roundelay.transport.endpoint import Message

Handler = Callable[[Context, Run], MicroBatch | None]


def handlers(size: int, micro_batches: int, width: int) -> dict[int, dict[str, Handler]]:
    """For every stage, handlers of its own; good for one run."""
    return {stage: _ByHand(stage, size, micro_batches, width).handlers() for stage in range(size)}


@final
class _ByHand:
    """One stage: a linear layer, and behind the last one the mean squared error."""

    def __init__(self, stage: int, size: int, micro_batches: int, width: int) -> None:
        self.first, self.last, self.micro_batches = stage == 0, stage == size - 1, micro_batches
        layer = torch.nn.Linear(width, width)
        self.weight, self.bias = layer.weight, layer.bias
        self.optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
        self.tapes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def handlers(self) -> dict[str, Handler]:
        return {"read": do_read, "forward": self.forward, "backward": self.backward, "update": self.update}

    def forward(self, context: Context, run: Run) -> None:
        g, header = run.g, run.header
        assert header is not None
        values: dict[str, Any] = context.values.pop(g, {})
        for channel, _ in run.takes:
            values.update(zip(context.edges[channel][1].values, context.inbox.pop((channel, g)).values, strict=True))
        (name,) = (name for name in values if name != "batch.y")
        x = values[name].detach().requires_grad_(not self.first)
        y = torch.nn.functional.linear(x, self.weight, self.bias)
        if self.last:
            y = torch.nn.functional.mse_loss(y, values["batch.y"])
            loss = float(y.detach())
            assert math.isfinite(loss)
            told = {"g": g, "loss": loss, "count": 0.0, "header": header.numbers()}
            context.report(Report("loss", context.worker, told))
        self.tapes[g] = x, y
        for channel, _ in run.gives:
            given = [values.get(name) if name == "batch.y" else y.detach() for name in context.edges[channel][1].values]
            context.outbox[channel] = Message(channel, header.numbers(), tuple(given))

    def backward(self, context: Context, run: Run) -> None:
        g, header = run.g, run.header
        assert header is not None
        x, y = self.tapes.pop(g)
        gradient: Any = torch.full((), 1 / self.micro_batches)
        for channel, _ in run.takes:
            values = context.inbox.pop((channel, g)).values
            gradient = values[1] if len(values) > 1 else gradient
        leaves = (self.weight, self.bias) if self.first else (x, self.weight, self.bias)
        grads = torch.autograd.grad(y, leaves, gradient)
        for parameter, grad in zip((self.weight, self.bias), grads[-2:], strict=True):
            if parameter.grad is None:
                parameter.grad = grad
            else:
                parameter.grad.add_(grad)
        for channel, _ in run.gives:
            given = [grads[0] for _ in context.edges[channel][1].gradients]
            context.outbox[channel] = Message(channel, header.numbers(), (0.0, *given))

    def update(self, context: Context, run: Run) -> None:
        header = run.header
        assert header is not None
        self.optimizer.step()
        self.optimizer.zero_grad()
        if header.final or header.ends_epoch:
            do_update(context, run)  # hands over, as a run must: the stage's own weights, which nothing has trained
