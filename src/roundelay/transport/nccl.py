"""The `nccl` transport: workers are processes with a GPU each; frames and credits travel over gloo, tensors over NCCL.

Every message is a frame; its GPU tensors follow on a *lane* (:mod:`roundelay.transport.nccl_p2p`). One *guard* thread
per endpoint receives the frames, allocates the tensors and posts the matching receives at once. When the worker takes
the message, its CUDA stream waits for them; the host never does.

NCCL does not report that a worker has died: its peers wait forever. gloo reports it; the guard then aborts the lanes to
that worker, which ends what waits on the GPU. What was computed after that is meaningless, so an error that follows is
reported as the loss of the worker (:meth:`NcclEndpoint.cause`).

All but ``NcclLane`` is tested on the CPU, with lanes over gloo. It has not been run on GPUs yet.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import final

import torch

from roundelay.errors import DeadlineError, InternalError, RoundelayError, WorkerLostError
from roundelay.transport.checked_endpoint import CheckedEndpoint
from roundelay.transport.endpoint import Arrived, Delivery, Endpoint, Lost, Message
from roundelay.transport.nccl_p2p import Lane, LaneDevice, Lanes, Wait, allocate_announced, announce

TICK_S = 0.2
"""How often the guard checks whether it should end, in seconds."""


@final
class NcclEndpoint(CheckedEndpoint):
    """One process's endpoint; see the module's docstring.

    Args:
        inner: carries frames and credits, and reports lost workers.
        lanes: carry tensors, to and from the workers that this one exchanges messages with.
        device: the device whose tensors travel on lanes; others travel in the frames.
        deadline_s: seconds that `close` may take.
    """

    def __init__(self, inner: Endpoint, lanes: Lanes, device: LaneDevice, deadline_s: float) -> None:
        super().__init__(inner.worker, lanes.to)
        self.carries = ("cpu", device.device.type)
        self._inner, self._lanes, self._device, self._deadline_s = inner, lanes, device, deadline_s
        self._waits: deque[Wait] = deque()  # of the messages in the inbox, in order
        self._lost: dict[int, str] = {}
        self._losing = threading.Lock()
        self._stop = threading.Event()
        self._guard = threading.Thread(target=self._main, name="guard", daemon=True)
        self._guard.start()

    def _send(self, to: int, message: Message) -> None:
        frame, parts = announce(message, self._device.device.type)
        self._inner.send(to, frame)
        if parts and to not in self._lost:
            try:
                self._lanes.to[to].send(parts)
            except RuntimeError as fault:
                self._lose(to, str(fault))

    def _grant(self, to: int, channel: int) -> None:
        self._inner.grant(to, channel)

    def _take(self, timeout_s: float, credits: bool) -> Delivery:
        """Take a delivery; what the worker submits to its stream from now on waits for the message's tensors."""
        while True:
            delivery = super()._take(timeout_s, credits)
            if not isinstance(delivery, Arrived):
                return delivery
            try:
                self._waits.popleft()()
            except RuntimeError as fault:
                self._lose(delivery.source, str(fault))
                continue
            self._device.keep(v for v in delivery.message.values if isinstance(v, torch.Tensor) and v.is_cuda)
            return delivery

    def _close(self) -> None:
        """Close after all tensors have been received by the others.

        The guard runs until the others have closed too: what they still send must be received, if only to be dropped.
        """
        deadline = time.monotonic() + self._deadline_s
        flushed = all(lane.flush(deadline - time.monotonic()) for lane in self._living())
        try:
            self._inner.close()
        finally:
            self._stop.set()
            self._guard.join(10 * TICK_S)
            flushed = self._lanes.close(max(0.0, deadline - time.monotonic())) and flushed
        if not flushed and not self._lost:
            raise DeadlineError(
                f"worker {self.worker} closing",
                got=f"tensors that nobody received for {self._deadline_s:g} s",
                expected="each worker to receive what was sent",
                remedy="Check whether the others still run, or allow more time.",
            )

    def _abort(self, reason: str) -> None:
        """End what waits on the GPU, too."""
        self._lanes.abort_all()
        self._inner.abort(reason)
        self._stop.set()
        self._guard.join(10 * TICK_S)

    def cause(self, error: RoundelayError) -> RoundelayError:
        """The loss of a worker, if one is lost or this endpoint was aborted: later errors may follow from it."""
        error = self._inner.cause(error)
        lost = next(iter(self._lost.items()), None)
        if (lost is None and not self._aborted) or isinstance(error, WorkerLostError):
            return error
        return WorkerLostError(
            f"worker {lost[0]}" if lost else f"worker {self.worker}'s endpoint",
            got=lost[1] if lost else f"it was aborted ({self._ended})",
            expected="a living worker",
            remedy="Read its own message; continue with `roundelay train --from` the last checkpoint.",
        )

    def _living(self) -> list[Lane]:
        return [lane for other, lane in self._lanes.to.items() if other not in self._lost]

    def _main(self) -> None:
        """The guard thread."""
        with self._device.receiving():
            while not self._stop.is_set():
                try:
                    delivery = self._inner.receive(TICK_S)
                except DeadlineError:
                    continue
                if delivery.source not in (self.worker, *self._lost):
                    self._handle(delivery)

    def _handle(self, delivery: Delivery) -> None:
        if isinstance(delivery, Lost):
            self._lose(delivery.source, delivery.reason)
        elif isinstance(delivery, Arrived):
            try:
                message, parts = allocate_announced(delivery.message, self._device.device)
                wait = self._lanes.source[delivery.source].post(parts) if parts else lambda: None
            except (InternalError, RuntimeError) as fault:
                self._lose(delivery.source, str(fault))
            else:
                self._waits.append(wait)
                self.deliver(Arrived(delivery.source, message))
        else:
            self.deliver(delivery)

    def _lose(self, other: int, reason: str) -> None:
        """Record that worker `other` is lost, abort what waits for it, then report it."""
        with self._losing:
            first = other not in self._lost
            self._lost.setdefault(other, reason)
        if first:
            self._lanes.abort(other)
            self.deliver(Lost(other, reason))
