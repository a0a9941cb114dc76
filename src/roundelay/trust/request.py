"""Certificate requests (PKCS 10): a joiner makes its key itself, and asks for a certificate of it.

Of a request only the public key counts: the names and extensions that it asks for are ignored.
"""

from __future__ import annotations

from typing import Any

from roundelay.errors import UsageError
from roundelay.trust.certificates import named, new_key, part, pem_of, pem_of_key

MAX_REQUEST_BYTES = 2048
"""Most bytes of a request; one with a P-256 key has about 400."""

REASONS = (
    "oversize request",
    "unreadable request",
    "request with another type of key",
    "request not signed by its own key",
)
"""Why a request was refused."""
OVERSIZE, UNREADABLE, FOREIGN_KEY, UNSIGNED = REASONS


def new_request() -> tuple[bytes, bytes]:
    """Return a new private key, and the request for a certificate of it, both in PEM. Only the request is for others.

    Raises:
        UsageError: the package cryptography is not installed.
    """
    key = new_key()
    builder = part("x509").CertificateSigningRequestBuilder(named("roundelay"))
    return pem_of_key(key), pem_of(builder.sign(key, part("hazmat.primitives.hashes").SHA256()))


def public_key_of(request: bytes) -> Any:
    """Return the public key of a request, of ``cryptography``, once the request is found to be right.

    Raises:
        UsageError: the request is refused; `got` is one of `REASONS`.
    """
    if len(request) > MAX_REQUEST_BYTES:
        raise _refused(OVERSIZE)
    parsed, key = _parsed(request)
    ec = part("hazmat.primitives.asymmetric.ec")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _refused(FOREIGN_KEY)
    if not _signs(parsed):
        raise _refused(UNSIGNED)
    return key


def _parsed(request: bytes) -> tuple[Any, Any]:
    """A request and its public key, whose signature and type are not yet checked."""
    x509, unsupported = part("x509"), part("exceptions").UnsupportedAlgorithm
    try:
        parsed = x509.load_pem_x509_csr(request)
        return parsed, parsed.public_key()
    except unsupported as error:
        raise _refused(FOREIGN_KEY) from error
    except Exception as error:  # what a parser raises for bytes from outside
        raise _refused(UNREADABLE) from error


def _signs(parsed: Any) -> bool:
    try:
        return bool(parsed.is_signature_valid)
    except Exception:  # an algorithm that is unknown, or too weak
        return False


def _refused(reason: str) -> UsageError:
    return UsageError(
        "certificate request",
        got=reason,
        expected=f"a request of at most {MAX_REQUEST_BYTES} bytes in PEM with a P-256 key, signed by this key",
        remedy="Run the same version of Roundelay on every machine.",
    )
