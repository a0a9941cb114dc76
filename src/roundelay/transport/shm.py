"""Workers as processes of one host that talk through pipes and shared memory.

Everything they share is made before they fork (`wiring.py`). A short message is one frame, written into a pipe by its
sender and read out of it by its receiver, a system call each, and the kernel wakes who waits; longer tensors are copied
into a ring by the sender and out of it, into memory of torch's own, by the receiver (`stream.py`, `ring.py`).

Choices, and what speaks for them:

- No thread receives: `receive` waits for the pipes itself. A thread of its own would take each message first, then
  wait for the interpreter's lock, then wake the one that wants it.
- Nobody looks again and again: on a machine with fewer processors than workers that takes the time of those who work.
- A message that finds no room does not make its sender wait: it stays in the sender's memory, and a thread that is
  started then and only then copies it in as the receiver makes room.
- A credit is no message (`credits.py`): whoever lacks none does not look for any, nor is woken for one.
- No handshake ends a link. What is in pipe and ring stays there when its writer ends; so `close` is done when
  everything is in them, END last. A pipe that ends without END is a loss: `abort` has left its reason on the board, a
  death says nothing. Who leaves stops reading first, and the kernel tells those who still send.
- Tensors are copied out, not handed over in place: they live as long as a tape does, and a ring is freed in order.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from typing import final

from roundelay.errors import DeadlineError, InternalError
from roundelay.transport import wire_format as wire
from roundelay.transport.endpoint import CheckedEndpoint, Delivery, Granted, Lost, Message, nothing_came
from roundelay.transport.shm_credits import CreditsGiven, CreditsTaken
from roundelay.transport.shm_resources import ShmResources
from roundelay.transport.shm_ring import Fence
from roundelay.transport.shm_stream import FrameReader, FrameWriter

INLINE_BYTES = 20 * 1024
"""Longest frame with tensors inside: up to 32 KiB the pipe is faster than the ring, but others need its room, too."""

MANY_CREDITS = 64
"""A worker that finds so many credits in a row listens to the others once."""

ABORT_GRACE_S = 1.0
"""Seconds that an abort may take to pass on what was sent before it."""

_NAP_S = 1.0
_LONGEST_S = 1e6
"""As long as the kernel can be asked to wait, and longer than any run is silent."""


@final
class ShmEndpoint(CheckedEndpoint):
    """One process's end; to be built first of all in the forked child.

    Args:
        worker: this worker's number.
        wiring: what the launcher made before it forked; what is not this worker's is closed in this process.
        deadline_s: seconds that `close` may take.
    """

    def __init__(self, worker: int, wiring: ShmResources, deadline_s: float) -> None:
        super().__init__(worker, wiring.num_workers)
        wiring.keep(worker)
        self._wiring, self._deadline_s = wiring, deadline_s
        self._links = {other: _Link(worker, other, wiring) for other in self._others}
        self._heard = {link.inlet.pipe: link for link in self._links.values()}  # those that may still say something
        self._credited = CreditsTaken({other: wiring.rings[other, worker] for other in self._others})
        self._unheard = 0  # how often in a row a credit was there, and nobody was heard
        self._come: deque[Delivery] = deque()
        self._ending = wiring.ended[worker]
        self._poller = select.poll()
        for fd in (self._ending.fd, *self._heard):
            self._poller.register(fd, select.POLLIN)
        self._fence = Fence()
        self._reading = threading.Lock()  # held by whoever reads the pipes
        self._holding = threading.Lock()  # held by whoever starts or wakes the helper, or ends everything
        self._helper: threading.Thread | None = None
        self._left = False
        self._idle = False  # whether everything may be closed: it has ended, and no thread writes any more

    def _send(self, to: int, message: Message) -> None:
        frame, tensors = wire.encode(message, INLINE_BYTES)
        if self._links[to].outlet.put(frame, tensors):
            self._wake_helper()

    def _grant(self, to: int, channel: int) -> None:
        link = self._links[to]
        try:
            link.credits.give(channel)
            if self._wiring.board.wants_credit(to) and link.outlet.put(wire.stir_frame()):
                self._wake_helper()
        except ValueError:  # another thread has ended this endpoint, and closed what it shared
            if not self._left:
                raise

    def _take(self, timeout_s: float, credits: bool) -> Delivery:
        deadline = time.monotonic() + timeout_s
        try:
            with self._reading:
                delivery = self._await(deadline, credits)
        finally:
            if self._left:
                self._let_go()
        if delivery is None and self._aborted:
            return Lost(self.worker, "it was aborted")
        if delivery is None:
            time.sleep(max(0.0, deadline - time.monotonic()))
            raise nothing_came(self.worker, timeout_s)
        return delivery

    def _await(self, deadline: float, credits: bool) -> Delivery | None:
        """The next delivery; None when the deadline has passed or this endpoint has ended."""
        come = self._come
        while not self._left:
            if come:
                return come.popleft()
            if not credits:
                self._hear(deadline - time.monotonic())
            elif (credit := self._hear_or_credit(deadline)) is not None:
                return credit
            if not come and time.monotonic() >= deadline:
                break
        return None

    def _hear_or_credit(self, deadline: float) -> Granted | None:
        """A credit that is there; without one, wait until there is, or somebody says something."""
        if self._unheard < MANY_CREDITS and (credit := self._credited.take()) is not None:
            self._unheard += 1
            return credit
        board = self._wiring.board
        board.want_credit(self.worker, True)
        self._fence()  # a giver counts, then asks whether we want one; we the other way round
        try:
            credit = self._credited.take()
            self._hear(0.0 if credit is not None else deadline - time.monotonic())
        finally:
            board.want_credit(self.worker, False)
        return credit

    def _hear(self, patience_s: float) -> None:
        """Wait until somebody says something, or patience is over; and take it."""
        self._unheard = 0
        milliseconds = int(1000 * min(patience_s, _LONGEST_S)) + 1 if patience_s > 0 else 0
        for fd, _ in self._poller.poll(milliseconds):
            link = self._heard.get(fd)
            if link is None:
                self._ending.still()
                continue
            try:
                more = link.inlet.read(self._come)
            except InternalError as fault:
                self._lose(link, f"it sent bytes that are no message ({fault.got})")
            else:
                if not more and link.inlet.ended:
                    self._drop(link)
                elif not more:
                    self._lose(link, self._wiring.board.last_words(link.worker) or "its process ended")

    def _lose(self, link: _Link, reason: str) -> None:
        self._drop(link)
        self._credited.forget(link.worker)
        self._come.append(Lost(link.worker, reason))

    def _drop(self, link: _Link) -> None:
        """Hear `link` no more, and drop what is sent to it."""
        del self._heard[link.inlet.pipe]
        self._poller.unregister(link.inlet.pipe)
        link.outlet.seal(ABORT_GRACE_S)

    def _close(self) -> None:
        with self._reading:
            self._stop_reading()
        for link in self._links.values():
            if link.outlet.put(wire.end_frame("")):
                self._wake_helper()
        late = self._wait_for_room(self._deadline_s)
        self._leave()
        if late:
            raise DeadlineError(
                f"worker {self.worker} closing",
                got=f"workers {late} took nothing for {self._deadline_s:g} s",
                expected="each to take what was sent",
                remedy="See whether they still run, or allow more time.",
            )

    def _abort(self, reason: str) -> None:
        self._wiring.board.leave_words(self.worker, reason or "no reason given")
        if self._reading.acquire(blocking=False):  # else another thread receives meanwhile
            try:
                self._stop_reading()
            finally:
                self._reading.release()
        self._wait_for_room(ABORT_GRACE_S)
        self._leave()

    def _stop_reading(self) -> None:
        """Those that still send to us learn that nobody reads, and need not wait for room while they end, too."""
        for fd in self._heard:
            self._poller.unregister(fd)
        self._heard.clear()
        self._wiring.stop_reading()

    def _wait_for_room(self, patience_s: float) -> list[int]:
        """Wait until the helper has copied in all that waits; the workers that did not make room for it."""
        deadline = time.monotonic() + patience_s
        while (late := [k for k, link in self._links.items() if link.outlet.waits]) and time.monotonic() < deadline:
            time.sleep(0.001)
        return late

    def _leave(self) -> None:
        """Send nothing more, end the helper, and let the others see the end."""
        self._left = True
        idle = [link.outlet.seal(ABORT_GRACE_S) for link in self._links.values()]
        with self._holding:
            if self._helper is not None:
                self._wiring.freed[self.worker].ring()
                self._helper.join(ABORT_GRACE_S)
                idle.append(not self._helper.is_alive())
            self._ending.ring()
        self._idle = all(idle)
        self._let_go()

    def _let_go(self) -> None:
        """Close everything, unless another thread is reading: then that one does it when it stops."""
        while self._idle and self._reading.acquire(blocking=False):
            try:
                with self._holding:
                    self._wiring.close()
                    self._idle = False
            finally:
                self._reading.release()

    def _wake_helper(self) -> None:
        """Somebody must copy in what waits, while this thread goes on."""
        with self._holding:
            if self._left:
                return
            if self._helper is None:
                self._helper = threading.Thread(target=self._copy_on, daemon=True)
                self._helper.start()
            self._wiring.freed[self.worker].ring()

    def _copy_on(self) -> None:
        """The helper thread: copy in what waits whenever there is room for it."""
        bell = self._wiring.freed[self.worker]
        outlets = [link.outlet for link in self._links.values()]
        while not self._left:
            for outlet in outlets:
                outlet.flush()
            waiting = [outlet for outlet in outlets if outlet.waits]
            for outlet in waiting:
                outlet.want_room(True)
            if not any(outlet.has_room for outlet in waiting):
                self._await_room(waiting)
        bell.still()

    def _await_room(self, waiting: list[FrameWriter]) -> None:
        """Wait until there is room, something more to copy, or nobody left to copy for."""
        bell = self._wiring.freed[self.worker]
        by_pipe = {outlet.pipe: outlet for outlet in waiting}
        poller = select.poll()
        poller.register(bell.fd, select.POLLIN)
        for pipe, outlet in by_pipe.items():
            poller.register(pipe, select.POLLOUT if outlet.full else 0)
        for fd, event in poller.poll(1000 * _NAP_S):
            if fd == bell.fd:
                bell.still()
            elif event & select.POLLERR:  # nobody reads any more
                by_pipe[fd].seal(ABORT_GRACE_S)
        for outlet in waiting:
            outlet.want_room(False)


@final
class _Link:
    """What an endpoint knows of one other worker."""

    def __init__(self, worker: int, other: int, wiring: ShmResources) -> None:
        to, back = (worker, other), (other, worker)
        self.worker = other
        self.outlet = FrameWriter(wiring.pipes[to].writing, wiring.rings[to])
        self.inlet = FrameReader(other, wiring.pipes[back].reading, wiring.rings[back], wiring.freed[other].ring)
        self.credits = CreditsGiven(wiring.rings[to])
