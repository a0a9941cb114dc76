"""What is said at a door: the call Join and its answers, as msgpack. Whatever else comes is refused.

The text of invitations has a version, and this format belongs to it.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple, final

import msgspec
from msgspec import Meta

from roundelay.trust.invitation import SECRET_BYTES
from roundelay.trust.request import MAX_REQUEST_BYTES

MAX_BYTES = 16 * 1024
"""Most bytes of a message."""

SERVICE, METHOD = "roundelay.Door", "Join"
PATH = f"/{SERVICE}/{METHOD}"

DOOR_NAME = "roundelay-door"
"""The name in the certificate of every door."""

JOIN_S = 5.0
"""Seconds that a call may take."""

_Word = Annotated[str, Meta(max_length=64)]
_At = tuple[Annotated[str, Meta(max_length=253)], Annotated[int, Meta(gt=0, lt=2**16)]]
_Pem = Annotated[bytes, Meta(max_length=4096)]


@final
class Versions(NamedTuple):
    """Versions of the packages that must be the same on all machines of a run."""

    roundelay: str
    torch: str

    def comparable(self) -> Versions:
        """Return these without the build of torch (``+cpu``), which may differ."""
        return Versions(self.roundelay, self.torch.partition("+")[0])


@final
class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for a seat.

    Args:
        roundelay: version of it.
        torch: version of it.
        secret: of the invitation.
        request: for a certificate, PEM (:mod:`roundelay.trust.request`).
    """

    roundelay: _Word
    torch: _Word
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    request: Annotated[bytes, Meta(max_length=2 * MAX_REQUEST_BYTES)]


@final
class Welcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="welcome"):
    """Gives a seat.

    Args:
        certificate: PEM, of the request's key.
        authority: certificate of the authority, PEM.
        run: the run's name.
        seat: number of the seat.
        name: in the certificate.
        role: in the certificate.
        generation: of the run.
        members: where the service for members listens, with mutual TLS.
    """

    certificate: _Pem
    authority: _Pem
    run: _Word
    seat: Annotated[int, Meta(ge=0, lt=2**16)]
    name: _Word
    role: _Word
    generation: Annotated[int, Meta(ge=0, lt=2**32)]
    members: Annotated[tuple[_At, ...], Meta(min_length=1, max_length=16)]


@final
class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refusal"):
    """Gives none.

    Args:
        reason: one of :data:`roundelay.peers.refusals.REASONS`.
        roundelay: version of the host's, where the reason is a version.
        torch: version of the host's, likewise.
    """

    reason: _Word
    roundelay: _Word = ""
    torch: _Word = ""


_ENCODER, _JOIN, _ANSWER = (
    msgspec.msgpack.Encoder(),
    msgspec.msgpack.Decoder(Join),
    msgspec.msgpack.Decoder(Welcome | Refusal),
)


def encode(message: Join | Welcome | Refusal) -> bytes:
    """Return a message's bytes."""
    return _ENCODER.encode(message)


def decode_join(received: bytes) -> Join | None:
    """Read a call; None if it is none."""
    try:
        return _JOIN.decode(received) if len(received) <= MAX_BYTES else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def decode_answer(received: bytes) -> Welcome | Refusal | None:
    """Read an answer; None if it is none."""
    try:
        answer: Welcome | Refusal | None = _ANSWER.decode(received) if len(received) <= MAX_BYTES else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return answer
