"""Several processes of global tensors in one: a thread each, with queues for their messages."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

Queues = defaultdict[tuple[int, int], "queue.SimpleQueue[torch.Tensor]"]

_TICK_S, _GRACE_S, _PATIENCE_S = 0.005, 0.1, 20.0


class Alone(Exception):
    """Another process has failed: what it would have sent does not come."""


class Done:
    """A message that has been sent."""

    def wait(self) -> None:
        """Nothing."""


class Ranks:
    """Processes of one program, simulated.

    Args:
        size: how many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size)
        self._own = threading.local()
        self._queues: Queues = defaultdict(queue.SimpleQueue)
        self._failed = threading.Event()

    @contextmanager
    def active(self) -> Iterator[Ranks]:
        """Within the block ``torch.distributed`` is these processes."""
        group = {"get_rank": self._rank, "isend": self._isend, "recv": self._recv}
        group |= {"is_initialized": lambda: True, "get_world_size": lambda: self.size}
        with mock.patch.multiple(dist, **group):
            yield self
        self._pool.shutdown()

    def run(self, call: Callable[[], Any]) -> list[Any]:
        """What a function returns in each of them, or the exception that it raises there."""
        self._queues, self._failed = defaultdict(queue.SimpleQueue), threading.Event()
        for source in range(self.size):
            for target in range(self.size):
                self._queues[source, target] = queue.SimpleQueue()
        return list(self._pool.map(lambda rank: self._as(rank, call), range(self.size)))

    def _as(self, rank: int, call: Callable[[], Any]) -> Any:
        self._own.rank = rank
        try:
            return call()
        except Exception as error:  # what is asked
            self._failed.set()
            return error

    def _rank(self) -> int:
        return int(self._own.rank)

    def _isend(self, tensor: torch.Tensor, to: int) -> Done:
        assert tensor.is_contiguous()
        self._queues[self._rank(), to].put(tensor.clone())
        return Done()

    def _recv(self, into: torch.Tensor, source: int) -> None:
        waited = 0.0
        while True:
            try:
                came = self._queues[source, self._rank()].get(timeout=_TICK_S)
                break
            except queue.Empty:
                waited += _TICK_S
                if (self._failed.is_set() and waited > _GRACE_S) or waited > _PATIENCE_S:
                    raise Alone(f"nothing from {source}") from None
        if came.shape != into.shape or came.dtype != into.dtype:
            raise AssertionError(f"{tuple(came.shape)} {came.dtype} came, and {tuple(into.shape)} {into.dtype} was due")
        into.copy_(came)
