"""The processes of a run that were started one by one, each with one worker: who leads, and how they meet.

The process of worker 0 leads: it receives all reports on the control channel
(:mod:`roundelay.launching.control_channel`), and alone prints and writes results.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TypeVar

from roundelay.detect_launcher import LEADER
from roundelay.errors import RoundelayError
from roundelay.ir.program import Program
from roundelay.ir.work import Work
from roundelay.launching.control_channel import (
    LEADER_TELLS,
    ControlChannel,
    OnLost,
    OnUnreadable,
    Others,
    launched_loss,
)
from roundelay.launching.silent_hosts import ending_unacknowledged
from roundelay.runtime.device import Device
from roundelay.runtime.processes.worker_messages import Reporter
from roundelay.transport.endpoint import Endpoint

PLAN_S = 900.0
"""Seconds that the leader may take to capture and plan."""

_T = TypeVar("_T")


class ProcessGroup(ABC):
    """This process's membership in a group: its rank, the others', and connections to them.

    Args:
        rank: number of this process and of its worker.
        size: how many there are.
        restart: how often the group was started again.
    """

    def __init__(self, rank: int, size: int, restart: int = 0) -> None:
        self.rank, self.size, self.restart = rank, size, restart
        self.others = (*range(rank), *range(rank + 1, size))
        self.leads, self._met = rank == LEADER, False
        self._channel: ControlChannel | None = None
        #: whether this process does what the leader says with files of its own machine
        self.trusting = True
        #: whether a launcher has started this process, which ends all by a signal when it has lost one
        self.launched = True
        self._most_report_bytes: int | None = None

    @property
    def met(self) -> bool:
        """Whether the control channel is connected: from then on the loss of a process is reported."""
        return self._met

    @abstractmethod
    def publish(self, name: str, text: str) -> None:
        """Store a text for the other processes.

        Raises:
            WorkerLostError: what stores it is gone.
        """

    @abstractmethod
    def fetch(self, name: str, within_s: float = PLAN_S) -> str:
        """Wait for a text that another process publishes under this name, and return it.

        Raises:
            WorkerLostError: it does not appear within so many seconds.
        """

    @abstractmethod
    def data_endpoint(self, work: Work, device: Device) -> Endpoint:
        """Open this process's endpoint for the messages between workers, on their transport.

        Raises:
            DeadlineError: another process did not open its side in time.
        """

    @abstractmethod
    def _endpoint(self, name: str, deadline_s: float, partners: Sequence[int]) -> Endpoint:
        """Open this process's end of one set of connections."""

    def _waited(self, wait: Callable[[], _T]) -> _T:
        """The result of a call that waits; signals may have to be handled meanwhile."""
        return wait()

    def barrier(self, what: str) -> None:
        """Wait until every process has called this with the same name.

        Raises:
            WorkerLostError: one does not within :data:`PLAN_S`.
        """
        self.publish(f"{what} {self.restart} {self.rank}", "")
        for rank in range(self.size):
            self.fetch(f"{what} {self.restart} {rank}")

    def control_channel(
        self, deadline_s: float, on_report: Reporter, on_lost: OnLost, on_unreadable: OnUnreadable
    ) -> ControlChannel:
        """Connect the control channel with all processes, and return this process's end.

        Args:
            deadline_s: seconds in which all must connect.
            on_report: called with every report.
            on_lost: called for every lost process among those that this one depends on.
            on_unreadable: called if this process can no longer receive.

        Raises:
            DeadlineError: not all have connected.
        """
        watched = self.others if self.leads else (LEADER,)
        reports = self._waited(partial(self._endpoint, "reports", deadline_s, watched))
        with ending_unacknowledged():  # the heartbeats
            news = self._waited(partial(self._endpoint, "news", deadline_s, watched))
        self._met = True
        self._channel = ControlChannel(
            reports, news, watched, on_report, on_lost, on_unreadable, Others(self.loss, self._most_report_bytes)
        )
        return self._channel

    def conclude(self, code: int | None) -> None:
        """End, as the leader, the control channel that an audited run has left open, if there is one.

        Args:
            code: exit code of all processes; None: this one tells of a failure.
        """
        if self._channel is not None and code is None:
            self._channel.end(LEADER_TELLS)
        elif self._channel is not None and code is not None:
            self._channel.conclude(code)

    def loss(self, number: int, how: str) -> RoundelayError:
        """The error of a process that is lost.

        Args:
            number: its rank.
            how: what is known of it, or the words with which it has ended.
        """
        return launched_loss(number, how)

    def attributed(self, number: int, error: RoundelayError) -> RoundelayError:
        """An error that a process has reported, as it is told here."""
        return error

    def last_words(self, cause: BaseException | None) -> str:
        """What the leader tells the others as it ends."""
        return LEADER_TELLS

    def without_leader(self, error: RoundelayError) -> int:
        """The exit code of a process whose leader is gone.

        Raises:
            RoundelayError: `error`, unless the leader tells of it.
        """
        if error.got != LEADER_TELLS:
            raise error
        return 1

    def where(self) -> str:
        """The name of this process in messages."""
        return f"worker {self.rank} (process {os.getpid()} on {socket.gethostname()})"


def neighbours(program: Program, without: Collection[str] = ()) -> list[int]:
    """The workers with which a worker shares channels, but those of the kinds ``without``."""
    ports = [port for c in program.channels if c.kind not in without for port in (*c.sources, *c.targets)]
    return sorted({port.worker for port in ports} - {program.worker})
