"""A certificate authority in memory, and what a worker shows to the others: certificates of RFC 5280 for mutual TLS.

Keys are of the curve P-256. Nothing is written to a disk. The package ``cryptography`` is imported when it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, final

from roundelay.optional_packages import optional

EARLIER = timedelta(minutes=10)
"""A certificate is valid from so long before its first moment: clocks differ."""


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

    def issue(self, name: str) -> Credentials:
        """Return a new key and a certificate for `name`, which may serve and call."""
        key, serialization = _new_key(), _part("hazmat.primitives.serialization")
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        certificate = _certificate(name, key, self.name, self.key, self.start, self.valid)
        return Credentials(self.certificate, certificate, key.private_bytes(serialization.Encoding.PEM, *form))


def new_authority(name: str, start: datetime, valid: timedelta) -> Authority:
    """Return a new authority, whose certificates are valid from `start`, with a time zone, for so long.

    Raises:
        UsageError: the package cryptography is not installed.
    """
    key = _new_key()
    return Authority(name, start, valid, key, _certificate(name, key, name, key, start, valid))


def _certificate(name: str, key: Any, issuer: str, signer: Any, start: datetime, valid: timedelta) -> bytes:
    """A certificate in PEM; one that signs itself is an authority's."""
    x509, rights = _part("x509"), key is signer
    made = (
        x509.CertificateBuilder(_named(issuer), _named(name), key.public_key(), x509.random_serial_number())
        .not_valid_before(start - EARLIER)
        .not_valid_after(start + valid)
        .add_extension(x509.BasicConstraints(ca=rights, path_length=0 if rights else None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(signer, _part("hazmat.primitives.hashes").SHA256())
    )
    pem: bytes = made.public_bytes(_part("hazmat.primitives.serialization").Encoding.PEM)
    return pem


def _named(name: str) -> Any:
    x509 = _part("x509")
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _new_key() -> Any:
    ec = _part("hazmat.primitives.asymmetric.ec")
    return ec.generate_private_key(ec.SECP256R1())


def _part(module: str) -> Any:
    return optional(f"cryptography.{module}", "certificates", "roundelay[join]", ".")
