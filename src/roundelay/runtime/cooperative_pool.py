"""Workers that the threads of one process carry on in turns.

Python's lock lets one thread compute at a time but in torch's own code, so between short instructions a thread for each
worker gains nothing, and to wake it and to fetch what another core has written costs more than what it computes. So a
thread that has done all that one worker can do goes on with another that has been sent something, and wakes nobody for
it. Only before an instruction that is known to take long, or is not known yet, what else can go on is handed to another
thread: stages that compute for long do so side by side. There are as many threads as workers, so that as many can.

A thread is *at work* while it carries a worker on, and *away* while it does so in something long: one at a time is at
work, any number are away. What is computed depends on none of this: order and versions are the machine's
(:mod:`roundelay.actor.machine`). OneFlow binds several actors to a thread as well (Sect. 5).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch

from roundelay.actor.machine import Run
from roundelay.ir.micro_batch import MicroBatch
from roundelay.runtime.device import Handlers
from roundelay.runtime.handlers import Context, Handler
from roundelay.runtime.worker import Loop
from roundelay.transport.memory import MemoryEndpoint

LONG_S = 0.0005
"""An instruction that takes longer is worth a thread of its own."""

RECENT = 32
"""An instruction is expected to take as long as the shortest of so many: where two threads are at work many are held
up, which does not make them long. One that is long but had nothing to do for once is known again after so many.
"""

LOOK_S = 0.005
"""So often it is looked whether a thread is in something that takes longer than expected."""


@dataclass(slots=True)
class _Seat:
    """What is known of one thread."""

    at_work: bool = False
    progress: int = 0  # turns begun and instructions ended


@final
class CooperativePool:
    """Carries workers on.

    Args:
        num_workers: D.
        deadline_s: a worker that nothing comes for in so many seconds is told so.
    """

    def __init__(self, num_workers: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._endpoints: Sequence[MemoryEndpoint] = ()
        self._loops: Sequence[Loop] = ()
        self._changed = threading.Condition()
        self._ready: deque[int] = deque()  # workers that can go on
        self._idle = [False] * num_workers
        self._wants_credit = [False] * num_workers  # of those that are idle
        self._since = [0.0] * num_workers  # of those that are idle
        self._unfinished = num_workers  # workers that have not ended
        self._at_work = 0  # threads
        self._seats = [_Seat() for _ in range(num_workers)]  # of the threads
        self._by_identity: dict[int, _Seat] = {}

    def threads(self, endpoints: Sequence[MemoryEndpoint], loops: Sequence[Loop]) -> list[threading.Thread]:
        """One that looks after the others, and one for each worker; they end when all workers have ended.

        Args:
            endpoints: of the workers; they tell :meth:`wake`.
            loops: of the workers.
        """
        self._endpoints, self._loops = endpoints, loops
        mains = [
            threading.Thread(target=self._main, args=(k,), name=f"roundelay-{k}", daemon=True)
            for k in range(len(loops))
        ]
        return [threading.Thread(target=self._look_after, name="roundelay-pool", daemon=True), *mains]

    def stop(self) -> None:
        """The run is over, or given up: threads that wait end, and the others when they are back."""
        with self._changed:
            self._unfinished = 0
            self._changed.notify_all()

    def wake(self, worker: int, credit: bool) -> None:
        """Something has come for a worker: it can go on, sooner or later, when a thread of the pool has time for it."""
        if self._idle[worker] and (not credit or self._wants_credit[worker]):
            self._resume(worker, wake_thread=threading.get_ident() not in self._by_identity)

    def yielding(self, handlers: Handlers) -> Handlers:
        """Handlers that give what else can go on to another thread before they do what takes long."""
        return {opcode: self._yielding(handler) for opcode, handler in handlers.items()}

    def _yielding(self, handler: Handler) -> Handler:
        recent = deque([math.inf], RECENT)  # seconds

        def run(context: Context, run: Run) -> MicroBatch | None:
            seat = self._by_identity[threading.get_ident()]
            _settle()
            if min(recent) > LONG_S:
                self._leave(seat)
            start = time.perf_counter()
            try:
                return handler(context, run)
            finally:
                recent.append(time.perf_counter() - start)
                seat.progress += 1
                if not seat.at_work:
                    self._begin(seat)

        return run

    def _begin(self, seat: _Seat) -> None:
        """A thread is at work; perhaps beside another, if it was away."""
        with self._changed:
            self._at_work += not seat.at_work
            seat.at_work = True

    def _leave(self, seat: _Seat) -> None:
        """A thread is at work no more; if nobody is, another comes to what can go on."""
        with self._changed:
            self._at_work -= seat.at_work
            seat.at_work = False
            if self._ready and not self._at_work:
                self._changed.notify()

    def _main(self, worker: int) -> None:
        seat = self._by_identity[threading.get_ident()] = self._seats[worker]
        self._begin(seat)
        given: int | None = worker
        while given is not None:
            _settle()
            self._carry_on(given)
            given = self._next(seat)

    def _carry_on(self, worker: int) -> None:
        """Until there is nothing left to do for this worker."""
        endpoint = self._endpoints[worker]
        for wants_credit in self._loops[worker]:
            if endpoint.has_delivery(wants_credit):
                continue
            self._wants_credit[worker], self._since[worker] = wants_credit, time.monotonic()
            self._idle[worker] = True  # first: a sender sends, then looks whether this one is idle
            if endpoint.has_delivery(wants_credit):
                self._resume(worker)
            return
        with self._changed:
            self._unfinished -= 1
            self._changed.notify_all()

    def _resume(self, worker: int, *, wake_thread: bool = False) -> None:
        """Put a worker that is idle among those that can go on, if it can.

        What it was to be told of may be gone by now: another thread may have carried it on to its next pause. While it
        is idle nobody takes anything from its endpoint, so what is there now will be there.

        Args:
            worker: its number.
            wake_thread: wake a thread for it; else one that is at work takes it when it has time.
        """
        with self._changed:
            if not self._idle[worker]:
                return
            if self._endpoints[worker].has_delivery(self._wants_credit[worker]) or self._late(worker):
                self._idle[worker] = False
                self._ready.append(worker)
                if wake_thread:
                    self._changed.notify()

    def _late(self, worker: int) -> bool:
        return time.monotonic() - self._since[worker] > self._deadline_s

    def _next(self, seat: _Seat) -> int | None:
        """A worker that can go on, when no thread is at work that would come to it; None when all have ended."""
        with self._changed:
            self._at_work -= seat.at_work
            seat.at_work = False
            while self._unfinished > 0 and (self._at_work or not self._ready):
                self._changed.wait()
            if self._unfinished <= 0:
                return None
            self._at_work += 1
            seat.at_work = True
            seat.progress += 1
            return self._ready.popleft()

    def _look_after(self) -> None:
        """Hand over what waits behind a thread that is in something long unexpectedly; tell who waits in vain."""
        seen = [-1] * len(self._seats)
        while self._unfinished > 0:
            time.sleep(LOOK_S)
            for number, seat in enumerate(self._seats):
                if seat.at_work and seen[number] == seat.progress and self._ready:
                    self._leave(seat)
                seen[number] = seat.progress
            with self._changed:  # one that was away for a moment outside of its instructions told nobody what it sent
                if self._ready and not self._at_work:
                    self._changed.notify()
            for worker in range(len(self._idle)):
                if self._idle[worker] and self._late(worker):
                    self._resume(worker, wake_thread=True)


def _settle() -> None:
    """Record gradients, on one intra-op thread, whatever other code has left set in this thread: it is shared.

    The number of intra-op threads is each thread's own where OpenMP keeps it.
    """
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
