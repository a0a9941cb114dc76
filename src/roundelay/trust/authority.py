"""A certificate authority in memory, and what a worker shows to the others: RFC 5280 certificates for mutual TLS.

Keys are of the curve P-256. Nothing is written to a disk. The package ``cryptography`` is imported when it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, final

from roundelay.optional_packages import optional

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import CertificateBuilder

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
        certificate: its own, PEM.
        key: its private key, PEM.
        start: its first moment, in UTC.
        valid: how long it and what it issues are valid.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    start: datetime
    valid: timedelta

    def issue(self, name: str) -> Credentials:
        """Return a new key and a certificate for `name`, as server and client."""
        x509, serialization = _x509(), _serialization()
        signer = serialization.load_pem_private_key(self.key, password=None)
        key = _new_key()
        uses = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.load_pem_x509_certificate(self.certificate).subject
        made = (
            _builder(name, key, self.start, self.valid)
            .issuer_name(issuer)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        )
        return Credentials(self.certificate, _signed(made, signer), _pem_key(key))


def new_authority(name: str, start: datetime, valid: timedelta) -> Authority:
    """Return a new authority called `name`, valid from `start` (with a time zone) on.

    Raises:
        UsageError: the package cryptography is not installed.
    """
    x509, key = _x509(), _new_key()
    made = (
        _builder(name, key, start, valid)
        .issuer_name(_named(name))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    )
    return Authority(_signed(made, key), _pem_key(key), start, valid)


def _builder(name: str, key: EllipticCurvePrivateKey, start: datetime, valid: timedelta) -> CertificateBuilder:
    x509 = _x509()
    builder: CertificateBuilder = x509.CertificateBuilder()
    return (
        builder.subject_name(_named(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start - EARLIER)
        .not_valid_after(start + valid)
    )


def _signed(made: CertificateBuilder, signer: EllipticCurvePrivateKey) -> bytes:
    hashes = _part("hazmat.primitives.hashes")
    return made.sign(signer, hashes.SHA256()).public_bytes(_serialization().Encoding.PEM)


def _named(name: str) -> Any:
    x509 = _x509()
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _new_key() -> EllipticCurvePrivateKey:
    ec = _part("hazmat.primitives.asymmetric.ec")
    key: EllipticCurvePrivateKey = ec.generate_private_key(ec.SECP256R1())
    return key


def _pem_key(key: EllipticCurvePrivateKey) -> bytes:
    s = _serialization()
    return key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())


def _x509() -> Any:
    return _part("x509")


def _serialization() -> Any:
    return _part("hazmat.primitives.serialization")


def _part(module: str) -> Any:
    return optional(f"cryptography.{module}", "certificates", "roundelay[join]", ", or choose another transport.")
