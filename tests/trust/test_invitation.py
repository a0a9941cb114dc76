"""Invitations: one line, read back as it was written, and what is wrong with one is said."""

from __future__ import annotations

import base64
import ssl
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import UsageError
from roundelay.trust.certificates import self_signed
from roundelay.trust.invitation import (
    PREFIX,
    Invitation,
    digest_of,
    fingerprint_of,
    new_run,
    new_secret,
)

ADDRESSES = (("203.0.113.7", 43117), ("2001:db8::7", 43117), ("alice.example", 443))
OURS = Invitation(ADDRESSES, "00f1e2d3c4b5a697", bytes(range(32)), bytes(range(16)), 1_900_000_000, 2)

HOSTS = st.one_of(
    st.ip_addresses().map(str), st.from_regex(r"[a-z][a-z0-9-]{0,20}[a-z]", fullmatch=True).map(lambda name: name)
)
INVITATIONS = st.builds(
    Invitation,
    addresses=st.lists(st.tuples(HOSTS, st.integers(1, 65535)), min_size=1, max_size=8).map(tuple),
    run=st.binary(min_size=8, max_size=8).map(bytes.hex),
    fingerprint=st.binary(min_size=32, max_size=32),
    secret=st.binary(min_size=16, max_size=16),
    expiry=st.integers(0, 2**32 - 1),
    seat=st.integers(0, 2**16 - 1),
)


@given(INVITATIONS)
def test_an_invitation_is_read_as_it_was_written(invitation: Invitation) -> None:
    assert Invitation.parse(invitation.text()) == invitation


def test_an_invitation_is_a_short_line_that_shells_and_chats_leave_alone() -> None:
    text = replace(OURS, addresses=ADDRESSES[:1]).text()
    assert len(text) < 140
    assert len(OURS.text()) < 200
    assert set(text.removeprefix(PREFIX)) <= set("abcdefghijklmnopqrstuvwxyz234567")


@pytest.mark.parametrize(
    "change",
    [lambda text: f"  {text}\n", lambda text: f"`{text}`.", str.upper, lambda text: text[:70] + "\n  " + text[70:]],
)
def test_what_chats_do_to_a_line_does_not_matter(change: object) -> None:
    assert callable(change)
    assert Invitation.parse(change(OURS.text())) == OURS


@pytest.mark.parametrize("kept", [1, 14, 15, 40, 100, -2, -1])
def test_one_that_was_cut_off_is_reported_as_such(kept: int) -> None:
    text = OURS.text()
    kept = kept if kept < 0 else len(PREFIX) + kept
    with pytest.raises(UsageError, match=r"cut off after .* Copy the whole line again"):
        Invitation.parse(text[:kept])


@given(st.integers(0, 195), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_a_changed_character_is_noticed(at: int, character: str) -> None:
    text = OURS.text()
    at = len(PREFIX) + at % (len(text) - len(PREFIX))
    changed = text[:at] + character + text[at + 1 :]
    if changed != text:
        with pytest.raises(UsageError, match=r"changed on its way|cut off|that no host"):
            Invitation.parse(changed)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "got ''; expected a line that begins with roundelay-1-. Give the line"),
        ("please join", "'pleasejoin'"),
        ("roundelay-2-aaaa", "one of version 2; this Roundelay reads version 1"),
        ("roundelay-01-aaaa", "one of version 01"),
        (PREFIX, "cut off"),
        (PREFIX + "a-b", "characters that no invitation has"),
        (OURS.text() + "a", "changed on its way"),
        (OURS.text() + "aaaaaaaa", "changed on its way"),
    ],
)
def test_what_is_no_invitation_is_told_apart(text: str, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        Invitation.parse(text)
    assert told in str(caught.value)


@given(st.one_of(st.text(max_size=300), st.text("abcdefgh234567", max_size=300).map(PREFIX.__add__)))
def test_any_text_is_read_or_refused_and_nothing_else(text: str) -> None:
    with pytest.raises(UsageError):
        Invitation.parse(text)


@given(st.binary(max_size=120), st.integers(0, 12))
def test_any_bytes_with_a_right_checksum_are_read_or_refused_and_nothing_else(noise: bytes, count: int) -> None:
    """As someone else's program might write them; whatever is read is written in the same way."""
    body = (67 + len(noise) + 4).to_bytes(2, "big") + bytes(64) + bytes([count]) + noise
    text = base64.b32encode(body + crc32(body).to_bytes(4, "big")).decode().rstrip("=").lower()
    try:
        invitation = Invitation.parse(PREFIX + text)
    except UsageError:
        return
    assert invitation.text() == PREFIX + text


@pytest.mark.parametrize(
    "wrong",
    [
        {"addresses": ()},
        {"addresses": ADDRESSES * 3},
        {"addresses": (("a b", 1),)},
        {"addresses": (("x" * 65, 1),)},
        {"addresses": (("fe80::1%eth0", 1),)},
        {"addresses": (("h", 0),)},
        {"addresses": (("h", 65536),)},
        {"run": "x"},
        {"secret": b"short"},
        {"fingerprint": b"short"},
        {"expiry": 2**32},
        {"seat": -1},
    ],
    ids=str,
)
def test_what_does_not_fit_is_not_written(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        replace(OURS, **wrong).text()  # type: ignore[arg-type]


def test_a_secret_is_shown_nowhere_and_is_no_other_s() -> None:
    assert "secret" not in repr(OURS)
    assert len(new_secret()) == 16
    assert len({new_secret() for _ in range(100)} | {new_run() for _ in range(100)}) == 200
    assert digest_of(new_secret()) != digest_of(new_secret())


def test_a_fingerprint_is_that_of_the_certificate_s_bytes() -> None:
    _, certificate = self_signed("door", datetime.now(UTC), timedelta(days=1))
    der = ssl.PEM_cert_to_DER_cert(certificate.decode())
    assert fingerprint_of(certificate) == fingerprint_of(ssl.DER_cert_to_PEM_cert(der).encode())
    with pytest.raises(UsageError, match="got 5 other bytes; expected PEM"):
        fingerprint_of(b"hello")
