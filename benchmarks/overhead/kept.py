"""The loop by hand between threads (`bare.py`), with all that a run owes its users for every micro-batch, and no more.

Data are read on the first stage and targets sent to the last, a loss is computed there, checked and told; messages
bear a header and are checked against what was agreed; a slot of a channel is free before it is filled; every
instruction leaves an event with its times, micro-batch and bytes. All of it is written into the loop, for this one
model and this one schedule: no table of instructions, no function of its own for anything, no choice of transport, rule
or device.
"""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from typing import Any, NamedTuple

import torch

from benchmarks.overhead.bare import ROWS, in_threads

SLOTS = 8


class Pipe(NamedTuple):
    """A channel: messages one way, free slots the other."""

    messages: queue.SimpleQueue[Any]
    slots: queue.SimpleQueue[None]


def pipe() -> Pipe:
    """A channel with all slots free."""
    made = Pipe(queue.SimpleQueue(), queue.SimpleQueue())
    for _ in range(SLOTS):
        made.slots.put(None)
    return made


class Ends(NamedTuple):
    """The channels of one stage; those of the target join the first and the last."""

    take: Pipe
    give: Pipe
    take_gradient: Pipe
    give_gradient: Pipe
    target: Pipe


def over_threads(size: int, micro_batches: int, steps: int, width: int) -> float:
    """Milliseconds of CPU per worker and micro-batch."""
    ups, downs, target = [pipe() for _ in range(size + 1)], [pipe() for _ in range(size + 1)], pipe()
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    used: dict[int, float] = {}

    def main(rank: int) -> None:
        torch.set_num_threads(1)
        ends = Ends(ups[rank], ups[rank + 1], downs[rank], downs[rank - 1], target)
        used[rank] = train(rank, size, (micro_batches, steps, width), ends, told)

    in_threads(size, main)
    return 1e3 * sum(used.values()) / size


def train(rank: int, size: int, sizes: tuple[int, int, int], ends: Ends, told: queue.SimpleQueue[Any]) -> float:
    """Seconds of CPU per micro-batch, of all steps but the first quarter."""
    micro_batches, steps, width = sizes
    layer = torch.nn.Linear(width, width)
    weight, bias = layer.weight, layer.bias
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    data = (torch.randn(ROWS * micro_batches, width), torch.randn(ROWS * micro_batches, width))
    shape, lag, warm = (ROWS, width), size - 1 - rank, steps // 4
    first, last = rank == 0, rank == size - 1
    events: deque[tuple[Any, ...]] = deque(maxlen=100_000)
    start = time.thread_time()
    for step in range(steps):
        if step == warm:
            start = time.thread_time()
        tapes: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        inputs, targets = data[0].split(ROWS), data[1].split(ROWS)
        for i in range(micro_batches + lag):
            if i < micro_batches:
                g = step * micro_batches + i
                if first:
                    header, x = (g, step, i, micro_batches), inputs[i]
                    ends.target.slots.get()
                    ends.target.messages.put((header, targets[i]))
                else:
                    header, x = ends.take.messages.get()
                    assert header[0] == g and x.shape == shape and x.dtype is torch.float32
                began = time.perf_counter()
                x = x.detach().requires_grad_(not first)
                y = torch.nn.functional.linear(x, weight, bias)
                if last:
                    header, wanted = ends.target.messages.get()
                    assert header[0] == g and wanted.shape == shape and wanted.dtype is torch.float32
                    y = torch.nn.functional.mse_loss(y, wanted)
                    number = float(y)
                    assert math.isfinite(number)
                    told.put((g, number, header))
                    ends.target.slots.put(None)
                events.append(("forward", g, step, began, time.perf_counter(), 4 * ROWS * width))
                tapes.append((x, y))
                if not last:
                    ends.give.slots.get()
                    ends.give.messages.put((header, y.detach()))
                if not first:
                    ends.take.slots.put(None)
            if i >= lag:
                g = step * micro_batches + i - lag
                x, y = tapes.popleft()
                if last:
                    gradient = torch.full((), 1 / micro_batches)
                else:
                    header, gradient = ends.take_gradient.messages.get()
                    assert header[0] == g and gradient.shape == shape and gradient.dtype is torch.float32
                began = time.perf_counter()
                grads = torch.autograd.grad(y, (weight, bias) if first else (x, weight, bias), gradient)
                if weight.grad is None or bias.grad is None:
                    weight.grad, bias.grad = grads[-2:]
                else:
                    weight.grad.add_(grads[-2])
                    bias.grad.add_(grads[-1])
                events.append(("backward", g, step, began, time.perf_counter(), 4 * ROWS * width))
                if not first:
                    ends.give_gradient.slots.get()
                    ends.give_gradient.messages.put((header, grads[0]))
                if not last:
                    ends.take_gradient.slots.put(None)
        began = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        events.append(("update", g, step, began, time.perf_counter(), 0))
    return (time.thread_time() - start) / ((steps - warm) * micro_batches)
