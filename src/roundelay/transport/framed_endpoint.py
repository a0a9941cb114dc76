"""What the endpoints over connections share: frames of the wire format, and the handshake by which a link ends.

Each side sends one END after everything else, and answers the other's END with its own END (unless sent before) and an
ACK. A side that has received END and ACK may close the connection without cutting off bytes in transit. An END with a
reason is an abort. A connection that breaks before END means that the worker is lost.
"""

from __future__ import annotations

import os
import tempfile
import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import torch

from roundelay.errors import DeadlineError, InternalError, RoundelayError, UserCodeError, WorkerLostError
from roundelay.transport import wire_format as wire
from roundelay.transport.checked_endpoint import CheckedEndpoint
from roundelay.transport.endpoint import Arrived, Granted, Lost, Message

ABORT_GRACE_S = 1.0
"""Seconds that the other workers have to receive an abort before their connections are cut."""

FLUSH_S = 0.2
"""Seconds to wait for a short frame to be written to a worker whose answer nobody receives."""


class Link:
    """The state of the connection to one other worker."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.lock = threading.Lock()  # END is the last to be posted, and a frame and its tensors are posted as one
        self.sealed = False  # nothing more may be posted
        self.ended = False  # the other's END has come
        self.acknowledged = False  # the other has received everything up to our END
        self.lost = False  # the connection broke


_L = TypeVar("_L", bound=Link)


class FramedEndpoint(CheckedEndpoint, Generic[_L]):
    """An endpoint whose links carry frames; a subclass implements ``_post``, ``_acknowledge`` and ``_leave``."""

    _links: dict[int, _L]

    def __init__(self, worker: int, others: Iterable[int], deadline_s: float) -> None:
        super().__init__(worker, others)
        self._deadline_s = deadline_s
        self._fault: RoundelayError | None = None  # what failed in this process when it received a message

    @abstractmethod
    def _post(self, link: _L, frame: bytearray, apart: Sequence[torch.Tensor] = (), *, last: bool = False) -> None:
        """Post a frame and the tensors that follow it; dropped once the link's END is posted or the link is broken."""

    @abstractmethod
    def _acknowledge(self, link: _L) -> None:
        """Answer END with END, unless posted before, and ACK, the only frame that may follow END."""

    @abstractmethod
    def _leave(self, reason: str, grace_s: float) -> list[int]:
        """End every link, then every thread; return the workers that did not answer within `grace_s` seconds."""

    def _send(self, to: int, message: Message) -> None:
        frame, apart = wire.encode(message)
        self._post(self._links[to], frame, apart)

    def _grant(self, to: int, channel: int) -> None:
        self._post(self._links[to], wire.grant_frame(channel))

    def _close(self) -> None:
        late = self._leave("", self._deadline_s)
        if late:
            raise DeadlineError(
                f"worker {self.worker} closing",
                got=f"no answer from workers {late} for {self._deadline_s:g} s",
                expected="each to take what was sent",
                remedy="Check whether they still run, or allow more time.",
            )

    def _abort(self, reason: str) -> None:
        self._leave(reason or "no reason given", ABORT_GRACE_S)

    def cause(self, error: RoundelayError) -> RoundelayError:
        """The failure to receive a message in this process, if any: the loss of the sender follows from it."""
        return self._fault if self._fault is not None and isinstance(error, WorkerLostError) else error

    def _lose(self, link: _L, reason: str, *, unfit: bool = False) -> None:
        """Mark the connection as broken, and report the worker as lost unless its END has come."""
        with link.lock:
            first, link.lost = not link.lost, True
            link.sealed = link.sealed or self._fault is None  # else END can still be sent
        if first and not link.ended and self._ended is None:
            self.deliver(Lost(link.worker, reason, unfit))

    def _lose_unfit(self, link: _L, fault: InternalError) -> None:
        """Lose a worker that has sent bytes that are no message."""
        self._lose(link, f"it sent bytes that are no message ({fault.got})", unfit=True)

    def _no_room(self, link: _L, fault: MemoryError) -> None:
        """Lose a worker whose message does not fit into this process's memory."""
        self._fault = UserCodeError(
            f"worker {self.worker}",
            got=f"out of memory for a message from worker {link.worker} {fault}",
            expected="memory for what the others send",
            remedy="Use smaller micro-batches, more workers, or a host with more memory for this one.",
        )
        self._lose(link, f"out of memory {fault}")

    def _handle(
        self, link: _L, head: wire.Head, message: Callable[[], Message], body: Callable[[], memoryview]
    ) -> None:
        """Handle a frame; `message` and `body` read what its head announces.

        Raises:
            InternalError: it is none that may come here.
        """
        if link.ended and head.kind != wire.ACK:
            raise wire.unexpected(head)
        if head.kind in wire.MESSAGES:
            arrived = message()
            if not link.lost:
                self.deliver(Arrived(link.worker, arrived))
        elif head.kind == wire.GRANT:
            if not link.lost:
                self.deliver(Granted(link.worker, head.number))
        elif head.kind == wire.ACK:
            link.acknowledged = True
        elif head.kind != wire.END:
            raise wire.unexpected(head)
        else:
            link.ended = True
            if head.length:
                self.deliver(Lost(link.worker, bytes(body()).decode(errors="replace")))
            self._acknowledge(link)


def decoded(head: wire.Head, body: memoryview) -> tuple[Message, list[torch.Tensor]]:
    """As `roundelay.transport.wire_format.decode`.

    Raises:
        MemoryError: there is no memory for the tensors.
    """
    try:
        return wire.decode(head, body)
    except RuntimeError as fault:  # of torch's allocator
        raise MemoryError(f"({str(fault).splitlines()[0]})") from fault


@contextmanager
def rendezvous_file() -> Generator[str, None, None]:
    """Path of an empty file for the rendezvous, in memory if possible, so that nothing can be left over."""
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        descriptor = os.memfd_create("roundelay")
        try:
            yield f"/proc/self/fd/{descriptor}"  # the forked workers have it too
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="roundelay-", ignore_cleanup_errors=True) as folder:
            yield str(Path(folder) / "store")
