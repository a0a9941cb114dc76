"""Requests for certificates: made where the key stays, signed for whom the host says, refused by a reason."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import UsageError
from roundelay.trust import request as requests
from roundelay.trust.authority import BACKUP, HOST, WORKER, new_authority, role_of
from roundelay.trust.request import new_request

OURS = new_authority("roundelay", datetime.now(UTC), timedelta(days=1))
NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "host")])


def names_of(certificate: bytes) -> list[bytes]:
    """As gRPC lists them."""
    found = x509.load_pem_x509_certificate(certificate).extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(name.value).encode() for name in found.value]


def request_with(key: Any, *names: x509.GeneralName, digest: Any = None) -> bytes:
    builder = x509.CertificateSigningRequestBuilder(NAME)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(key, digest or hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_a_request_is_signed_for_its_key_under_the_name_and_role_that_the_host_says() -> None:
    key, request = new_request()
    certificate = x509.load_pem_x509_certificate(OURS.sign(request, "worker-3", BACKUP))
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(OURS.certificate))
    private = serialization.load_pem_private_key(key, None)
    assert certificate.public_key() == private.public_key()
    assert b"PRIVATE" not in request
    assert names_of(OURS.sign(request, "worker-3", BACKUP)) == [
        b"worker-3",
        b"*.worker-3.roundelay",
        b"roundelay://role/backup",
    ]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_what_a_request_says_of_its_owner_is_ignored() -> None:
    wanted = x509.DNSName("worker-0"), x509.UniformResourceIdentifier("roundelay://role/host")
    signed = OURS.sign(request_with(ec.generate_private_key(ec.SECP256R1()), *wanted), "worker-1")
    assert names_of(signed) == [b"worker-1", b"*.worker-1.roundelay", b"roundelay://role/worker"]
    assert x509.load_pem_x509_certificate(signed).subject.rfc4514_string() == "CN=worker-1"


def flipped(request: bytes) -> bytes:
    """The request with a signature that is still one, of something else."""
    parsed = x509.load_pem_x509_csr(request)
    der = bytearray(parsed.public_bytes(serialization.Encoding.DER))
    der[-1] ^= 1
    lines = serialization.Encoding.PEM
    return x509.load_der_x509_csr(bytes(der)).public_bytes(lines)


P256 = ec.generate_private_key(ec.SECP256R1())
WRONG = {
    "another curve": (request_with(ec.generate_private_key(ec.SECP384R1())), requests.FOREIGN_KEY),
    "rsa": (request_with(rsa.generate_private_key(65537, 2048)), requests.FOREIGN_KEY),
    "another's signature": (flipped(request_with(P256)), requests.UNSIGNED),
    "no bytes": (b"", requests.UNREADABLE),
    "a certificate": (OURS.certificate, requests.UNREADABLE),
    "half of it": (request_with(P256)[:150], requests.UNREADABLE),
    "too many bytes": (request_with(P256) + bytes(3000), requests.OVERSIZE),
    "too many names": (request_with(P256, *[x509.DNSName(f"{k}.example") for k in range(200)]), requests.OVERSIZE),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_request_is_refused_by_its_reason(what: str) -> None:
    request, reason = WRONG[what]
    with pytest.raises(UsageError) as caught:
        OURS.sign(request, "worker-1")
    assert caught.value.got == reason


def test_every_type_of_key_but_one_is_refused() -> None:
    builder = x509.CertificateSigningRequestBuilder(NAME)
    request = builder.sign(ed25519.Ed25519PrivateKey.generate(), None).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(UsageError, match="another type of key"):
        OURS.sign(request, "worker-1")


@given(st.binary(max_size=3000), st.integers(0, 420), st.booleans())
def test_bytes_from_outside_are_signed_or_refused_and_nothing_else(noise: bytes, at: int, within: bool) -> None:
    request = request_with(P256)
    given_bytes = request[:at] + noise[:5] + request[at + len(noise[:5]) :] if within else noise
    reason = ""
    try:
        certificate = OURS.sign(given_bytes, "worker-1")
    except UsageError as error:
        reason = error.got
    assert reason in (*requests.REASONS, "")
    if not reason:
        assert x509.load_pem_x509_certificate(certificate).public_key() == P256.public_key()


def test_the_role_stands_in_every_certificate_of_an_authority() -> None:
    assert role_of(names_of(OURS.issue("worker-1").certificate)) == WORKER
    assert role_of(names_of(OURS.issue("host", HOST).certificate)) == HOST


@pytest.mark.parametrize(
    "names", [[], [b"worker-1"], [b"roundelay://role/king"], [b"roundelay://role/host", b"roundelay://role/worker"]]
)
def test_names_with_no_role_or_more_than_one_have_none(names: list[bytes]) -> None:
    assert role_of(names) is None
