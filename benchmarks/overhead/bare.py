"""What any runtime pays at least: a 1F1B written out by hand for this model, without headers, credits, checks, trace.

No loss is computed, a constant gradient enters the last stage; data come from nowhere. Nothing that a person could use.
"""

from __future__ import annotations

import json
import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

ROWS = 4


class Ends(NamedTuple):
    """How one stage gets and gives activations and gradients."""

    take: Callable[[], torch.Tensor]
    give: Callable[[torch.Tensor], object]
    take_gradient: Callable[[], torch.Tensor]
    give_gradient: Callable[[torch.Tensor], object]


def over_threads(size: int, micro_batches: int, steps: int, width: int) -> float:
    """Milliseconds of CPU per worker and micro-batch, workers being threads that hand tensors over by queues."""
    ups = [queue.SimpleQueue[torch.Tensor]() for _ in range(size + 1)]
    downs = [queue.SimpleQueue[torch.Tensor]() for _ in range(size + 1)]
    used: dict[int, float] = {}

    def main(rank: int) -> None:
        torch.set_num_threads(1)
        ends = Ends(ups[rank].get, ups[rank + 1].put, downs[rank].get, downs[rank - 1].put)
        used[rank] = _train(rank, size, (micro_batches, steps, width), ends, time.thread_time)

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1e3 * sum(used.values()) / size


def over_gloo(size: int, micro_batches: int, steps: int, width: int) -> float:
    """The same, workers being processes that use ``torch.distributed``'s send and recv."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_forked(rank, size, Path(folder), (micro_batches, steps, width)) for rank in range(size)]
        codes = [os.waitpid(child, 0)[1] for child in children]
        assert not any(codes), f"a process failed: {codes}"
        return 1e3 * sum(json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)) / size


def _forked(rank: int, size: int, folder: Path, sizes: tuple[int, int, int]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        under_way: list[dist.Work | None] = []

        def receive(source: int) -> torch.Tensor:
            tensor = torch.empty(ROWS, sizes[2])
            dist.recv(tensor, source)
            return tensor

        ends = Ends(
            lambda: receive(rank - 1),
            lambda tensor: under_way.append(dist.isend(tensor, rank + 1)),
            lambda: receive(rank + 1),
            lambda tensor: under_way.append(dist.isend(tensor, rank - 1)),
        )
        (folder / f"{rank}.json").write_text(json.dumps(_train(rank, size, sizes, ends, time.process_time, under_way)))
        dist.barrier()
        status = 0
    finally:
        os._exit(status)


def _train(
    rank: int,
    size: int,
    sizes: tuple[int, int, int],
    ends: Ends,
    clock: Callable[[], float],
    under_way: list[dist.Work | None] | None = None,
) -> float:
    """Seconds per micro-batch, by ``clock``, of all steps but the first quarter."""
    micro_batches, steps, width = sizes
    layer = torch.nn.Linear(width, width)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    lag, warm = size - 1 - rank, steps // 4
    start = clock()
    for step in range(steps):
        if step == warm:
            start = clock()
        tapes: list[tuple[torch.Tensor, torch.Tensor]] = []
        for i in range(micro_batches + lag):
            if i < micro_batches:
                tapes.append(_forward(rank, size, layer, ends))
            if i >= lag:
                _backward(rank, size, layer, tapes.pop(0), ends)
        optimizer.step()
        optimizer.zero_grad()
        for work in under_way or ():
            assert work is not None
            work.wait()
        if under_way:
            under_way.clear()
    return (clock() - start) / ((steps - warm) * micro_batches)


def _forward(rank: int, size: int, layer: torch.nn.Linear, ends: Ends) -> tuple[torch.Tensor, torch.Tensor]:
    x = ends.take().requires_grad_() if rank else torch.randn(ROWS, layer.in_features)
    y = torch.nn.functional.linear(x, layer.weight, layer.bias)
    if rank < size - 1:
        ends.give(y.detach())
    return x, y


def _backward(
    rank: int, size: int, layer: torch.nn.Linear, tape: tuple[torch.Tensor, torch.Tensor], ends: Ends
) -> None:
    x, y = tape
    gradient = ends.take_gradient() if rank < size - 1 else torch.full_like(y, 0.25)
    leaves = [*([x] if rank else []), layer.weight, layer.bias]
    grads = torch.autograd.grad(y, leaves, gradient)
    if rank:
        ends.give_gradient(grads[0])
    for parameter, grad in zip(layer.parameters(), grads[-2:], strict=True):
        if parameter.grad is None:
            parameter.grad = grad
        else:
            parameter.grad.add_(grad)
