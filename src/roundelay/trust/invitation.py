"""Invitations: one line of text by which one machine may join one run, once.

The text is ``roundelay-1-`` and base 32 in lower case (RFC 4648 without padding), which a chat, a shell and a phone
leave as it is. It holds, in network order: its length, run, fingerprint, secret, expiry, seat, addresses, and a CRC-32.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import secrets
import ssl
import struct
from dataclasses import dataclass, field
from typing import final
from zlib import crc32

from roundelay.errors import UsageError

SECRET_BYTES = 16
RUN_BYTES = 8
MAX_ADDRESSES = 8
MAX_HOST_BYTES = 64
"""Most bytes of the name of a host."""

PREFIX = "roundelay-1-"
_FIXED = struct.Struct(
    f">H{RUN_BYTES}s32s{SECRET_BYTES}sIHB"
)  # length, run, fingerprint, secret, expiry, seat, addresses
_CRC_BYTES = 4
_NAME, _IPV4, _IPV6 = 0, 4, 6
_HOST = re.compile(r"[0-9A-Za-z]([0-9A-Za-z._-]*[0-9A-Za-z])?")

Address = tuple[str, int]
"""A host, as an address or a name, and a port."""


@final
@dataclass(frozen=True, slots=True)
class Invitation:
    """What a joiner needs to know: where the host is, how to recognize it, and what to say there.

    Args:
        addresses: where the door may be reached, 1 to `MAX_ADDRESSES`; the first that answers is taken.
        run: the run, 16 hexadecimal digits (`new_run`).
        fingerprint: SHA-256 of the door's certificate, 32 bytes (`fingerprint_of`).
        secret: `SECRET_BYTES` random bytes (`new_secret`), which are good for one seat.
        expiry: UTC, in seconds since 1970, from when on it is refused.
        seat: number of the seat in the run.
    """

    addresses: tuple[Address, ...]
    run: str
    fingerprint: bytes
    secret: bytes = field(repr=False)
    expiry: int
    seat: int

    def text(self) -> str:
        """Return the invitation as one line.

        Raises:
            UsageError: a field has a value that an invitation cannot hold.
        """
        _check(self)
        addresses = b"".join(map(_packed, self.addresses))
        length = _FIXED.size + len(addresses) + _CRC_BYTES
        fields = self.fingerprint, self.secret, self.expiry, self.seat, len(self.addresses)
        packed = _FIXED.pack(length, bytes.fromhex(self.run), *fields) + addresses
        return PREFIX + _text_of(packed + crc32(packed).to_bytes(_CRC_BYTES, "big"))

    @staticmethod
    def parse(text: str) -> Invitation:
        """Read an invitation; white space, quotes around it, and capital letters do not matter.

        Raises:
            UsageError: it is none, was cut off or changed on its way, or is of another version.
        """
        line = "".join(text.split()).strip("\"'`<>.,").lower()
        packed = _bytes_of(line)
        _, run, fingerprint, secret, expiry, seat, count = _FIXED.unpack_from(packed)
        addresses, rest = [], packed[_FIXED.size : -_CRC_BYTES]
        for _ in range(count):
            address, rest = _unpacked(rest)
            addresses.append(address)
        invitation = Invitation(tuple(addresses), run.hex(), fingerprint, secret, expiry, seat)
        if invitation.text() != line:
            raise _wrong("one that no host has made", _AGAIN)
        return invitation


def is_host(text: str) -> bool:
    """Whether a text is an address of one host, or may be a host's name, as an invitation holds it."""
    try:
        number = ipaddress.ip_address(text)
    except ValueError:
        return 0 < len(_name_bytes(text)) <= MAX_HOST_BYTES
    return not (number.is_unspecified or number.is_multicast or "%" in text)


def address_text(address: Address) -> str:
    """Return an address as gRPC and people write it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def new_secret() -> bytes:
    """Return a new secret of an invitation."""
    return secrets.token_bytes(SECRET_BYTES)


def new_run() -> str:
    """Return a new name of a run."""
    return secrets.token_hex(RUN_BYTES)


def digest_of(secret: bytes) -> bytes:
    """Return what the host keeps of a secret: its SHA-256, which is enough for 128 random bits."""
    return hashlib.sha256(b"roundelay invitation " + secret).digest()


def fingerprint_of(certificate: bytes) -> bytes:
    """Return the SHA-256 of the DER form of the certificate in a PEM text.

    Raises:
        UsageError: there is none.
    """
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate.decode("ascii"))).digest()
    except ValueError as error:
        got = f"{len(certificate)} other bytes"
        raise UsageError("certificate", got=got, expected="PEM", remedy="Give a certificate.") from error


_AGAIN = "Copy the whole line again, from the machine that hosts the run."


def _check(invitation: Invitation) -> None:
    fits = (
        re.fullmatch(f"[0-9a-f]{{{2 * RUN_BYTES}}}", invitation.run)
        and (len(invitation.fingerprint), len(invitation.secret)) == (32, SECRET_BYTES)
        and 0 <= invitation.expiry < 2**32
        and 0 <= invitation.seat < 2**16
        and 0 < len(invitation.addresses) <= MAX_ADDRESSES
    )
    if not fits:
        raise _wrong(f"{invitation}", "Correct the field that does not fit.")


def _text_of(packed: bytes) -> str:
    return base64.b32encode(packed).decode().rstrip("=").lower()


def _bytes_of(text: str) -> bytes:
    """The bytes of a text of this version that is whole and unchanged."""
    version = re.match(r"roundelay-(\d{1,9})-", text)
    if not version:
        raise _wrong(f"{text[:20]!r}", "Give the line that `roundelay host` has printed for this machine.")
    if version[0] != PREFIX:
        remedy = "Run the version of Roundelay that the host runs."
        raise _wrong(f"one of version {version[1]}; this Roundelay reads version 1", remedy)
    body = text.removeprefix(PREFIX)
    if re.search("[^a-z2-7]", body):
        raise _wrong("characters that no invitation has", _AGAIN)
    packed = _decoded(body)
    length = int.from_bytes(packed[:2], "big") if len(packed) >= 2 else _FIXED.size
    if len(packed) < max(length, _FIXED.size + _CRC_BYTES):
        raise _wrong(f"one that was cut off after {len(text)} characters", _AGAIN)
    damaged = crc32(packed[:-_CRC_BYTES]) != int.from_bytes(packed[-_CRC_BYTES:], "big")
    if len(packed) > length or damaged or _text_of(packed) != body:
        raise _wrong("one that was changed on its way: its checksum does not fit", _AGAIN)
    return packed


def _decoded(body: str) -> bytes:
    """As many whole bytes as the characters hold: a text that was cut off may end within one."""
    whole = {0: 0, 1: 0, 2: 2, 3: 2, 4: 4, 5: 5, 6: 5, 7: 7}[len(body) % 8]
    body = body[: len(body) // 8 * 8 + whole].upper()
    return base64.b32decode(body + "=" * (-len(body) % 8))


def _packed(address: Address) -> bytes:
    host, port = address
    if not 0 < port < 2**16:
        raise _wrong(f"port {port} of {host}", "Give a port from 1 to 65535.")
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        name = _name_bytes(host)
        if not 0 < len(name) <= MAX_HOST_BYTES:
            raise _wrong(f"the host {host!r}", "Give a host's address or its name in ASCII.") from None
        return bytes([_NAME, len(name)]) + name + port.to_bytes(2, "big")
    if "%" in host:
        raise _wrong(f"the host {host!r}", "Give an address that means the same on another machine.")
    return bytes([number.version]) + number.packed + port.to_bytes(2, "big")


def _name_bytes(host: str) -> bytes:
    """The name of a host; nothing if it is none."""
    return host.encode() if host.isascii() and _HOST.fullmatch(host) else b""


def _unpacked(packed: bytes) -> tuple[Address, bytes]:
    """An address, and what follows it; the address may be nonsense."""
    kind, start = int.from_bytes(packed[:1], "big"), 1
    if kind == _NAME:
        start, end = 2, 2 + int.from_bytes(packed[1:2], "big")
    else:
        end = 1 + {_IPV4: 4, _IPV6: 16}.get(kind, 0)
    host, port = packed[start:end], int.from_bytes(packed[end : end + 2], "big")
    numeric = len(host) in (4, 16) and kind != _NAME
    return (str(ipaddress.ip_address(host)) if numeric else host.decode("ascii", "replace"), port), packed[end + 2 :]


def _wrong(got: str, remedy: str) -> UsageError:
    return UsageError("invitation", got=got, expected=f"a line that begins with {PREFIX}", remedy=remedy)
