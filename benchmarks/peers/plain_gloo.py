"""An endpoint over torch's bare ``ProcessGroupGloo``: the rival, which checks nothing and hides nothing.

Gloo delivers only into a receive that is posted, and a message that finds none waits a round trip more. So as many
are posted ahead as messages may be on their way. A message is padded to one of two sizes, each with a tag of its own.
"""

from __future__ import annotations

import threading
from collections import deque
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist

from benchmarks.peers.forked import on_peers
from roundelay.transport import Connecting
from roundelay.transport import wire_format as wire
from roundelay.transport.checked_endpoint import CheckedEndpoint
from roundelay.transport.endpoint import Arrived, Granted, Message
from tests.wan.bed import Bed
from tests.wan.wire import DEVICE

AHEAD = 24
"""Receives posted ahead, of each kind; more than any plan here has slots."""

HEAD_BYTES = 1024
"""Room for what a message has beside its large tensor, or for a message that has none."""

_LARGE, _SMALL, _GRANT = 1, 2, 3


@final
class PlainGlooEndpoint(CheckedEndpoint):
    """One worker's end.

    Args:
        worker: its number.
        workers: how many there are.
        path: of a file to meet at.
        most_bytes: of a message's tensors.
        deadline_s: of meeting, and of the end.
    """

    def __init__(self, worker: int, workers: int, path: str, most_bytes: int, deadline_s: float) -> None:
        super().__init__(worker, range(workers))
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(interface=DEVICE)]
        options._timeout = timedelta(seconds=deadline_s)
        self._store = dist.FileStore(path, workers)  # type: ignore[attr-defined]
        self._store.set_timeout(options._timeout)
        self._group: Any = dist.ProcessGroupGloo(self._store, worker, workers, options)  # type: ignore[attr-defined]
        self._sizes = {_LARGE: most_bytes + HEAD_BYTES, _SMALL: HEAD_BYTES, _GRANT: wire.HEAD_BYTES}
        self._posted: deque[Any] = deque()
        for other in self._others:
            for tag in self._sizes:
                threading.Thread(target=self._listen, args=(other, tag), daemon=True).start()

    def _send(self, to: int, message: Message) -> None:
        frame, apart = wire.encode(message)
        whole = torch.cat(
            [torch.frombuffer(frame, dtype=torch.uint8), *[t.reshape(-1).view(torch.uint8) for t in apart]]
        )
        tag = _SMALL if whole.numel() <= HEAD_BYTES else _LARGE
        self._post(to, tag, torch.nn.functional.pad(whole, (0, self._sizes[tag] - whole.numel())))

    def _grant(self, to: int, channel: int) -> None:
        self._post(to, _GRANT, torch.frombuffer(wire.grant_frame(channel), dtype=torch.uint8))

    def _post(self, to: int, tag: int, tensor: torch.Tensor) -> None:
        self._posted.append(self._group.send([tensor], to, tag))
        if len(self._posted) > 8 * AHEAD:
            self._posted.popleft().wait()

    def _listen(self, other: int, tag: int) -> None:
        posted: deque[tuple[torch.Tensor, Any]] = deque()
        while True:
            while len(posted) < AHEAD:
                into = torch.empty(self._sizes[tag], dtype=torch.uint8)
                posted.append((into, self._group.recv([into], other, tag)))
            into, work = posted.popleft()
            try:
                work.wait(timedelta(days=1))
            except RuntimeError:  # the other has ended
                return
            received = memoryview(into.numpy().data)
            head = wire.head_of(bytes(received[: wire.HEAD_BYTES]))
            if tag == _GRANT:
                self.deliver(Granted(other, head.number))
            else:
                self.deliver(Arrived(other, _message(head, received[wire.HEAD_BYTES :])))

    def _close(self) -> None:
        for work in self._posted:
            work.wait()
        self._store.set(f"ended {self.worker}", "")
        self._store.wait([f"ended {other}" for other in self._others])

    def _abort(self, reason: str) -> None:
        pass  # the process ends


def _message(head: wire.Head, received: memoryview) -> Message:
    message, apart = wire.decode(head, received[: head.length])
    at = head.length
    for tensor in apart:
        tensor.reshape(-1).view(torch.uint8).numpy().data[:] = received[at : at + tensor.nbytes]
        at += tensor.nbytes
    return message


def over_plain_gloo(bed: Bed, most_bytes: int) -> Connecting:
    """Connect forked workers, each on its peer, whose messages have up to so many bytes of tensors."""

    def open_end(worker: int, workers: int, path: str, deadline_s: float) -> PlainGlooEndpoint:
        return PlainGlooEndpoint(worker, workers, path, most_bytes, deadline_s)

    return on_peers(bed, open_end)
