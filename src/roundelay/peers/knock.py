"""Knocks at the door of a run with an invitation, and comes back with a certificate.

The key is made here, and stays here. Nothing is trusted but the certificate whose fingerprint the invitation has.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, final

from roundelay.errors import RoundelayError, UsageError, WorkerLostError
from roundelay.membership import roster
from roundelay.peers import refusals
from roundelay.peers.import_grpc import import_grpc
from roundelay.peers.messages import (
    DOOR_NAME,
    JOIN_S,
    MAX_BYTES,
    PATH,
    Join,
    Refusal,
    Versions,
    Welcome,
    decode_answer,
    encode,
)
from roundelay.trust.authority import Credentials
from roundelay.trust.certificates import is_issued_to, validity_of
from roundelay.trust.invitation import Address, Invitation, address_text, fingerprint_of
from roundelay.trust.request import new_request

PAUSE_S = 0.5
"""Seconds between two rounds over the addresses."""

_ANOTHER = "somebody else answers there"
_ANSWERING_S = 1.0  # that an address must leave for the others, however short the deadline


@final
@dataclass(frozen=True, slots=True)
class Joined:
    """What a machine has that was let in.

    Args:
        credentials: for the service of members.
        welcome: the host's answer.
        door: the address at which it was answered.
    """

    credentials: Credentials
    welcome: Welcome
    door: Address


def knock(invitation: Invitation, deadline_s: float, versions: Versions) -> Joined:
    """Return what an invitation gives.

    Tries its addresses in turn until one answers. An answer that is lost is asked for again, with the same key.

    Args:
        invitation: of this machine.
        deadline_s: seconds until which somebody must answer.
        versions: of this machine.

    Raises:
        UsageError: the host refuses; only somebody else answers; a clock is wrong; a package is not installed.
        WorkerLostError: no address answers.
    """
    key, request = new_request()
    own = versions.comparable()
    join = Join(own.roundelay, own.torch, invitation.secret, request)
    deadline, heard = time.monotonic() + deadline_s, dict[Address, str]()
    for address in _rounds(invitation.addresses, deadline):
        left = max(_ANSWERING_S, min(JOIN_S, deadline - time.monotonic()))
        try:
            shown, reached = _shown(address, left)
            if fingerprint_of(shown) != invitation.fingerprint:
                raise _Unanswered(_ANOTHER)
            _check_clock(shown, f"certificate of the host at {address_text(address)}")
            answer = _call(reached, shown, join, left)
        except (OSError, EOFError, _Unanswered) as error:
            heard[address] = _reason(error)
            if all(heard.get(each) == _ANOTHER for each in invitation.addresses):
                break
        else:
            return _joined(invitation, address, key, own, answer)
    raise _unheard(invitation, heard, deadline_s)


class _Unanswered(Exception):
    """A call that did not reach the door, or whose answer was lost."""


def _rounds(addresses: tuple[Address, ...], deadline: float) -> Iterator[Address]:
    """The addresses, again and again until the deadline; each at least once."""
    yield from addresses
    while time.monotonic() + PAUSE_S < deadline:
        time.sleep(PAUSE_S)
        yield from addresses


def _shown(address: Address, timeout_s: float) -> tuple[bytes, str]:
    """The certificate that is shown at an address, PEM, unchecked; and the address as gRPC calls it, resolved."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])  # else gRPC ends the connection, which the door takes for a stranger's
    with (
        socket.create_connection(address, timeout_s) as plain,
        context.wrap_socket(plain, server_hostname=DOOR_NAME) as secured,
    ):
        shown = ssl.DER_cert_to_PEM_cert(secured.getpeercert(binary_form=True) or b"").encode()
        kind = "ipv6" if secured.family == socket.AF_INET6 else "ipv4"
        host, port = secured.getpeername()[:2]
        return shown, f"{kind}:{address_text((host, port))}"


def _check_clock(certificate: bytes, subject: str) -> None:
    now, (first, last) = datetime.now(UTC), validity_of(certificate)
    if not first <= now <= last:
        when = "not yet" if now < first else "no longer"
        raise UsageError(
            subject,
            got=f"one that is {when} valid: here it is {now:%Y-%m-%d %H:%M:%S} UTC",
            expected=f"a time from {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC",
            remedy="Set the clocks of both machines; if they are right, ask for a new invitation.",
        )


def _call(reached: str, root: bytes, join: Join, timeout_s: float) -> bytes:
    grpc = import_grpc()
    options = {
        "grpc.ssl_target_name_override": DOOR_NAME,
        "grpc.max_receive_message_length": MAX_BYTES,
        "grpc.enable_http_proxy": 0,
        "grpc.enable_retries": 0,
    }
    trusting = grpc.ssl_channel_credentials(root)
    with grpc.secure_channel(reached, trusting, options=[*options.items()]) as channel:
        try:
            answer: bytes = channel.unary_unary(PATH)(encode(join), timeout=timeout_s)
            return answer
        except grpc.RpcError as error:
            return _failed(grpc, reached, error)


def _failed(grpc: Any, reached: str, error: Any) -> bytes:
    """Raise what a failed call means: a loss, after which it is worth another try, or a refusal."""
    code = error.code()
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        raise _Unanswered(f"no answer to the call ({error.details()})") from error
    raise _refused(reached, f"{error.details()}", "Run the version of Roundelay that the host runs.") from error


def _joined(invitation: Invitation, address: Address, key: bytes, own: Versions, received: bytes) -> Joined:
    answer = decode_answer(received)
    if isinstance(answer, Refusal):
        raise _refusal(address, answer, own)
    expected = answer and (answer.run, answer.seat) == (invitation.run, invitation.seat)
    if answer is None or not expected or not is_issued_to(answer.certificate, answer.authority, key):
        remedy = "Run the version of Roundelay that the host runs."
        raise _refused(
            address_text(address), "an answer that does not fit the invitation or this machine's key", remedy
        )
    _check_clock(answer.certificate, "certificate of this machine")
    return Joined(Credentials(answer.authority, answer.certificate, key), answer, address)


REMEDIES = {
    roster.UNKNOWN: "Ask for a new invitation; the run may have been started anew since.",
    roster.USED: "Ask for a new invitation: each is good for one machine, once.",
    roster.EXPIRED: "Ask for a new invitation.",
    roster.FULL: "Ask the host for another run: all of its seats are taken.",
    roster.WITHDRAWN: "Ask for the new invitation: the host has printed one as this one's machine left or did not fit.",
    roster.LOCKED: f"Wait {roster.WINDOW_S:g} s: too many wrong invitations came from this network.",
}
"""What to do about a refusal."""


def _refusal(address: Address, refusal: Refusal, own: Versions) -> UsageError:
    if refusal.reason in (refusals.OTHER_ROUNDELAY, refusals.OTHER_TORCH):
        package = "roundelay" if refusal.reason == refusals.OTHER_ROUNDELAY else "torch"
        theirs, ours = (getattr(versions, package) for versions in (refusal, own))
        return UsageError(
            f"version of {package}",
            got=f"{ours} on this machine, {theirs!r} on the host",
            expected="the same on both",
            remedy=f"Install the host's version of {package} here; the invitation can still be used.",
        )
    remedy = REMEDIES.get(refusal.reason, "Run the version of Roundelay that the host runs.")
    return _refused(address_text(address), refusal.reason, remedy)


def _refused(host: str, reason: str, remedy: str) -> UsageError:
    return UsageError(f"host at {host}", got=f"refused: {reason}", expected="a seat in the run", remedy=remedy)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, ssl.SSLError | EOFError | ConnectionResetError):
        return f"an answer without TLS, or a connection cut ({getattr(error, 'reason', None) or error})"
    return str(getattr(error, "strerror", None) or error)


def _unheard(invitation: Invitation, heard: dict[Address, str], deadline_s: float) -> RoundelayError:
    """The error when the host has not answered at any address."""
    got = "; ".join(f"{address_text(address)}: {reason}" for address, reason in heard.items())
    if _ANOTHER in heard.values():
        return UsageError(
            "host of the invitation",
            got=got,
            expected=f"the certificate {invitation.fingerprint.hex()[:16]}..., as the invitation says",
            remedy="Ask for a new invitation, over a way that you trust; the run may have been started anew since.",
        )
    ports = " or ".join(sorted({str(port) for _, port in invitation.addresses}))
    return WorkerLostError(
        "host of the invitation",
        got=got,
        expected=f"an answer within {deadline_s:g} s",
        remedy=f"Check that the host still waits, listens on an address that this machine reaches, and that firewalls "
        f"and routers on its side let TCP port {ports} in.",
    )
