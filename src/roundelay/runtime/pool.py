"""Workers that the threads of one process carry on in turns.

Python's lock lets one thread compute at a time but in torch's own code, so between short instructions a thread for each
worker gains nothing, and to wake it and to fetch what another core has written costs more than what it computes. So a
thread that has done all that one worker can do goes on with another that has been sent something, and wakes nobody for
it. Only before an instruction that is known to take long, or is not known yet, what else can go on is handed to another
thread: stages that compute for long do so side by side. There are as many threads as workers, so that as many can.

What is computed depends on none of this: order and versions are the machine's (:mod:`roundelay.actor.machine`). OneFlow
binds several actors to a thread as well (Sect. 5).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import final

import torch

from roundelay.actor.machine import Run
from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.device import Handlers
from roundelay.runtime.handlers import Context, Handler
from roundelay.transport.memory import MemoryEndpoint

LONG_S = 0.0005
"""An instruction that takes longer is worth a thread of its own."""

FADES = 1.02
"""By so much an instruction is expected to take longer than its last fastest one; what is slow now is soon known."""

LOOK_S = 0.005
"""So often it is looked whether a worker waits behind an instruction that takes longer than expected."""


@final
class Pool:
    """Carries workers on.

    Args:
        num_workers: D.
        deadline_s: a worker that nothing comes for in so many seconds is told so.
    """

    def __init__(self, num_workers: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._endpoints: Sequence[MemoryEndpoint] = ()
        self._loops: Sequence[Generator[bool, None, None]] = ()
        self._changed = threading.Condition()
        self._ready: deque[int] = deque()  # workers that can go on
        self._idle = [False] * num_workers
        self._wants_credit = [False] * num_workers  # of those that are idle
        self._since = [0.0] * num_workers
        self._left = num_workers  # that have not ended
        self._quick = num_workers  # threads that carry a worker on, and are in no long instruction
        self._stuck = False  # whether one of them is, against expectation
        self._carried_out = 0  # instructions, roughly: threads may count at the same time
        self._own: set[int] = set()  # identities of the threads

    def threads(
        self, endpoints: Sequence[MemoryEndpoint], loops: Sequence[Generator[bool, None, None]]
    ) -> list[threading.Thread]:
        """A thread for each worker, and one that looks after them; they end when all workers have ended.

        Args:
            endpoints: of the workers; they tell :meth:`wake`.
            loops: of the workers, which pause where they would wait.
        """
        self._endpoints, self._loops = endpoints, loops
        mains = [
            threading.Thread(target=self._main, args=(k,), name=f"worker {k}", daemon=True) for k in range(len(loops))
        ]
        return [*mains, threading.Thread(target=self._look_after, name="roundelay-pool", daemon=True)]

    def stop(self) -> None:
        """The run is over, or given up: threads that wait end, and the others when they are back."""
        with self._changed:
            self._left = 0
            self._changed.notify_all()

    def wake(self, worker: int, credit: bool) -> None:
        """Something has come for a worker: it can go on, sooner or later, when a thread of the pool has time for it."""
        if self._idle[worker] and (not credit or self._wants_credit[worker]):
            self._resume(worker, told=threading.get_ident() not in self._own)

    def paced(self, handlers: Handlers) -> Handlers:
        """Handlers that give what else can go on to another thread before they do what takes long."""
        return {opcode: self._paced(handler) for opcode, handler in handlers.items()}

    def _paced(self, handler: Handler) -> Handler:
        expected_s = math.inf

        def run(context: Context, run: Run) -> MicroBatch | None:
            nonlocal expected_s
            long = expected_s > LONG_S
            if long:
                self._leave(-1)
            start = time.perf_counter()
            try:
                header = handler(context, run)
            finally:
                if long:
                    self._leave(1)
            expected_s = min(FADES * expected_s, time.perf_counter() - start)
            self._carried_out += 1
            return header

        return run

    def _leave(self, count: int) -> None:
        """This thread begins something long, or is back."""
        with self._changed:
            self._quick += count
            if self._ready and not self._quick:
                self._changed.notify()

    def _main(self, worker: int) -> None:
        self._own.add(threading.get_ident())
        torch.set_num_threads(1)  # the number of intra-op threads is each thread's own where OpenMP keeps it
        given: int | None = worker
        while given is not None:
            self._carry_on(given)
            given = self._next()

    def _carry_on(self, worker: int) -> None:
        """Until there is nothing left to do for this worker."""
        endpoint = self._endpoints[worker]
        for wants_credit in self._loops[worker]:
            if endpoint.news(wants_credit):
                continue
            self._wants_credit[worker], self._since[worker] = wants_credit, time.monotonic()
            self._idle[worker] = True  # first: a sender sends, then looks whether this one is idle
            if endpoint.news(wants_credit):
                self._resume(worker)
            return
        with self._changed:
            self._left -= 1
            self._changed.notify_all()

    def _resume(self, worker: int, *, told: bool = False) -> None:
        """Put a worker that is idle among those that can go on.

        Args:
            worker: its number.
            told: wake a thread for it; else one that is at work takes it when it has time.
        """
        with self._changed:
            if self._idle[worker]:
                self._idle[worker] = False
                self._ready.append(worker)
                if told:
                    self._changed.notify()

    def _next(self) -> int | None:
        """A worker that can go on, once no other thread could carry it on as soon; None when all have ended."""
        with self._changed:
            self._quick -= 1
            while self._left > 0 and not (self._ready and (self._stuck or not self._quick)):
                self._changed.wait()
            if self._left <= 0:
                return None
            self._quick += 1
            self._stuck = False
            return self._ready.popleft()

    def _look_after(self) -> None:
        """Wake a thread for a worker that is kept waiting by another, and workers for which nothing has come."""
        seen = -1
        while self._left > 0:
            time.sleep(LOOK_S)
            if self._carried_out == seen and self._ready:
                with self._changed:
                    self._stuck = True
                    self._changed.notify()
            seen = self._carried_out
            late = time.monotonic() - self._deadline_s
            for worker, since in enumerate(self._since):
                if self._idle[worker] and since < late:
                    self._resume(worker, told=True)
