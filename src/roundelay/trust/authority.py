"""A certificate authority in memory, and what a worker shows to the others: certificates of RFC 5280 for mutual TLS.

Keys are of the curve P-256. Nothing is written to a disk. A certificate says its owner's name and role.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, final

from roundelay.trust.certificates import ROLE_PREFIX, Issuer, certificate_of, new_key, pem_of_key
from roundelay.trust.request import public_key_of

ROLES = ("host", "worker", "backup")
"""What the owner of a certificate may be."""
HOST, WORKER, BACKUP = ROLES


@final
@dataclass(frozen=True, slots=True)
class Credentials:
    """What a worker shows to the others, and checks them by.

    Args:
        authority: certificate of the authority, PEM.
        certificate: the worker's own, PEM.
        key: its private key, PEM (PKCS 8, not encrypted).
    """

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)


@final
@dataclass(frozen=True, slots=True)
class Authority:
    """Issues the certificates of one run; peers trust no other.

    Args:
        name: its own.
        start: its first moment, with a time zone.
        valid: how long it and what it issues are valid.
        key: its private key, of ``cryptography``.
        certificate: its own, PEM.
    """

    name: str
    start: datetime
    valid: timedelta
    key: Any = field(repr=False)
    certificate: bytes

    def issue(self, name: str, role: str = WORKER) -> Credentials:
        """Return a new key and a certificate for `name`, which may serve and call as one of `ROLES`."""
        key = new_key()
        return Credentials(self.certificate, self._certify(name, key.public_key(), role), pem_of_key(key))

    def sign(self, request: bytes, name: str, role: str = WORKER) -> bytes:
        """Return a certificate, PEM, of the key of a request; what the request says of its owner is ignored.

        Args:
            request: of :func:`roundelay.trust.request.new_request`, from outside.
            name: the owner's.
            role: the owner's, one of `ROLES`.

        Raises:
            UsageError: the request is refused; `got` is one of :data:`roundelay.trust.request.REASONS`.
        """
        return self._certify(name, public_key_of(request), role)

    def _certify(self, name: str, key: Any, role: str) -> bytes:
        assert role in ROLES, role
        return certificate_of(name, key, Issuer(self.name, self.key, self.start, self.valid), role)


def new_authority(name: str, start: datetime, valid: timedelta) -> Authority:
    """Return a new authority, whose certificates are valid from `start`, with a time zone, for so long.

    Raises:
        UsageError: the package cryptography is not installed.
    """
    key = new_key()
    own = certificate_of(name, key.public_key(), Issuer(name, key, start, valid), issues=True)
    return Authority(name, start, valid, key, own)


def role_of(names: Iterable[bytes]) -> str | None:
    """Return the role among the names of a certificate; None if it says none, an unknown one, or more than one.

    Args:
        names: ``auth_context()["x509_subject_alternative_name"]`` of a call, which TLS has checked.
    """
    prefix = ROLE_PREFIX.encode()
    roles = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    return roles[0].decode() if len(roles) == 1 and roles[0] in {role.encode() for role in ROLES} else None
