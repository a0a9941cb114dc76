"""Keys and certificates: the parts of RFC 5280 that a run uses. Keys are of the curve P-256, texts are PEM.

The package ``cryptography`` is imported when it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, final

from roundelay.optional_packages import optional

EARLIER = timedelta(minutes=10)
"""A certificate is valid from so long before its first moment: clocks differ."""

ROLE_PREFIX = "roundelay://role/"
"""How the role of a certificate's owner begins, among the names of the certificate (a URI)."""


@final
@dataclass(frozen=True, slots=True)
class Issuer:
    """Who signs certificates, and when these are valid.

    Args:
        name: its own.
        key: its private key, of ``cryptography``.
        start: their first moment, with a time zone.
        valid: how long they are valid.
    """

    name: str
    key: Any = field(repr=False)
    start: datetime
    valid: timedelta


def domain_of(name: str) -> str:
    """Return the domain of an owner's servers: its certificate holds for one label before it."""
    return f"{name}.roundelay"


def certificate_of(name: str, key: Any, issuer: Issuer, role: str | None = None, *, issues: bool = False) -> bytes:
    """Return a certificate in PEM.

    Args:
        name: its owner's, which others check.
        key: its owner's public key, of ``cryptography``.
        issuer: who signs it.
        role: its owner's; None: none.
        issues: whether its owner may issue certificates itself.
    """
    x509 = part("x509")
    names = [x509.DNSName(name)]
    if role:
        names += [x509.DNSName(f"*.{domain_of(name)}"), x509.UniformResourceIdentifier(ROLE_PREFIX + role)]
    made = (
        x509.CertificateBuilder(named(issuer.name), named(name), key, x509.random_serial_number())
        .not_valid_before(issuer.start - EARLIER)
        .not_valid_after(issuer.start + issuer.valid)
        .add_extension(x509.BasicConstraints(ca=issues, path_length=0 if issues else None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(issuer.key, part("hazmat.primitives.hashes").SHA256())
    )
    return pem_of(made)


def self_signed(name: str, start: datetime, valid: timedelta) -> tuple[bytes, bytes]:
    """Return a new private key in PEM, and a certificate that it signs itself; it can issue no other.

    Raises:
        UsageError: the package cryptography is not installed.
    """
    key = new_key()
    return pem_of_key(key), certificate_of(name, key.public_key(), Issuer(name, key, start, valid))


def named(name: str) -> Any:
    """Return a name of X.509 that has a common name only."""
    x509 = part("x509")
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def new_key() -> Any:
    """Return a new private key."""
    ec = part("hazmat.primitives.asymmetric.ec")
    return ec.generate_private_key(ec.SECP256R1())


def pem_of_key(key: Any) -> bytes:
    """Return a private key in PEM (PKCS 8, not encrypted)."""
    serialization = part("hazmat.primitives.serialization")
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem: bytes = key.private_bytes(serialization.Encoding.PEM, *form)
    return pem


def pem_of(made: Any) -> bytes:
    """Return a certificate or a request in PEM."""
    pem: bytes = made.public_bytes(part("hazmat.primitives.serialization").Encoding.PEM)
    return pem


def part(module: str) -> Any:
    """Import a module of ``cryptography``.

    Raises:
        UsageError: it is not installed.
    """
    return optional(f"cryptography.{module}", "certificates", "roundelay[join]", ".")


def validity_of(certificate: bytes) -> tuple[datetime, datetime]:
    """Return the first and the last moment of a certificate in PEM, in UTC.

    Raises:
        ValueError: it is none.
    """
    parsed = part("x509").load_pem_x509_certificate(certificate)
    return parsed.not_valid_before_utc, parsed.not_valid_after_utc


def is_issued_to(certificate: bytes, authority: bytes, key: bytes) -> bool:
    """Whether a certificate is of a private key, and signed by an authority; all in PEM, the first two from outside."""
    x509, serialization = part("x509"), part("hazmat.primitives.serialization")
    own = serialization.load_pem_private_key(key, None).public_key()
    try:
        parsed = x509.load_pem_x509_certificate(certificate)
        parsed.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        return bool(parsed.public_key() == own)
    except Exception:  # what a parser raises for bytes from outside
        return False
