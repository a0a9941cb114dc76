"""What a connection asks for is read before anything is encrypted, and nothing else gets through."""

from __future__ import annotations

import ssl
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.peers.server_name import server_name


def hello(name: str | None) -> bytes:
    """What a client sends first that asks for a server of this name."""
    context, sent = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=name).do_handshake()
    return sent.read()


@pytest.mark.parametrize("name", ["roundelay-door", "data-0.worker-1.roundelay"])
def test_it_is_read_once_it_is_whole(name: str) -> None:
    sent = hello(name)
    assert server_name(sent) == server_name(sent + b"more") == name
    assert {server_name(sent[:k]) for k in range(1, len(sent))} == {None}


def test_none_is_empty() -> None:
    assert server_name(hello(None)) == ""


@settings(max_examples=300)
@given(st.binary(min_size=1, max_size=200), st.integers(0, 516), st.integers(0, 3))
def test_any_bytes_are_a_name_too_few_or_no_hello(received: bytes, at: int, how: int) -> None:
    sent = hello("roundelay-door")
    rest = sent[at + len(received) :]
    changed = (received, b"\x16" + received, sent[:at] + received, sent[:at] + received + rest)[how]
    with suppress(ssl.SSLError):
        assert server_name(changed) is None or isinstance(server_name(changed), str)


def test_a_name_that_is_no_text_is_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ssl.SSLError):
        server_name(hello("roundelay-door").replace(b"roundelay-door", b"roundelay-\xff\xfe\x00r"))
    assert capsys.readouterr().err == ""
