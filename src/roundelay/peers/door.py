"""The door of a run: where a machine that has an invitation, and no certificate yet, gets one. Nothing else is served.

The door shows a certificate that it signs itself, made for one run; invitations pin it. It answers one call, Join.
Whoever else comes is refused, and written down: below a call by :mod:`roundelay.peers.listener`, in a call here.

It runs in the event loop of a thread, beside the trainer. gRPC is imported then: the process must not fork any more.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, final

from roundelay.errors import UsageError
from roundelay.membership.roster import Attempt, Roster, Seat, admit, invited, seat_for
from roundelay.peers import refusals
from roundelay.peers.gate import Gate
from roundelay.peers.import_grpc import import_grpc
from roundelay.peers.listener import LOOPBACK, Limits, Service, Visit
from roundelay.peers.messages import (
    DOOR_NAME,
    JOIN_S,
    MAX_BYTES,
    PATH,
    Join,
    Refusal,
    Versions,
    Welcome,
    decode_join,
    encode,
)
from roundelay.peers.refusals import RefusalLog
from roundelay.trust.authority import WORKER, Authority
from roundelay.trust.certificates import self_signed
from roundelay.trust.invitation import Address, Invitation, fingerprint_of, new_secret

GRACE_S = 1.0
"""Seconds that a connection may last beyond a call."""

LIMITS = Limits(JOIN_S + GRACE_S, 3 * MAX_BYTES)

_OPTIONS = {
    "grpc.max_receive_message_length": LIMITS.sent,
    "grpc.max_concurrent_streams": 1,
    "grpc.server_handshake_timeout_ms": int(1000 * (LIMITS.seconds + GRACE_S)),  # the listener cuts first, and reports
    "grpc.max_connection_age_ms": int(1000 * (LIMITS.seconds + GRACE_S)),
    "grpc.max_connection_age_grace_ms": int(1000 * GRACE_S),
    "grpc.max_metadata_size": 8 * 1024,
    "grpc.so_reuseport": 0,
}


@final
@dataclass(frozen=True, slots=True)
class Terms:
    """What whoever is admitted gets.

    Args:
        run: the run's name (:func:`roundelay.trust.invitation.new_run`).
        authority: signs the certificates.
        members: where the service for members listens.
        versions: that joiners must have too.
        generation: of the run.
    """

    run: str
    authority: Authority
    members: tuple[Address, ...]
    versions: Versions
    generation: int = 0


@final
class Door:
    """Listens until it is closed. Its methods may be called from any thread.

    Args:
        terms: of the run; may be replaced while the door is open.
        roster: the seats; invitations may be added later.
        log: of refusals.
        gate: the port of this machine, in whose loop it runs.
        admitted: is called in the loop's thread with each seat that is given, again if it is given again to its owner.
            It must not block.
        valid: how long the door's certificate is valid.

    Raises:
        UsageError: a package is not installed.
    """

    terms: Terms

    def __init__(
        self,
        terms: Terms,
        roster: Roster,
        log: RefusalLog,
        gate: Gate,
        admitted: Callable[[Seat], None] = lambda seat: None,
        valid: timedelta = timedelta(days=30),
    ) -> None:
        self.terms = terms
        self._roster, self._log, self._gate, self._admitted = roster, log, gate, admitted
        self._lock = threading.Lock()
        self._key, self._certificate = self_signed(DOOR_NAME, datetime.now(UTC), valid)
        self._grpc: Any = import_grpc()
        gate.loop.run(self._open(), JOIN_S)

    @property
    def roster(self) -> Roster:
        """The seats as they are now."""
        with self._lock:
            return self._roster

    def update(self, change: Callable[[Roster], Roster]) -> Roster:
        """Change the roster, and return it; nobody is admitted meanwhile."""
        with self._lock:
            self._roster = change(self._roster)
            return self._roster

    def invite(self, name: str, expiry: int, addresses: tuple[Address, ...] = (), role: str = WORKER) -> Invitation:
        """Add a seat, and return its invitation, which alone knows its secret.

        Args:
            name: in the certificate of its owner.
            expiry: UTC, in seconds since 1970.
            addresses: where others reach this door; by default where the gate says.
            role: in the certificate of its owner.

        Raises:
            UsageError: no address is given, and the gate listens on all of this machine.
        """
        if not addresses and self._gate.everywhere:
            raise _nowhere(self._gate.address)
        fingerprint = fingerprint_of(self._certificate)
        with self._lock:
            number = len(self._roster.seats)
            at = addresses or (self._gate.address,)
            invitation = Invitation(at, self.terms.run, fingerprint, new_secret(), expiry, number)
            self._roster = invited(self._roster, seat_for(invitation, name, role))
        return invitation

    def close(self) -> None:
        """Let nobody in any more, and cut what is connected."""
        self._gate.loop.run(self._close(), JOIN_S)

    # --- the loop's thread

    async def _open(self) -> None:
        grpc = self._grpc
        self._server = grpc.aio.server(options=[*_OPTIONS.items()])
        self._server.add_generic_rpc_handlers((_handler(grpc, self._join, self._unknown),))
        shown = grpc.ssl_server_credentials([(self._key, self._certificate)])
        port = self._server.add_secure_port(f"{LOOPBACK}:0", shown)
        await self._server.start()
        self._gate.listener.serve(DOOR_NAME, Service(port, LIMITS))

    async def _close(self) -> None:
        await self._gate.listener.leave(DOOR_NAME)
        await self._server.stop(GRACE_S)  # calls end with their connections

    async def _join(self, _: object, context: Any) -> None:
        """Answer one call; whatever is no Join is refused as gRPC refuses."""
        visit, code = self._gate.listener.visit_of(context.peer()), self._grpc.StatusCode
        try:
            received = await asyncio.wait_for(context.read(), JOIN_S)
        except TimeoutError:
            await self._abort(context, visit, code.DEADLINE_EXCEEDED, refusals.SLOW)
        if not isinstance(received, bytes):
            await self._abort(context, visit, code.INVALID_ARGUMENT, refusals.UNREADABLE)
        if len(received) > MAX_BYTES:
            await self._abort(context, visit, code.RESOURCE_EXHAUSTED, refusals.OVERSIZE)
        join = decode_join(received)
        if join is None:
            await self._abort(context, visit, code.INVALID_ARGUMENT, refusals.UNREADABLE)
        else:
            await context.write(encode(self._answer(join, visit)))

    async def _unknown(self, _: object, context: Any) -> None:
        visit = self._gate.listener.visit_of(context.peer())
        await self._abort(context, visit, self._grpc.StatusCode.UNIMPLEMENTED, refusals.UNKNOWN_METHOD)

    async def _abort(self, context: Any, visit: Visit, code: Any, reason: str) -> None:
        if not visit.refused:  # else the listener has cut it, and reports it
            visit.settled = True
            self._log.refuse(visit.peer, reason)
        await context.abort(code, reason)

    def _answer(self, join: Join, visit: Visit) -> Welcome | Refusal:
        visit.settled = True
        answer = self._decide(join, visit.address, time.time())
        if isinstance(answer, Refusal):
            self._log.refuse(visit.peer, answer.reason)
        return answer

    def _decide(self, join: Join, address: str, now: float) -> Welcome | Refusal:
        """Give a seat or refuse; only a welcome uses the invitation up."""
        attempt = Attempt(join.secret, hashlib.sha256(join.request).digest(), address)
        with self._lock:
            terms = self.terms
            roster, outcome = admit(self._roster, attempt, now, terms.generation)
            if isinstance(outcome, str):
                self._roster = roster
                return Refusal(outcome)
            if refusal := _other_version(join, terms.versions.comparable()):
                return refusal
            try:
                certificate = terms.authority.sign(join.request, outcome.name, outcome.role)
            except UsageError as error:
                return Refusal(error.got)
            self._roster = roster
        self._admitted(outcome)
        return _welcome(terms, outcome, certificate)


def _handler(grpc: Any, join: Any, unknown: Any) -> Any:
    """Leads one method to `join`, and all others to `unknown`.

    Both are called as soon as a call begins, so that a body that does not come can be reported; the caller's side may
    have one message in each direction.
    """
    methods = {path: grpc.stream_stream_rpc_method_handler(handler) for path, handler in ((PATH, join), ("", unknown))}

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return methods.get(details.method, methods[""])

    return Handler()


def _nowhere(listen: Address) -> UsageError:
    return UsageError(
        "addresses of an invitation",
        got=f"none, while the door listens on all addresses of this machine ({listen[0]})",
        expected="those at which other machines reach this one",
        remedy="Name at least one.",
    )


def _other_version(join: Join, own: Versions) -> Refusal | None:
    if join.roundelay != own.roundelay:
        return Refusal(refusals.OTHER_ROUNDELAY, *own)
    return Refusal(refusals.OTHER_TORCH, *own) if join.torch != own.torch else None


def _welcome(terms: Terms, seat: Seat, certificate: bytes) -> Welcome:
    return Welcome(
        certificate,
        terms.authority.certificate,
        terms.run,
        seat.number,
        seat.name,
        seat.role,
        seat.generation,
        terms.members,
    )
