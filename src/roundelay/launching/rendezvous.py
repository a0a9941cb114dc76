"""Connects the processes that a launcher such as torchrun has started, one worker each, on one host or several.

They meet at a TCPStore. Blocking calls of torch run in a separate thread, as the main thread must handle the signals by
which a launcher ends this process.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, final

import torch.distributed as dist

from roundelay.detect_launcher import Launched
from roundelay.errors import WorkerLostError
from roundelay.ir.program import SCALARS
from roundelay.ir.work import Work
from roundelay.launching.process_group import PLAN_S, ProcessGroup, neighbours
from roundelay.launching.rendezvous_store import check_interface, connect_store, open_store, unreachable
from roundelay.runtime.device import Device
from roundelay.transport.checked_endpoint import next_item
from roundelay.transport.endpoint import Endpoint
from roundelay.transport.gloo import GlooEndpoint
from roundelay.transport.nccl import NcclEndpoint
from roundelay.transport.nccl_p2p import NcclLane, open_lanes

_T = TypeVar("_T")
TICK_S = 0.2
"""Seconds after which a waiting main thread can handle a signal."""


@final
class LaunchedGroup(ProcessGroup):
    """The processes that a launcher has started.

    Args:
        launched: how the launcher started this process.

    Raises:
        WorkerLostError: the store cannot be reached.
        UsageError: worker 0 cannot open one, or this host does not have the network interface.
    """

    def __init__(self, launched: Launched) -> None:
        super().__init__(launched.rank, launched.size, launched.restart)
        self._interface = launched.interface if launched.nodes > 1 else None
        check_interface(launched)
        serves = launched.opens_store and self.leads
        self._served = open_store(launched) if serves else None  # lives as long as this process
        try:
            store = _interruptibly(partial(connect_store, launched))
        except (RuntimeError, ValueError) as error:
            raise unreachable(launched, error) from error
        self._store = dist.PrefixStore(f"roundelay/{launched.run}", store)  # type: ignore[attr-defined]

    def publish(self, name: str, text: str) -> None:
        """Store a text for the other processes.

        Raises:
            WorkerLostError: the store is gone.
        """
        try:
            _interruptibly(lambda: self._store.set(name, text))
        except RuntimeError as error:
            raise WorkerLostError(
                "the launcher's store",
                got=str(error).splitlines()[0],
                expected="a connection to it",
                remedy="Check that the launcher still runs and can be reached from this host.",
            ) from error

    def fetch(self, name: str, within_s: float = PLAN_S) -> str:
        """Wait for a text that another process publishes under this name, and return it.

        Raises:
            WorkerLostError: it does not appear within so many seconds.
        """
        try:
            _interruptibly(lambda: self._store.wait([name], timedelta(seconds=within_s)))
            return bytes(_interruptibly(lambda: self._store.get(name))).decode()
        except RuntimeError as error:
            raise WorkerLostError(
                f"worker {self.rank} waiting for the leader's {name}",
                got=str(error).splitlines()[0],
                expected=f"it within {within_s:g} s",
                remedy="Check the output of worker 0.",
            ) from error

    def _waited(self, wait: Callable[[], _T]) -> _T:
        return _interruptibly(wait)

    def _endpoint(self, name: str, deadline_s: float, partners: Sequence[int]) -> Endpoint:
        """Open this process's end of one set of connections."""
        return GlooEndpoint(self.rank, self.size, self._prefixed_store(name), deadline_s, self._interface, partners)

    def data_endpoint(self, work: Work, device: Device) -> Endpoint:
        """Open this process's endpoint for the messages between workers, on their transport.

        Raises:
            DeadlineError: another process did not open its side in time.
        """
        frames = self._endpoint("data", work.settings.deadline_s, self.others)
        if work.settings.transport != "nccl":
            return frames
        others = neighbours(work.program, SCALARS)

        def make(name: str, sends: bool) -> NcclLane:
            return NcclLane(self._prefixed_store(f"lane/{name}"), sends)

        lane = device.lane_device()
        try:
            lanes = open_lanes(self.rank, others, make, lane, work.settings.deadline_s)
        except BaseException:  # otherwise the others would wait for this process
            frames.abort("it could not open its lanes")
            raise
        return NcclEndpoint(frames, lanes, lane, work.settings.deadline_s)

    def _prefixed_store(self, name: str) -> Any:
        return dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]


def _interruptibly(wait: Callable[[], _T]) -> _T:
    """Run a blocking call of torch in a thread, so that this thread can handle signals; return its result."""
    results: queue.SimpleQueue[tuple[_T, None] | tuple[None, Exception]] = queue.SimpleQueue()

    def main() -> None:
        try:
            results.put((wait(), None))
        except Exception as error:  # raised again where it is waited for
            results.put((None, error))

    threading.Thread(target=main, name="rendezvous", daemon=True).start()
    while True:
        try:
            result, error = next_item(results, TICK_S)
        except queue.Empty:
            continue
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # there is one or the other
