"""Measure forward, backward and update of every operation on a micro-batch of the size that will be trained on.

Measuring each operation as a stage of its own would include the overhead of stage functions and copies at cuts that
are not made, which is most of the time of an operation of a few microseconds. So the whole model runs uncut, as one
stage: the forward is timed operation by operation, the backward from when autograd enters a node to when it enters the
next. A node belongs to the operation whose forward created it.

Seconds are this thread's CPU time, so that other programs on a busy machine do not count; with several intra-op
threads, for which this one waits, they are those of the clock. The minimum over a few runs is kept: disturbances only
make a measurement longer.
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
from roundelay.frontend.export.export_checks import autograd_nodes
from roundelay.ir.graph import Profile
from roundelay.planning.stage_profiler import time_update

BUDGET_S = 1.5
"""Seconds after which no further run begins."""


def measure_operations(captured: Captured, micro_batch: Batch, repeats: int = 5) -> Profile:
    """Measure a model's operations on one micro-batch; its buffers and gradients are not changed.

    Args:
        captured: the model.
        micro_batch: of the size that will be trained on.
        repeats: runs measured after a warm-up run, at most; :data:`BUDGET_S` may end them earlier.
    """
    began, sums = time.perf_counter(), dict[str, torch.Tensor]()
    _run(captured, micro_batch, sums)
    runs = [_run(captured, micro_batch, sums)]
    while len(runs) < repeats and time.perf_counter() - began < BUDGET_S:
        runs.append(_run(captured, micro_batch, sums))
    return Profile(*(tuple(map(min, zip(*part, strict=True))) for part in zip(*runs, strict=True)))


def operation_clock() -> Callable[[], float]:
    """The clock by which operations are timed."""
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter


def _run(captured: Captured, micro_batch: Batch, sums: dict[str, torch.Tensor]) -> tuple[list[float], ...]:
    """Seconds of each operation's forward, backward, update and adding to the sums; the loss is the last one."""
    forward = [0.0] * (len(captured.graph.ops) + 1)
    now = operation_clock()
    owners: dict[Any, int] = {}  # also keeps the nodes alive: autograd creates a new Python object for a dropped one

    def each(i: int, call: Callable[[], Any]) -> Any:
        start = now()
        output = call()
        forward[i] = now() - start
        _assign_nodes(output, i, owners)
        return output

    loss = captured.walk(micro_batch, each)
    gradients: dict[str, torch.Tensor] = {}
    backward = _backward(captured, loss, owners, gradients)
    return forward, backward, list(_updates(captured)), list(_additions(captured, gradients, sums))


def _assign_nodes(output: Any, i: int, owners: dict[Any, int]) -> None:
    """Assign to an operation every node below its outputs in the autograd graph that no earlier operation owns."""
    parts = output if isinstance(output, (tuple, list)) else (output,)
    for node in autograd_nodes((part for part in parts if isinstance(part, torch.Tensor)), owners):
        owners[node] = i


def _backward(
    captured: Captured, loss: torch.Tensor, owners: dict[Any, int], gradients: dict[str, torch.Tensor]
) -> list[float]:
    seconds = [0.0] * (len(captured.graph.ops) + 1)
    entered: list[tuple[float, int]] = []
    now = operation_clock()

    def enter(i: int, _: Any) -> None:
        entered.append((now(), i))

    for node, i in owners.items():
        node.register_prehook(partial(enter, i))
    trained = {name: p for name, p in captured.parameters().items() if p.requires_grad}
    found = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    gradients |= {name: one for name, one in zip(trained, found, strict=True) if one is not None}  # type: ignore[redundant-expr]
    for (start, i), (end, _) in pairwise((*entered, (now(), -1))):
        seconds[i] += end - start
    return seconds


def _updates(captured: Captured) -> Iterator[float]:
    """Seconds of a stand-in for the optimizer, over the parameters that each operation is the first to use."""
    parameters = captured.parameters()
    for op in captured.graph.ops:
        yield time_update([parameters.pop(name) for name in op.parameters if name in parameters], operation_clock())
    yield 0.0


def _additions(
    captured: Captured, gradients: dict[str, torch.Tensor], sums: dict[str, torch.Tensor]
) -> Iterator[float]:
    """Seconds of adding the gradients of the same parameters to their sums."""
    now = operation_clock()
    for op in captured.graph.ops:
        own = [(name, gradients.pop(name)) for name in op.parameters if name in gradients]
        start = now()
        for name, gradient in own:
            sums[name] = sums[name].add_(gradient) if name in sums else gradient.clone()
        yield now() - start
    yield 0.0
