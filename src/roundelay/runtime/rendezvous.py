"""The processes that a launcher such as torchrun has started together, one worker each, on one host or several.

They meet at the launcher's store. Worker 0's process leads: it hears the reports of all on the control line
(:mod:`roundelay.runtime.control_channel`), and alone shows and writes things. Whatever waits inside torch does so in a
thread of its own: the main thread must hear the signals by which a launcher ends this process.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar, final

import torch.distributed as dist

from roundelay.errors import ToldElsewhereError, WorkerLostError
from roundelay.ir.plan import Plan
from roundelay.launchers import LEADER, Launched
from roundelay.runtime.control_channel import ControlChannel, OnDeaf, OnLost
from roundelay.runtime.device import Device
from roundelay.runtime.rendezvous_store import check_interface, connected, opened, unreachable
from roundelay.runtime.worker_messages import Reporter
from roundelay.transport.endpoint import Endpoint
from roundelay.transport.gloo import GlooEndpoint
from roundelay.transport.nccl import NcclEndpoint
from roundelay.transport.nccl_p2p import NcclLane, open_lanes
from roundelay.transport.queues import next_item

PLAN_S = 900.0
"""Seconds that the leader may take to capture and plan."""

_T = TypeVar("_T")
TICK_S = 0.2
"""Seconds between two moments in which a thread that waits can hear a signal."""


@final
class ProcessGroup:
    """This process's membership: its number, the others', and whether it is the one that a person looks at.

    The leader tells what ends a run. Of a leader that is lost one member on each host tells, its deputy.

    Args:
        place: how the launcher started it.

    Raises:
        WorkerLostError: the store in which they meet cannot be reached.
        UsageError: worker 0 cannot open one, or the network interface is not here.
    """

    def __init__(self, place: Launched) -> None:
        self.rank, self.size, self.restart = place.rank, place.size, place.restart
        self.others = (*range(place.rank), *range(place.rank + 1, place.size))
        self.leads, self.deputy = place.rank == LEADER, place.deputy
        self._interface = place.interface if place.nodes > 1 else None
        self._host, self._met = place.host_rank, False
        check_interface(place)
        self._served = opened(place) if place.opens_store and self.leads else None  # lives as long as this process
        try:
            store, another = (_patiently(partial(connected, place)) for _ in range(2))
        except (RuntimeError, ValueError) as error:
            raise unreachable(place, error) from error
        self._store, self._told = (
            dist.PrefixStore(f"roundelay/{place.run}", one)  # type: ignore[attr-defined]
            for one in (store, another)  # a wait that is given up keeps a store's only connection
        )

    @property
    def met(self) -> bool:
        """Whether all have met on the control line: from then on each loss is heard of."""
        return self._met

    @contextmanager
    def told_once(self) -> Iterator[None]:
        """Of what ends this process before all have met on the line, one process on each host tells.

        All read the same job and go the same way, so they fail together; afterwards the leader tells.

        Raises:
            ToldElsewhereError: another has told it.
        """
        try:
            yield
        except Exception as error:
            if not self._met and self._count_told(1) > 1:
                raise ToldElsewhereError from error
            raise
        except KeyboardInterrupt as error:  # of a launcher that has lost the one that told
            if not self._met and self._count_told(0) > 0:
                raise ToldElsewhereError from error
            raise

    def _count_told(self, more: int) -> int:
        """How many on this host have told an error by now, counting `more`."""
        try:
            return int(_patiently(lambda: self._told.add(f"told {self._host}", more)))
        except RuntimeError:  # the launcher has gone
            return more

    def give(self, name: str, text: str) -> None:
        """Publish a text; the leader does so.

        Raises:
            WorkerLostError: the launcher's store is gone.
        """
        try:
            _patiently(lambda: self._store.set(name, text))
        except RuntimeError as error:
            raise WorkerLostError(
                "the launcher's store",
                got=str(error).splitlines()[0],
                expected="a place for what others wait for",
                remedy="See whether the launcher still runs and can be reached from this host.",
            ) from error

    def take(self, name: str) -> str:
        """The text that the leader publishes under this name.

        Raises:
            WorkerLostError: it never does.
        """
        try:
            _patiently(lambda: self._store.wait([name], timedelta(seconds=PLAN_S)))
            return bytes(_patiently(lambda: self._store.get(name))).decode()
        except RuntimeError as error:
            raise WorkerLostError(
                f"worker {self.rank} waiting for the leader's {name}",
                got=str(error).splitlines()[0],
                expected=f"it within {PLAN_S:g} s",
                remedy="See what worker 0 told.",
            ) from error

    def gather(self, what: str) -> None:
        """Wait until every member has come so far.

        Raises:
            WorkerLostError: one never does.
        """
        self.give(f"{what} {self.restart} {self.rank}", "")
        for rank in range(self.size):
            self.take(f"{what} {self.restart} {rank}")

    def line(self, deadline_s: float, on_report: Reporter, on_lost: OnLost, on_deaf: OnDeaf) -> ControlChannel:
        """This process's end of the control line, when all have met on it.

        Args:
            deadline_s: seconds in which they must.
            on_report: told of every report.
            on_lost: told of every process that is lost, of those that this one depends on.
            on_deaf: told if this process can hear no more.

        Raises:
            DeadlineError: not all have come.
        """
        watched = self.others if self.leads else (LEADER,)
        reports, news = (_patiently(partial(self._endpoint, name, deadline_s, watched)) for name in ("reports", "news"))
        self._met = True
        return ControlChannel(reports, news, watched, on_report, on_lost, on_deaf)

    def _endpoint(self, name: str, deadline_s: float, partners: Sequence[int]) -> Endpoint:
        """This process's end of one set of connections."""
        return GlooEndpoint(self.rank, self.size, self._meeting(name), deadline_s, self._interface, partners)

    def data(self, plan: Plan, device: Device) -> Endpoint:
        """This process's end of the workers' own connections, on the plan's transport.

        Raises:
            DeadlineError: another process did not open its side in time.
        """
        frames = self._endpoint("data", plan.deadline_s, self.others)
        if plan.transport != "nccl":
            return frames
        others = _partners(plan, self.rank)

        def make(name: str, sends: bool) -> NcclLane:
            return NcclLane(self._meeting(f"lane/{name}"), sends)

        place = device.lane_end()
        try:
            lanes = open_lanes(self.rank, others, make, place, plan.deadline_s)
        except BaseException:  # the others would wait for this one's end
            frames.abort("it could not open its lanes")
            raise
        return NcclEndpoint(frames, lanes, place, plan.deadline_s)

    def _meeting(self, name: str) -> Any:
        return dist.PrefixStore(name, self._store)  # type: ignore[attr-defined]

    def where(self) -> str:
        """This process, for people."""
        return f"worker {self.rank} (process {os.getpid()} on {socket.gethostname()})"


def _partners(plan: Plan, worker: int) -> list[int]:
    """With whom a worker exchanges tensors."""
    home = plan.stage_workers
    pairs = [{home[edge.source], home[edge.target]} for edge in plan.edges]
    return sorted({other for pair in pairs if worker in pair for other in pair - {worker}})


def _patiently(wait: Callable[[], _T]) -> _T:
    """The result of what waits inside torch, where no signal is heard."""
    results: queue.SimpleQueue[tuple[_T, None] | tuple[None, Exception]] = queue.SimpleQueue()

    def main() -> None:
        try:
            results.put((wait(), None))
        except Exception as error:  # raised again where it is waited for
            results.put((None, error))

    threading.Thread(target=main, name="waits", daemon=True).start()
    while True:
        try:
            result, error = next_item(results, TICK_S)
        except queue.Empty:
            continue
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # there is one or the other
