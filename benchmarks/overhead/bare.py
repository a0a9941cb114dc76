"""What any runtime pays at least: a 1F1B written out by hand for this model, nothing checked, kept or told.

`over_threads`, `over_pipes` and `over_gloo` differ in how tensors travel. No loss is computed, a constant gradient
enters the last stage; data come from nowhere. Nothing that a person could use. `kept.py` adds, written out in the same
way, what Roundelay owes its users for every micro-batch.
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

    in_threads(size, main)
    return 1e3 * sum(used.values()) / size


def in_threads(size: int, main: Callable[[int], None]) -> None:
    """Run ``main(rank)`` in a thread for each rank."""
    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def over_pipes(size: int, micro_batches: int, steps: int, width: int) -> float:
    """The same, workers being processes that write the bytes of a tensor into a pipe: a system call per message."""
    sizes = (micro_batches, steps, width)
    ups, downs = ([os.pipe() for _ in range(size + 1)] for _ in range(2))

    def take(pipe: tuple[int, int]) -> Callable[[], torch.Tensor]:
        count, source = 4 * ROWS * width, pipe[0]
        return lambda: torch.frombuffer(bytearray(os.read(source, count)), dtype=torch.float32).view(ROWS, width)

    def give(pipe: tuple[int, int]) -> Callable[[torch.Tensor], object]:
        target = pipe[1]
        return lambda tensor: os.write(target, tensor.numpy())

    def main(rank: int) -> float:
        ends = Ends(take(ups[rank]), give(ups[rank + 1]), take(downs[rank]), give(downs[rank - 1]))
        return _train(rank, size, sizes, ends, time.process_time)

    try:
        return _in_processes(size, lambda rank, folder: main(rank))
    finally:
        for pipe in (*ups, *downs):
            os.close(pipe[0])
            os.close(pipe[1])


def over_gloo(size: int, micro_batches: int, steps: int, width: int) -> float:
    """The same, workers being processes that use ``torch.distributed``'s send and recv."""
    sizes = (micro_batches, steps, width)

    def main(rank: int, folder: Path) -> float:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
        under_way: list[dist.Work | None] = []

        def receive(source: int) -> torch.Tensor:
            tensor = torch.empty(ROWS, width)
            dist.recv(tensor, source)
            return tensor

        ends = Ends(
            lambda: receive(rank - 1),
            lambda tensor: under_way.append(dist.isend(tensor, rank + 1)),
            lambda: receive(rank + 1),
            lambda tensor: under_way.append(dist.isend(tensor, rank - 1)),
        )
        used = _train(rank, size, sizes, ends, time.process_time, under_way)
        dist.barrier()
        return used

    return _in_processes(size, main)


def _in_processes(size: int, main: Callable[[int, Path], float]) -> float:
    """The mean, in milliseconds, of what ``main(rank, folder)`` tells in a forked process for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_forked(rank, Path(folder), main) for rank in range(size)]
        codes = [os.waitpid(child, 0)[1] for child in children]
        assert not any(codes), f"a process failed: {codes}"
        return 1e3 * sum(json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)) / size


def _forked(rank: int, folder: Path, main: Callable[[int, Path], float]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)
        (folder / f"{rank}.json").write_text(json.dumps(main(rank, folder)))
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
