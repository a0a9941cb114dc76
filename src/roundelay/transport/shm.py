"""The `shm` transport: workers are processes of one host that communicate through pipes and shared memory.

Everything that they share is created before they fork (`shm_resources`). A short message and a credit are one frame
each, written into a pipe by the sender and read by the receiver, one system call each; the kernel wakes the receiver.
Longer tensors are copied into a ring by the sender, and from there into memory of torch's own by the receiver
(`shm_stream`).

Design choices:

- No thread receives: `receive` itself polls the pipes. A thread would have to take each message, wait for the GIL, then
  wake the thread that wants the message.
- Nothing spins: with fewer cores than workers, that would take time from workers that compute.
- A message that finds no room does not block its sender: it stays in the sender's memory, and a helper thread, started
  only then, copies it as the receiver makes room.
- Only pipes and eventfds synchronise the processes; no flag or counter in shared memory does.
- Closing needs no handshake: what is in pipe and ring stays there when its writer ends, so `close` returns when
  everything is in them, END last. A pipe that ends without END is a loss; after an `abort` its reason is in shared
  memory. A worker that leaves stops reading first, which the kernel reports to those that still send.
- Holders of a stage add up large tensors in memory that they share (`ShmEndpoint.shared`); messages say when.
- Tensors are copied out of the ring, not used in place: they live as long as a tape, and a ring is freed in order.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import final

import torch

from roundelay.errors import DeadlineError, InternalError
from roundelay.transport import wire_format as wire
from roundelay.transport.checked_endpoint import CheckedEndpoint
from roundelay.transport.endpoint import Delivery, ForkedLinks, Lost, Message, nothing_came
from roundelay.transport.shm_resources import EventFd, ShmResources
from roundelay.transport.shm_stream import FrameReader, FrameWriter

INLINE_BYTES = 20 * 1024
"""Longest frame with tensors inside. Up to 32 KiB the pipe is faster than the ring, but others need its room too."""

ABORT_GRACE_S = 1.0
"""Seconds that an abort may take to pass on what was sent before it."""

_MAX_POLL_S = 1e6
"""Longer than any wait, and accepted by the kernel."""


@final
class ShmEndpoint(CheckedEndpoint):
    """One process's endpoint, to be created first of all in the forked child.

    Args:
        worker: this worker's number.
        resources: what the launcher created before it forked; what this worker does not use is closed in this process.
        deadline_s: seconds that `close` may take.
    """

    def __init__(self, worker: int, resources: ShmResources, deadline_s: float) -> None:
        super().__init__(worker, range(resources.num_workers))
        resources.keep_only(worker)
        self._resources, self._deadline_s = resources, deadline_s
        self._links = {other: _Link(self, other, resources) for other in self._others}
        self._reading_links = {link.reader.pipe: link for link in self._links.values()}
        self._stop_wait, self._wake = EventFd(), EventFd()  # end a `receive`; wake the helper
        self._poller = select.poll()
        for fd in (self._stop_wait.fd, *self._reading_links):
            self._poller.register(fd, select.POLLIN)
        self._reading = threading.Lock()  # held while a thread reads the pipes
        self._holding = threading.Lock()  # held while a thread starts or wakes the helper, or closes everything
        self._helper: threading.Thread | None = None
        self._left = False
        self._idle = False  # whether everything may be closed: the endpoint has ended and no thread writes

    def shared(self, channel: int) -> torch.Tensor | None:
        """As the launcher created it; it stays mapped as long as a tensor refers to it."""
        return self._resources.shared.get(channel)

    def _send(self, to: int, message: Message) -> None:
        frame, tensors = wire.encode(message, INLINE_BYTES)
        if self._links[to].writer.put(frame, tensors):
            self._wake_helper()

    def _grant(self, to: int, channel: int) -> None:
        if self._links[to].writer.put(wire.grant_frame(channel)):
            self._wake_helper()

    def _take(self, timeout_s: float, credits: bool) -> Delivery:
        deadline = time.monotonic() + timeout_s
        try:
            with self._reading:
                while (delivery := self._take_arrived(credits)) is None and not self._left:
                    left_s = deadline - time.monotonic()
                    self._read(left_s)
                    if left_s <= 0:
                        delivery = self._take_arrived(credits)
                        break
        finally:
            if self._left:
                self._let_go()
        if delivery is None:
            time.sleep(max(0.0, deadline - time.monotonic()))
            raise nothing_came(self.worker, timeout_s)
        return delivery

    def _read(self, timeout_s: float) -> None:
        """Wait until a pipe has something to read, and deliver it."""
        milliseconds = int(1000 * min(timeout_s, _MAX_POLL_S)) + 1 if timeout_s > 0 else 0
        for fd, _ in self._poller.poll(milliseconds):
            link = self._reading_links.get(fd)
            if link is None:
                self._stop_wait.take()
                continue
            try:
                more = link.reader.read()
            except InternalError as fault:
                self._lose(link, f"it sent bytes that are no message ({fault.got})", unfit=True)
            else:
                if not more and link.reader.ended:
                    self._drop(link)
                elif not more:
                    self._lose(link, self._resources.reasons.read(link.worker) or "its process ended")

    def _lose(self, link: _Link, reason: str, *, unfit: bool = False) -> None:
        self._drop(link)
        self.deliver(Lost(link.worker, reason, unfit))

    def _drop(self, link: _Link) -> None:
        """Read `link` no more, and drop what is sent to it."""
        del self._reading_links[link.reader.pipe]
        self._poller.unregister(link.reader.pipe)
        link.writer.seal(ABORT_GRACE_S)

    def _close(self) -> None:
        with self._reading:
            self._stop_reading()
        for link in self._links.values():
            if link.writer.put(wire.end_frame("")):
                self._wake_helper()
        late = self._wait_for_room(self._deadline_s)
        self._leave()
        if late:
            raise DeadlineError(
                f"worker {self.worker} closing",
                got=f"workers {late} took nothing for {self._deadline_s:g} s",
                expected="each to take what was sent",
                remedy="Check whether they still run, or allow more time.",
            )

    def _abort(self, reason: str) -> None:
        self._stop_wait.add()
        self._resources.reasons.write(self.worker, reason or "no reason given")
        if self._reading.acquire(blocking=False):  # else another thread is in `receive`
            try:
                self._stop_reading()
            finally:
                self._reading.release()
        self._wait_for_room(ABORT_GRACE_S)
        self._leave()

    def _stop_reading(self) -> None:
        """Close the reading ends: the kernel reports it to those that still send, so that they need not wait."""
        for fd in self._reading_links:
            self._poller.unregister(fd)
        self._reading_links.clear()
        self._resources.stop_reading()

    def _wait_for_room(self, timeout_s: float) -> list[int]:
        """Wait until the helper has sent all that waits; return the workers that did not make room for it."""
        deadline = time.monotonic() + timeout_s
        while (late := [k for k, link in self._links.items() if link.writer.waits]) and time.monotonic() < deadline:
            time.sleep(0.001)
        return late

    def _leave(self) -> None:
        """Send nothing more, end the helper, and let the other workers' pipes end."""
        self._left = True
        idle = [link.writer.seal(ABORT_GRACE_S) for link in self._links.values()]
        with self._holding:
            if self._helper is not None:
                self._wake.add()
                self._helper.join(ABORT_GRACE_S)
                idle.append(not self._helper.is_alive())
            self._stop_wait.add()
        self._idle = all(idle)
        self._let_go()

    def _let_go(self) -> None:
        """Close everything, unless another thread is reading, which then calls this when it stops."""
        while self._idle and self._reading.acquire(blocking=False):
            try:
                with self._holding:
                    self._resources.close()
                    self._stop_wait.close()
                    self._wake.close()
                    self._idle = False
            finally:
                self._reading.release()

    def _wake_helper(self) -> None:
        """Let the helper thread send what waits."""
        with self._holding:
            if self._left:
                return
            if self._helper is None:
                self._helper = threading.Thread(target=self._help, daemon=True)
                self._helper.start()
            self._wake.add()

    def _help(self) -> None:
        """The helper thread: send what waits whenever there is room for it."""
        while not self._left:
            for link in self._links.values():
                link.writer.flush()
            self._wait_for_work()

    def _wait_for_work(self) -> None:
        """Wait until there is room for what waits, or more to send, or a receiver has gone."""
        poller = select.poll()
        poller.register(self._wake.fd, select.POLLIN)
        waiting = {link.writer.pipe: link.writer for link in self._links.values() if link.writer.waits}
        for pipe, writer in waiting.items():
            full = writer.pipe_full
            poller.register(pipe, select.POLLOUT if full else 0)  # 0: only whether its reader has gone
            if not full:
                poller.register(writer.room_fd, select.POLLIN)
        for fd, event in poller.poll():
            if fd == self._wake.fd:
                self._wake.take()
            elif event & select.POLLERR and fd in waiting:
                waiting[fd].seal(ABORT_GRACE_S)


@contextmanager
def forked_over_shm(
    num_workers: int, deadline_s: float, shared: Mapping[int, int] | None = None
) -> Generator[ForkedLinks, None, None]:
    """Connect processes of one host that are forked while the context is open.

    Args:
        num_workers: how many.
        deadline_s: seconds that a wait may take.
        shared: bytes of the memory that holders of a stage share, by channel as :meth:`Endpoint.shared` has it.

    Raises:
        PlanError: this system does not have enough open files or memory.
    """
    resources = ShmResources(num_workers, shared=shared or {})
    try:
        yield ForkedLinks(lambda worker: ShmEndpoint(worker, resources, deadline_s), resources.close)
    finally:
        resources.close()


@final
class _Link:
    """Both ends of the connection to one other worker."""

    def __init__(self, endpoint: ShmEndpoint, other: int, resources: ShmResources) -> None:
        to, back = (endpoint.worker, other), (other, endpoint.worker)
        self.worker = other
        self.writer = FrameWriter(resources.pipes[to].writing.fileno(), resources.rings[to])
        self.reader = FrameReader(
            other, resources.pipes[back].reading.fileno(), resources.rings[back], endpoint.deliver
        )
