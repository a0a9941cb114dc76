"""The `gloo` transport: workers are processes that trust each other; messages travel by gloo's send and recv over TCP.

Each message is one frame of bytes, small tensors included; tensors that do not fit follow under a second tag, sent from
and received into their own memory. Nothing is unpickled: a frame holds numbers only, and each is checked.

Threads: `send` posts to gloo and never waits. One *listener* per other worker waits for that worker's frames, so that a
dead worker is distinguished from a silent one by its own connection. One *watcher* per other worker posts a receive
that is never matched, and so waits for the end of the connection alone: gloo may never complete a receive that is
posted while the connection breaks, which can happen to the listener but not to the watcher. One *releaser* keeps posted
tensors alive until gloo has written them.

A link ends with the handshake of :mod:`roundelay.transport.framed_endpoint`.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol, cast, final

import torch
import torch.distributed as dist

from roundelay.errors import DeadlineError, InternalError
from roundelay.transport import wire_format as wire
from roundelay.transport.endpoint import ForkedLinks, Message
from roundelay.transport.framed_endpoint import ABORT_GRACE_S, FLUSH_S, FramedEndpoint, Link, decoded, rendezvous_file

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LISTENER_S = 0.5
"""Seconds that a listener has to handle what came before its connection broke."""

SMALL_HELD = 32
"""How many frames without separate tensors are released together, to wake the releaser less often."""

FOREVER = timedelta(days=365)
"""A listener waits until its worker's END or death, or until `_cut`."""

_FRAME_TAG, _DATA_TAG, _NEVER_TAG = 1, 2, 3


@final
class GlooEndpoint(FramedEndpoint["_Link"]):
    """One process's endpoint. Its constructor is the rendezvous: it returns when all `num_workers` have connected.

    Args:
        worker: this worker's number.
        num_workers: how many there are.
        store: the rendezvous: a store of torch.distributed, or the path of an unused file on a shared file system.
        deadline_s: seconds that the rendezvous, and later `close`, may take.
        interface: network interface to listen on; by default loopback.
        partners: the workers that it exchanges messages with, which must list this one too; by default all others.

    Raises:
        DeadlineError: not all workers came in time.
    """

    def __init__(
        self,
        worker: int,
        num_workers: int,
        store: str | Store,
        deadline_s: float,
        interface: str | None = None,
        partners: Sequence[int] | None = None,
    ) -> None:
        super().__init__(worker, range(num_workers) if partners is None else partners, deadline_s)
        self._group: _Group | None = _connect(worker, num_workers, store, deadline_s, interface)
        self._posted: queue.SimpleQueue[list[dist.Work] | None] = queue.SimpleQueue()
        self._releaser = threading.Thread(target=_release, args=(self._posted,), daemon=True)
        self._links = {other: _Link(other, self._listen, self._watch) for other in self._others}
        self._releaser.start()
        for link in self._links.values():
            link.listener.start()
            link.watcher.start()

    def _post(self, link: _Link, frame: bytearray, apart: Sequence[torch.Tensor] = (), *, last: bool = False) -> None:
        with link.lock:
            if link.sealed or self._group is None:
                return
            link.sealed = last
            try:
                link.held.append(self._group.send([_as_tensor(frame)], link.worker, _FRAME_TAG))
                link.held += [self._group.send([tensor], link.worker, _DATA_TAG) for tensor in apart]
            except RuntimeError:  # the connection is broken: the link's listener reports it
                link.sealed = True
            if apart or last or len(link.held) >= SMALL_HELD:
                self._release_held(link)

    def _acknowledge(self, link: _Link) -> None:
        self._post(link, wire.end_frame(""), last=True)
        with link.lock, contextlib.suppress(RuntimeError):
            if self._group is not None:
                link.held.append(self._group.send([_as_tensor(wire.ack_frame())], link.worker, _FRAME_TAG))
                self._release_held(link)

    def _release_held(self, link: _Link) -> None:
        """Pass what was posted to the releaser; called under the link's lock."""
        self._posted.put(link.held)
        link.held = []

    def _listen(self, link: _Link) -> None:
        """Receive `link`'s frames until its handshake is complete or its connection broken."""
        group = self._group
        assert group is not None
        try:
            frames: deque[_Posted] = deque(_Posted(group, link.worker) for _ in range(2))
            while not (link.ended and link.acknowledged):
                posted = frames.popleft()
                posted.work.wait(FOREVER)
                self._read(link, posted.frame, group)
                frames.append(_Posted(group, link.worker, posted.frame))
        except MemoryError as fault:
            self._no_room(link, fault)
        except InternalError as fault:
            self._lose_unfit(link, fault)
        except RuntimeError as fault:
            self._lose(link, _explain(fault))

    def _watch(self, link: _Link) -> None:
        """Wait for the end of the connection; report it if the listener does not do so first."""
        group = self._group
        assert group is not None
        try:
            group.recv([torch.empty(1)], link.worker, _NEVER_TAG).wait(FOREVER)
        except RuntimeError as fault:
            link.listener.join(LISTENER_S)
            if link.listener.is_alive():
                self._lose(link, _explain(fault))

    def _read(self, link: _Link, frame: bytearray, group: _Group) -> None:
        head = wire.read_head(frame)
        self._handle(link, head, lambda: _finish(head, frame, link.worker, group), lambda: wire.body_of(head, frame))

    def _leave(self, reason: str, grace_s: float) -> list[int]:
        deadline = time.monotonic() + grace_s
        for link in self._links.values():
            self._post(link, wire.end_frame(reason), last=True)
        for link in self._links.values():
            link.listener.join(0.0 if link.lost else max(0.0, deadline - time.monotonic()))
        late = [link.worker for link in self._links.values() if link.listener.is_alive() and not link.lost]
        if self._fault is not None:  # the listener of the worker whose message did not fit has ended
            time.sleep(FLUSH_S)
        self._cut()
        self._posted.put(None)
        self._releaser.join(ABORT_GRACE_S)
        self._group = None  # gloo closes its sockets and ends its threads when nothing refers to the group
        return late

    def _cut(self) -> None:
        """End every thread that still waits: a gloo wait that times out breaks all connections of its group.

        On a connection that is broken already, none times out. Workers that have answered have received everything; the
        others are given up.
        """
        for link in self._links.values():
            assert self._group is not None
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1)], link.worker, _NEVER_TAG).wait(timedelta(milliseconds=1))
        for link in self._links.values():
            link.listener.join(ABORT_GRACE_S)
            link.watcher.join(ABORT_GRACE_S)


@contextmanager
def forked_over_gloo(
    num_workers: int, deadline_s: float, shared: Mapping[int, int] | None = None
) -> Generator[ForkedLinks, None, None]:
    """Connect processes of one host that are forked while the context is open; they share no memory."""
    with rendezvous_file() as path:
        yield ForkedLinks(lambda worker: GlooEndpoint(worker, num_workers, path, deadline_s), lambda: None)


class _Group(Protocol):
    """The part of torch's ProcessGroupGloo that is used here; torch's stubs leave it out."""

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> dist.Work: ...

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> dist.Work: ...


class _Link(Link):
    """The connection to one other worker."""

    def __init__(self, worker: int, listen: Callable[[_Link], None], watch: Callable[[_Link], None]) -> None:
        super().__init__(worker)
        self.held: list[dist.Work] = []  # posted, not yet passed to the releaser
        self.listener = threading.Thread(target=listen, args=(self,), daemon=True)
        self.watcher = threading.Thread(target=watch, args=(self,), daemon=True)


class _Posted:
    """A posted receive for the next frame of one worker, with its buffer."""

    def __init__(self, group: _Group, source: int, frame: bytearray | None = None) -> None:
        self.frame = bytearray(wire.FRAME_BYTES) if frame is None else frame
        self.work = group.recv([_as_tensor(self.frame)], source, _FRAME_TAG)


def _connect(worker: int, num_workers: int, store: str | Store, deadline_s: float, interface: str | None) -> _Group:
    # Not init_process_group: its device comes from an environment variable, and its group is global to the process.
    limit = timedelta(seconds=deadline_s)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    try:
        address = {"interface": interface} if interface else {"hostname": "127.0.0.1"}
        options._devices = [dist.ProcessGroupGloo.create_device(**address)]
        rendezvous = dist.FileStore(store, num_workers) if isinstance(store, str) else store  # type: ignore[attr-defined]
        rendezvous.set_timeout(limit)
        return cast(_Group, dist.ProcessGroupGloo(rendezvous, worker, num_workers, options))
    except RuntimeError as fault:
        store_name = store if isinstance(store, str) else "the launcher's store"
        raise DeadlineError(
            f"worker {worker} meeting the others at {store_name}",
            got=_explain(fault),
            expected=f"{num_workers} workers within {deadline_s:g} s",
            remedy="Check which worker did not start, and give every run a file of its own.",
        ) from fault


def _finish(head: wire.Head, frame: bytearray, source: int, group: _Group) -> Message:
    """Return the message that `frame` begins, after receiving the tensors that follow the frame."""
    body = wire.body_of(head, frame)
    if head.kind == wire.MESSAGE_APART:
        body = memoryview(bytearray(head.length))
        group.recv([_as_tensor(body)], source, _DATA_TAG).wait(FOREVER)
    message, apart = decoded(head, body)
    for work in [group.recv([part], source, _DATA_TAG) for part in apart]:
        work.wait(FOREVER)
    return message


def _as_tensor(buffer: bytearray | memoryview) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _release(posted: queue.SimpleQueue[list[dist.Work] | None]) -> None:
    """The releaser thread: keep what was posted alive until gloo has written it."""
    while (works := posted.get()) is not None:
        while works:
            with contextlib.suppress(RuntimeError):  # a broken connection: the link's listener reports it
                works.pop(0).wait(FOREVER)


def _explain(fault: Exception) -> str:
    """The part of gloo's error message that helps a user."""
    return "its connection broke: " + str(fault).split("] ", 1)[-1].split(". ", 1)[0]
