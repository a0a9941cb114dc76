"""Workers as processes of one host that talk through shared memory.

Everything they share is made before they fork (`wiring.py`); each message is copied into a ring by its sender and out
of it, into tensors of torch's own, by its receiver (`stream.py`, `ring.py`). Bytes and order go through the ring alone,
so a message that the receiver finds waiting costs no system call on either side; files serve to sleep, to wake, and to
see a death.

Choices, and what speaks for them:

- No thread receives: `receive` looks into the rings itself. A thread of its own would take each message first, then
  wait for the interpreter's lock, then wake the one that wants it. A worker that waits looks again and again for
  `SPIN_S`, if its last wait was a short one, and only then sleeps: to be woken takes 50 microseconds and more.
- A message that finds no room does not make its sender wait: it stays in the sender's memory, and a thread that is
  started then and only then copies it in as the receiver makes room.
- A credit is no message (`credits.py`): whoever lacks none does not look for any.
- No handshake ends a link. What is in a ring stays there when its writer ends; so `close` is done when everything is
  in the rings, END last. An `abort` leaves its reason on the board and lets go of the lifeline; a death lets go of it
  without a word.
- Tensors are copied out, not handed over in place: they live as long as a tape does, and a ring is freed in order.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from typing import final

from roundelay.errors import DeadlineError, InternalError
from roundelay.transport import frame as wire
from roundelay.transport.contract import CheckedEndpoint, Delivery, Granted, Lost, Message, nothing_came
from roundelay.transport.credits import CreditsGiven, CreditsTaken
from roundelay.transport.ring import Fence
from roundelay.transport.stream import Ended, Inlet, Outlet
from roundelay.transport.wiring import AWAKE, MESSAGES, MESSAGES_AND_CREDITS, Wiring

SPIN_S = 100e-6
"""Seconds that a worker looks again and again before it sleeps; about what waking it costs."""

SHORT_WAIT_S = 200e-6
"""After a wait that was longer the next one is not worth looking again and again."""

LOOK_EVERY_S = 0.05
"""A worker that always finds a message waiting looks after the others' lives so often."""

ABORT_GRACE_S = 1.0
"""Seconds that an abort may take to pass on what was sent before it."""

_NAP_S = 1.0


@final
class ShmEndpoint(CheckedEndpoint):
    """One process's end; to be built first of all in the forked child.

    Args:
        worker: this worker's number.
        wiring: what the launcher made before it forked; what is not this worker's is closed in this process.
        deadline_s: seconds that `close` may take.
    """

    def __init__(self, worker: int, wiring: Wiring, deadline_s: float) -> None:
        super().__init__(worker, wiring.num_workers)
        wiring.keep(worker)
        self._wiring, self._deadline_s = wiring, deadline_s
        self._links = {other: _Link(worker, other, wiring) for other in self._others}
        self._open = tuple(self._links.values())  # those that may still say something; who is heard first comes first
        self._giving = self._open  # those whose credits count: all but the lost
        self._bell = wiring.arrived[worker]
        self._poller = select.poll()
        self._lives: dict[int, _Link] = {wiring.lifelines[other].reading: link for other, link in self._links.items()}
        for fd in (self._bell.fd, *self._lives):
            self._poller.register(fd, select.POLLIN)
        self._fence = Fence()
        self._reading = threading.Lock()  # held by whoever reads the rings
        self._holding = threading.Lock()  # held by whoever starts or wakes the helper, or ends everything
        self._helper: threading.Thread | None = None
        self._left = False
        self._idle = False  # whether everything may be closed: it has ended, and no thread writes any more
        self._hopeful = True  # whether the next wait may be a short one
        self._looked = 0.0

    def _send(self, to: int, message: Message) -> None:
        frame, tensors = wire.encode(message, inline=False)
        if self._links[to].outlet.put(frame, tensors):
            self._wake_helper()

    def _grant(self, to: int, channel: int) -> None:
        link = self._links[to]
        try:
            link.credits.give(channel)
            link.tell(MESSAGES_AND_CREDITS)
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
        if delivery is None:
            time.sleep(max(0.0, deadline - time.monotonic()))
            raise nothing_came(self.worker, timeout_s)
        return delivery

    def _await(self, deadline: float, credits: bool) -> Delivery | None:
        """The next delivery; None when the deadline has passed or this endpoint has ended."""
        if self._left:
            return None
        if time.monotonic() - self._looked > LOOK_EVERY_S:
            self._look(0.0)
        delivery = self._scan(credits)
        if delivery is None and self._hopeful:
            delivery = self._spin(deadline, credits)
        while delivery is None and not self._left:
            delivery = self._sleep(deadline, credits)
            if delivery is None and time.monotonic() >= deadline:
                break
        return None if self._has_left() else delivery

    def _has_left(self) -> bool:
        """Whether another thread has ended this endpoint meanwhile."""
        return self._left

    def _credit(self) -> Granted | None:
        """A credit that one of the others has given."""
        for link in self._giving:
            channel = link.credited.take()
            if channel is not None:
                return Granted(link.worker, channel)
        return None

    def _scan(self, credits: bool) -> Delivery | None:
        """What one of the others has said, each in turn; else a credit, if wanted."""
        for place, link in enumerate(self._open, 1):
            delivery = self._hear(link)
            if delivery is not None:
                self._open = self._open[place:] + self._open[:place]
                return delivery
        return self._credit() if credits else None

    def _hear(self, link: _Link) -> Delivery | None:
        gone = link.gone  # asked first: all that it ever wrote is in the ring by then
        try:
            got = link.inlet.read()
        except InternalError as fault:
            return self._lose(link, f"it sent bytes that are no message ({fault.got})")
        if isinstance(got, Ended):
            self._drop(link)
            return None
        if got is None and gone:
            return self._lose(link, self._wiring.board.last_words(link.worker) or "its process ended")
        return got

    def _lose(self, link: _Link, reason: str) -> Lost:
        self._drop(link)
        self._giving = tuple(other for other in self._giving if other is not link)
        return Lost(link.worker, reason)

    def _drop(self, link: _Link) -> None:
        """Hear `link` no more, and drop what is sent to it."""
        self._open = tuple(other for other in self._open if other is not link)
        link.outlet.seal(ABORT_GRACE_S)

    def _spin(self, deadline: float, credits: bool) -> Delivery | None:
        """Look again and again for a short while; it begins anew while a long message comes in."""
        until, taken = 0.0, -1
        while True:
            delivery = self._scan(credits)
            if delivery is not None:
                return delivery
            now = time.monotonic()
            if taken != (taken := sum(link.inlet.taken for link in self._open)):
                until = min(deadline, now + SPIN_S)
            if now >= until:
                return None
            os.sched_yield()

    def _sleep(self, deadline: float, credits: bool) -> Delivery | None:
        """Wait for the bell, a death or the deadline, and hear what there is then."""
        board = self._wiring.board
        board.sleep(self.worker, MESSAGES_AND_CREDITS if credits else MESSAGES)
        self._fence()  # a sender writes, then asks whether we sleep; we the other way round
        try:
            delivery = self._scan(credits)
            if delivery is None:
                start = time.monotonic()
                self._look(min(deadline - start, _NAP_S))
                self._hopeful = time.monotonic() - start < SHORT_WAIT_S
                delivery = self._scan(credits)
        finally:
            board.sleep(self.worker, AWAKE)
        return delivery

    def _look(self, patience_s: float) -> None:
        """Wait until something has come, somebody has ended, or patience is over."""
        for fd, _ in self._poller.poll(math.ceil(max(0.0, patience_s) * 1000)):
            if fd == self._bell.fd:
                self._bell.still()
            else:
                self._lives[fd].gone = True
                self._poller.unregister(fd)
        self._looked = time.monotonic()

    def _close(self) -> None:
        deadline = time.monotonic() + self._deadline_s
        with self._reading:
            for link in self._links.values():
                if link.outlet.put(wire.end_frame("")):
                    self._wake_helper()
            while (late := self._late()) and time.monotonic() < deadline:
                self._drain(deadline)
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
        deadline = time.monotonic() + ABORT_GRACE_S
        while self._late() and time.monotonic() < deadline:
            if self._reading.acquire(blocking=False):
                try:
                    self._drain(deadline)
                finally:
                    self._reading.release()
            else:  # another thread receives meanwhile
                time.sleep(0.001)
        self._leave()

    def _late(self) -> list[int]:
        """Living workers that have not made room for all that was sent to them."""
        return [link.worker for link in self._links.values() if link.outlet.waits and not link.gone]

    def _drain(self, deadline: float) -> None:
        """Make room for those who send to us, as they may be ending too; wait until something happens."""
        board = self._wiring.board
        board.sleep(self.worker, MESSAGES_AND_CREDITS)
        self._fence()
        for link in self._open:
            link.inlet.discard()
        if self._late():
            self._look(min(deadline - time.monotonic(), _NAP_S))
        board.sleep(self.worker, AWAKE)

    def _leave(self) -> None:
        """Send nothing more, end the helper, and let the others see the end."""
        self._left = True
        idle = [link.outlet.seal(ABORT_GRACE_S) for link in self._links.values()]
        with self._holding:
            if self._helper is not None:
                self._wiring.freed[self.worker].ring()
                self._helper.join(ABORT_GRACE_S)
                idle.append(not self._helper.is_alive())
            self._bell.ring()
        self._wiring.lifelines[self.worker].release()
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
        while not self._left:
            for link in self._links.values():
                link.outlet.flush()
            waiting = [link for link in self._links.values() if link.outlet.waits]
            for link in waiting:
                link.outlet.want_room(True)
            if not any(link.outlet.has_room for link in waiting):
                self._await_room(waiting)
        bell.still()

    def _await_room(self, waiting: list[_Link]) -> None:
        """Wait until there is room, something more to copy, or nobody left to copy for."""
        bell = self._wiring.freed[self.worker]
        if self._ended is not None and not waiting:
            self._bell.ring()  # the one who closes waits for this
        lives = {self._wiring.lifelines[link.worker].reading: link for link in waiting}
        poller = select.poll()
        for fd in (bell.fd, *lives):
            poller.register(fd, select.POLLIN)
        for fd, _ in poller.poll(1000 * _NAP_S):
            if fd == bell.fd:
                bell.still()
            else:
                lives[fd].outlet.seal(ABORT_GRACE_S)
        for link in waiting:
            link.outlet.want_room(False)


@final
class _Link:
    """What an endpoint knows of one other worker."""

    def __init__(self, worker: int, other: int, wiring: Wiring) -> None:
        board, arrived, freed = wiring.board, wiring.arrived[other], wiring.freed[other]

        def tell(what: int = MESSAGES) -> None:
            if board.asleep(other) >= what:
                arrived.ring()

        self.worker, self.tell = other, tell
        self.outlet = Outlet(wiring.rings[worker, other], tell)
        self.inlet = Inlet(other, wiring.rings[other, worker], freed.ring)
        self.credits = CreditsGiven(wiring.rings[worker, other])
        self.credited = CreditsTaken(wiring.rings[other, worker])
        self.gone = False  # its lifeline has ended; what it wrote before may still be in the ring
