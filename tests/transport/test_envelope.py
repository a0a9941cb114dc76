"""The envelope: what is sealed opens, in its order; whatever else is refused, by a reason, and nothing else happens."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roundelay.errors import InternalError
from roundelay.transport import envelope as e
from roundelay.transport.envelope import Position, cut, follow, seal, unseal

WHOLE = seal(e.WHOLE, 3, 5, [b"abc", b"defg"])
HERE = Position(3, 5)
FULL = bytes(e.PIECE_BYTES)


def reason_of(piece: bytes, position: Position = HERE) -> str:
    with pytest.raises(InternalError) as caught:
        follow(position, unseal(piece)[0])
    assert caught.value.got in e.REASONS
    return caught.value.got


def test_a_header_has_28_bytes_and_what_is_sealed_opens() -> None:
    head, body = unseal(WHOLE)
    assert len(WHOLE) == 28 + 7
    assert (head, bytes(body)) == (e.Envelope(e.WHOLE, 0, 3, 5, 7, 1), b"abcdefg")
    assert follow(HERE, head) == Position(3, 6, 0, 1)


REFUSED: dict[str, tuple[bytes, Position, str]] = {
    "nothing": (b"", HERE, e.TRUNCATED),
    "half a header": (WHOLE[:20], HERE, e.TRUNCATED),
    "cut off": (WHOLE[:-1], HERE, e.TRUNCATED),
    "more than it says": (WHOLE + b"x", HERE, e.OVERSIZE),
    "of too many pieces": (seal(e.FIRST, 3, 5, [FULL], e.MAX_PIECES + 1), HERE, e.OVERSIZE),
    "too long": (seal(e.WHOLE, 3, 5, [FULL, b"x"]), HERE, e.OVERSIZE),
    "another magic": (b"no" + WHOLE[2:], HERE, e.FOREIGN),
    "unknown": (seal(5, 3, 5, []), HERE, e.UNKNOWN),
    "flipped": (WHOLE[:-1] + bytes([WHOLE[-1] ^ 1]), HERE, e.DAMAGED),
    "flipped header": (WHOLE[:8] + bytes([WHOLE[8] ^ 1]) + WHOLE[9:], HERE, e.DAMAGED),
    "stale": (seal(e.WHOLE, 2, 5, []), HERE, e.STALE),
    "replayed": (seal(e.WHOLE, 3, 4, []), HERE, e.REPLAYED),
    "skipped": (seal(e.WHOLE, 3, 6, []), HERE, e.SKIPPED),
    "MORE of nothing": (seal(e.MORE, 3, 5, [], 2), HERE, e.MISPLACED),
    "HELLO again": (seal(e.HELLO, 3, 5, []), HERE, e.MISPLACED),
    "no HELLO": (seal(e.WHOLE, 3, 0, []), Position(3), e.MISPLACED),
    "WHOLE within": (seal(e.WHOLE, 3, 5, []), Position(3, 5, 1, 2), e.MISPLACED),
    "another total": (seal(e.MORE, 3, 5, [FULL], 4), Position(3, 5, 2, 3), e.MISPLACED),
    "a total of none": (seal(e.WHOLE, 3, 5, [], 0), HERE, e.MISPLACED),
    "FIRST not full": (seal(e.FIRST, 3, 5, [b"x"], 2), HERE, e.TRUNCATED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_come_next_is_refused_by_its_reason(name: str) -> None:
    piece, position, reason = REFUSED[name]
    assert reason_of(piece, position) == reason


def test_every_flipped_bit_is_noticed() -> None:
    for bit in range(8 * len(WHOLE)):
        flipped = bytearray(WHOLE)
        flipped[bit // 8] ^= 1 << bit % 8
        reason_of(bytes(flipped))


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_what_is_cut_and_sealed_comes_together_again(halves: list[int], extra: int) -> None:
    buffers = [memoryview(bytes([i + 1]) * (half * e.PIECE_BYTES // 2 + extra)) for i, half in enumerate(halves)]
    pieces, position, got = cut(buffers), Position(1, 1), []
    for i, parts in enumerate(pieces):
        kind = e.MORE if i else e.FIRST if len(pieces) > 1 else e.WHOLE
        head, body = unseal(seal(kind, 1, 1 + i, parts, len(pieces)))
        position = follow(position, head)
        got.append(body)
    assert position.left == 0
    assert b"".join(got) == b"".join(buffers)


def any_header(draw: Any) -> bytes:
    fields = [draw(st.integers(0, 2 ** (8 * size) - 1)) for size in (1, 1, 4, 8, 4, 4, 4)]
    sizes = (1, 1, 4, 8, 4, 4, 4)
    return e.MAGIC + b"".join(field.to_bytes(size, "little") for field, size in zip(fields, sizes, strict=True))


@st.composite
def bytes_of_a_stranger(draw: Any) -> bytes:
    body: bytes = draw(st.binary(max_size=64))
    sealed = seal(*[draw(st.integers(0, 2**n - 1)) for n in (8, 32, 64)], [body], draw(st.integers(0, 2**32 - 1)))
    return bytes(draw(st.sampled_from([body, any_header(draw) + body, sealed, sealed[:-1], sealed + body])))


@given(bytes_of_a_stranger(), st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)))
@settings(deadline=None, max_examples=300)
def test_any_bytes_give_an_envelope_or_a_refusal_and_take_no_memory(
    piece: bytes, position: tuple[int, int, int, int]
) -> None:
    tracemalloc.start()
    try:
        head, body = unseal(piece)
        assert len(body) == head.length <= e.PIECE_BYTES
        follow(Position(*position), head)
    except InternalError as refused:
        reason = refused.got
    else:
        reason = e.REASONS[0]
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert reason in e.REASONS
    assert most < 2**16
