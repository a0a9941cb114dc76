"""Measure every operation on a micro-batch of the size that will be trained on: forward, backward, update.

A stage per piece would be measured with the overhead of its own functions and with copies at cuts that will not be
made, which for pieces of a few microseconds is most of it. So the whole model runs once through, uncut, as in one
stage: a forward is timed operation by operation, and a backward from the moment at which autograd enters a node to
that at which it enters the next. The nodes belong to the operation whose forward made them.

Seconds are those of this thread on its core, so that other programs on a busy machine do not count. The least of a few
runs is kept: what disturbs a measurement makes it longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from roundelay.frontend.batch import Batch
from roundelay.frontend.capture import Captured
from roundelay.frontend.stage_profiler import touch
from roundelay.ir.graph import Profile

BUDGET_S = 1.5
"""No further run begins after this many seconds."""


def measure_operations(captured: Captured, micro_batch: Batch, repeats: int = 5) -> Profile:
    """The profile of a model on one micro-batch; its buffers and gradients stay as they are.

    Args:
        captured: the model.
        micro_batch: of the size that will be trained on.
        repeats: runs that count, at most, behind one to warm up; the budget may end them earlier.
    """
    began = time.perf_counter()
    _run(captured, micro_batch)
    runs = [_run(captured, micro_batch)]
    while len(runs) < repeats and time.perf_counter() - began < BUDGET_S:
        runs.append(_run(captured, micro_batch))
    return Profile(*(tuple(map(min, zip(*part, strict=True))) for part in zip(*runs, strict=True)))


def _run(captured: Captured, micro_batch: Batch) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each operation's forward, backward and update; the loss is the last one."""
    forward = [0.0] * (len(captured.graph.ops) + 1)
    owners: dict[Any, int] = {}  # keeps the nodes, too: another look at a node that nobody keeps is another object

    def each(i: int, call: Callable[[], Any]) -> Any:
        start = time.thread_time()
        made = call()
        forward[i] = time.thread_time() - start
        _claim(made, i, owners)
        return made

    loss = captured.walk(micro_batch, each)
    return forward, _backward(captured, loss, owners), list(_updates(captured))


def _claim(made: Any, i: int, owners: dict[Any, int]) -> None:
    """Give every node that nobody has yet, from what an operation made on down, to that operation."""
    parts = made if isinstance(made, (tuple, list)) else (made,)
    found = [part.grad_fn for part in parts if isinstance(part, torch.Tensor)]
    while found:
        node = found.pop()
        if node is not None and node not in owners:
            owners[node] = i
            found += [below for below, _ in node.next_functions]


def _backward(captured: Captured, loss: torch.Tensor, owners: dict[Any, int]) -> list[float]:
    seconds = [0.0] * (len(captured.graph.ops) + 1)
    entered: list[tuple[float, int]] = []

    def enter(i: int, _: Any) -> None:
        entered.append((time.thread_time(), i))

    for node, i in owners.items():
        node.register_prehook(partial(enter, i))
    leaves = [p for p in captured.parameters().values() if p.requires_grad]
    torch.autograd.grad(loss, leaves, allow_unused=True)
    for (start, i), (end, _) in pairwise((*entered, (time.thread_time(), -1))):
        seconds[i] += end - start
    return seconds


def _updates(captured: Captured) -> Iterator[float]:
    """Three passes over the parameters that each operation is the first to use, a stand-in for the optimizer."""
    parameters = captured.parameters()
    for op in captured.graph.ops:
        yield touch([parameters.pop(name) for name in op.parameters if name in parameters], time.thread_time)
    yield 0.0
