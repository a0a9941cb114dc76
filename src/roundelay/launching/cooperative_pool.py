"""Runs the loops of several workers on a pool of threads that they share.

The GIL lets one thread compute at a time outside of torch's own code, so one thread per worker gains nothing on short
instructions, and waking it and moving data between cores costs more than the instruction. So a thread that has run one
worker until it must wait continues with another that has received something, without waking any thread. Only before an
instruction that is known to be long, or not known yet, are the other ready workers handed to another thread, so that
long stages compute in parallel. There are as many threads as workers, so that all can.

A thread is *at work* while it runs short instructions, and *away* during a long one: at most one is at work, any number
are away. The results do not depend on this: the machine determines order and versions (:mod:`roundelay.actor.machine`).
OneFlow binds several actors to a thread as well (Sect. 5).
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
from roundelay.runtime.workload import Loop
from roundelay.transport.memory import MemoryEndpoint

LONG_S = 0.0005
"""Seconds above which an instruction gets a thread of its own."""

RECENT = 32
"""An instruction is expected to take as long as the shortest of its last RECENT executions: contention may prolong many
of them, which does not make the instruction long. A long one that was short once counts as long again after so many.
"""

WATCH_S = 0.005
"""Seconds between the watchdog's checks for a thread whose instruction takes longer than expected."""


@dataclass(slots=True)
class _ThreadState:
    """The state of one thread."""

    at_work: bool = False
    progress: int = 0  # workers taken over and instructions ended


@final
class CooperativePool:
    """Runs the loops of workers on shared threads.

    Args:
        num_workers: D.
        deadline_s: seconds without a delivery after which a worker is resumed to raise its timeout.
    """

    def __init__(self, num_workers: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._endpoints: Sequence[MemoryEndpoint] = ()
        self._loops: Sequence[Loop] = ()
        self._condition = threading.Condition()
        self._ready: deque[int] = deque()  # workers that can continue
        self._idle = [False] * num_workers
        self._wants_credit = [False] * num_workers  # of idle workers
        self._since = [0.0] * num_workers  # of idle workers
        self._unfinished = num_workers  # workers that have not ended
        self._at_work = 0  # threads
        self._states = [_ThreadState() for _ in range(num_workers)]  # of the threads
        self._state_of_thread: dict[int, _ThreadState] = {}

    def threads(self, endpoints: Sequence[MemoryEndpoint], loops: Sequence[Loop]) -> list[threading.Thread]:
        """Create a watchdog thread and one thread per worker; they end when all workers have ended.

        Args:
            endpoints: of the workers; they call :meth:`wake`.
            loops: of the workers.
        """
        self._endpoints, self._loops = endpoints, loops
        mains = [
            threading.Thread(target=self._main, args=(k,), name=f"roundelay-{k}", daemon=True)
            for k in range(len(loops))
        ]
        return [threading.Thread(target=self._watch, name="roundelay-pool", daemon=True), *mains]

    def stop(self) -> None:
        """End the threads: waiting ones at once, the others after their current worker."""
        with self._condition:
            self._unfinished = 0
            self._condition.notify_all()

    def wake(self, worker: int, credit: bool) -> None:
        """Mark a worker as ready because its endpoint has received something."""
        if self._idle[worker] and (not credit or self._wants_credit[worker]):
            self._resume(worker, wake_thread=threading.get_ident() not in self._state_of_thread)

    def yielding(self, handlers: Handlers) -> Handlers:
        """Wrap handlers so that ready workers are handed to another thread before a long instruction."""
        return {opcode: self._yielding(handler) for opcode, handler in handlers.items()}

    def _yielding(self, handler: Handler) -> Handler:
        recent = deque([math.inf], RECENT)  # seconds

        def run(context: Context, run: Run) -> MicroBatch | None:
            state = self._state_of_thread[threading.get_ident()]
            _enable_gradients()
            if min(recent) > LONG_S:
                self._leave(state)
            start = time.perf_counter()
            try:
                return handler(context, run)
            finally:
                recent.append(time.perf_counter() - start)
                state.progress += 1
                if not state.at_work:
                    self._begin(state)

        return run

    def _begin(self, state: _ThreadState) -> None:
        """Note that a thread is at work; there may be another one if it was away."""
        with self._condition:
            self._at_work += not state.at_work
            state.at_work = True

    def _leave(self, state: _ThreadState) -> None:
        """Note that a thread is not at work; if none is, wake one for the ready workers."""
        with self._condition:
            self._at_work -= state.at_work
            state.at_work = False
            if self._ready and not self._at_work:
                self._condition.notify()

    def _main(self, worker: int) -> None:
        state = self._state_of_thread[threading.get_ident()] = self._states[worker]
        self._begin(state)
        current: int | None = worker
        while current is not None:
            _enable_gradients()
            self._advance(current)
            current = self._next(state)

    def _advance(self, worker: int) -> None:
        """Run a worker until it must wait or has ended."""
        endpoint = self._endpoints[worker]
        for wants_credit in self._loops[worker]:
            if endpoint.has_delivery(wants_credit):
                continue
            self._wants_credit[worker], self._since[worker] = wants_credit, time.monotonic()
            self._idle[worker] = True  # before the check: a sender sends, then checks whether this worker is idle
            if endpoint.has_delivery(wants_credit):
                self._resume(worker)
            return
        with self._condition:
            self._unfinished -= 1
            self._condition.notify_all()

    def _resume(self, worker: int, *, wake_thread: bool = False) -> None:
        """Move an idle worker to the ready ones if it can continue.

        The delivery that caused this call may have been consumed already: another thread may have run the worker until
        its next pause. While it is idle nobody takes anything from its endpoint, so a delivery found here stays there.

        Args:
            worker: its number.
            wake_thread: wake a thread for it; otherwise the thread at work takes it later.
        """
        with self._condition:
            if not self._idle[worker]:
                return
            if self._endpoints[worker].has_delivery(self._wants_credit[worker]) or self._timed_out(worker):
                self._idle[worker] = False
                self._ready.append(worker)
                if wake_thread:
                    self._condition.notify()

    def _timed_out(self, worker: int) -> bool:
        return time.monotonic() - self._since[worker] > self._deadline_s

    def _next(self, state: _ThreadState) -> int | None:
        """Wait for a ready worker while no other thread is at work; None when all workers have ended."""
        with self._condition:
            self._at_work -= state.at_work
            state.at_work = False
            while self._unfinished > 0 and (self._at_work or not self._ready):
                self._condition.wait()
            if self._unfinished <= 0:
                return None
            self._at_work += 1
            state.at_work = True
            state.progress += 1
            return self._ready.popleft()

    def _watch(self) -> None:
        """Watchdog: reassign ready workers from a thread stuck in a long instruction; resume workers that time out."""
        last_progress = [-1] * len(self._states)
        while self._unfinished > 0:
            time.sleep(WATCH_S)
            for number, state in enumerate(self._states):
                if state.at_work and last_progress[number] == state.progress and self._ready:
                    self._leave(state)
                last_progress[number] = state.progress
            with self._condition:  # a thread away outside of its handlers wakes nobody for what it sent
                if self._ready and not self._at_work:
                    self._condition.notify()
            for worker in range(len(self._idle)):
                if self._idle[worker] and self._timed_out(worker):
                    self._resume(worker, wake_thread=True)


def _enable_gradients() -> None:
    """Enable gradients, as another worker's code may have disabled them in this thread."""
    if not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
