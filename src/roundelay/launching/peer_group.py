"""The machines that have joined a run, one worker each, over the transport ``grpc``; the host leads.

They find one another by texts that they leave with the host. A machine serves those of its partners that have a higher
number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, final

from roundelay.deferred_signals import EndedAsAsked
from roundelay.detect_launcher import LEADER
from roundelay.errors import InternalError, PeerLostError, RoundelayError, WorkerLostError
from roundelay.ir.work import Work
from roundelay.launching.last_words import ENDED, end_told, loss_told, lost_words, one_line
from roundelay.launching.process_group import PLAN_S, ProcessGroup, neighbours
from roundelay.runtime.device import Device
from roundelay.transport.endpoint import Endpoint
from roundelay.transport.grpc_member import Front, Member
from roundelay.transport.grpc_stream import GrpcEndpoint
from roundelay.transport.meeting import Meeting
from roundelay.trust.authority import HOST, Credentials


class Texts(Protocol):
    """Where members leave texts for one another: :class:`roundelay.peers.members.Members`, or a store that calls it."""

    def put(self, name: str, text: str) -> None:
        """Leave a text; a member's names end in its own."""
        ...

    def get(self, name: str, deadline_s: float) -> str:
        """Wait for a text."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Place:
    """What a machine has in a run.

    Args:
        rank: number of its worker.
        names: of all machines, as in their certificates.
        credentials: by which it proves who it is.
        generation: of the run.
        data_bytes: most that a message between workers may have.
        report_bytes: most that a message of a report may have.
        silent_ms: milliseconds that a ping's answer may take.
    """

    rank: int
    names: tuple[str, ...]
    credentials: Credentials
    generation: int
    data_bytes: int
    report_bytes: int
    silent_ms: int


@final
class Guard(NamedTuple):
    """What keeps strangers from a machine's endpoints.

    Args:
        refuse: called with whom they refuse, and one of :data:`roundelay.transport.grpc_stream.REASONS`.
        front: listens before them, and refuses those who do not prove who they are.
    """

    refuse: Callable[[str, str], None]
    front: Front


@final
class _GroupMeeting(Meeting):
    """Where the endpoints of one kind meet."""

    def __init__(self, texts: Texts, kind: str, deadline_s: float) -> None:
        self._texts, self._kind, self._deadline_s = texts, kind, deadline_s

    def set(self, name: str, text: str) -> None:
        """Write a text under a name."""
        self._texts.put(f"{self._kind} {name}", text)

    def get(self, name: str) -> str:
        """Return the text under a name, waiting for it.

        Raises:
            RuntimeError: it does not come in time.
        """
        try:
            return self._texts.get(f"{self._kind} {name}", self._deadline_s)
        except RoundelayError as error:
            raise RuntimeError(str(error)) from error


_WORKER = re.compile(r"worker (\d{1,4})")


@final
class PeerGroup(ProcessGroup):
    """The machines of a run.

    Args:
        place: of this machine.
        texts: where they leave texts.
        guard: keeps strangers from this machine's endpoints.
    """

    def __init__(self, place: Place, texts: Texts, guard: Guard) -> None:
        super().__init__(place.rank, len(place.names), place.generation)
        self._place, self._texts, self._guard = place, texts, guard
        self.trusting, self.launched, self._most_report_bytes = False, False, place.report_bytes
        #: how the host has ended the run before its time, in good order
        self.farewell = ""

    def publish(self, name: str, text: str) -> None:
        """Leave a text for the others; the host does.

        Raises:
            WorkerLostError: the host is gone.
        """
        if not self.leads:
            raise InternalError(
                f"worker {self.rank}",
                got=f"a text {name!r} for all",
                expected="texts of the host only",
                remedy="Report this as a bug.",
            )
        self._texts.put(name, text)

    def fetch(self, name: str, within_s: float = PLAN_S) -> str:
        """Wait for a text of the host, and return it.

        Raises:
            WorkerLostError: it does not come in so many seconds.
        """
        return self._texts.get(name, within_s)

    def barrier(self, what: str) -> None:
        """Wait until every machine has called this with the same name.

        Raises:
            WorkerLostError: one does not within :data:`PLAN_S`.
        """
        self._texts.put(f"{what} {self.restart} {self._place.names[self.rank]}", "")
        for name in self._place.names:
            self._texts.get(f"{what} {self.restart} {name}", PLAN_S)

    def called(self, number: int) -> str:
        """The name of a machine in messages."""
        return HOST if number == LEADER else self._place.names[number]

    def loss(self, number: int, how: str) -> RoundelayError:
        """The error of a machine that is lost; the host may have told of another one before it ended."""
        told = loss_told(how) if number == LEADER else None
        return PeerLostError.of(self.called(number), one_line(how)) if told is None else PeerLostError.of(*told)

    def attributed(self, number: int, error: RoundelayError) -> RoundelayError:
        """The loss of a machine that has failed, or that another has lost; what fails on the host stays as it is."""
        other = _WORKER.fullmatch(error.subject) if isinstance(error, WorkerLostError) else None
        if isinstance(error, PeerLostError) or (number == LEADER and self.leads and other is None):
            return error
        if other is not None and int(other[1]) < self.size:
            return PeerLostError.of(self.called(int(other[1])), one_line(error.got))
        return PeerLostError.of(self.called(number), one_line(f"{error.subject}: {error.got}"))

    def last_words(self, cause: BaseException | None) -> str:
        """What the host tells the others as it ends."""
        if isinstance(cause, EndedAsAsked):
            return ENDED + one_line(str(cause))
        if isinstance(cause, PeerLostError):
            return lost_words(cause.subject, cause.got)
        if isinstance(cause, RoundelayError):
            return lost_words(HOST, f"{cause.subject}: {cause.got}")
        return lost_words(HOST, "it was interrupted" if isinstance(cause, KeyboardInterrupt) else "it has failed")

    def without_leader(self, error: RoundelayError) -> int:
        """0, if the host has ended the run in good order; how is in `farewell`.

        Raises:
            PeerLostError: it is lost, or has told who is.
        """
        farewell = end_told(error.got)
        if farewell is None:
            raise error
        self.farewell = farewell
        return 0

    def data_endpoint(self, work: Work, device: Device) -> Endpoint:
        """Open this machine's endpoint for the messages between workers.

        Raises:
            DeadlineError: another machine did not open its side in time.
        """
        return self._open("data", work.settings.deadline_s, neighbours(work.program), self._place.data_bytes)

    def _endpoint(self, name: str, deadline_s: float, partners: Sequence[int]) -> Endpoint:
        return self._open(name, deadline_s, partners, self._place.report_bytes)

    def _open(self, name: str, deadline_s: float, partners: Sequence[int], most_bytes: int) -> Endpoint:
        own = self._place
        meeting = _GroupMeeting(self._texts, f"{name} {self.restart}", deadline_s)
        service = f"{name}-{self.restart}"
        member = Member(own.credentials, meeting, own.generation, service, own.silent_ms, *self._guard, names=own.names)
        return GrpcEndpoint(own.rank, partners, member, deadline_s, most_bytes)
