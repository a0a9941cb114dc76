"""The envelope of bytes between workers over a network: a header of 28 bytes, then at most 1 MiB.

A message is one piece (WHOLE), or several of full length but the last (FIRST, MORE). Every piece carries the run's
generation, its number on the stream, and a CRC-32 of header and bytes. What does not fit is refused, with its reason,
before memory is allocated for it. Pure functions over bytes; the wire frames of :mod:`roundelay.transport.wire_format`
are inside.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple, final
from zlib import crc32

from roundelay.transport.endpoint import MAX_MESSAGE_BYTES
from roundelay.transport.wire_layout import unreadable

MAGIC = b"Ro"
PIECE_BYTES = 2**20
"""Most bytes of a piece beside its header."""

WHOLE, FIRST, MORE, HELLO = range(1, 5)
"""Kinds of pieces. HELLO is the first of each direction, and names its sender."""

_HEADER = struct.Struct("<2sBBIQIII")
_CHECKED = _HEADER.size - 4  # the checksum stands last
HEADER_BYTES = _HEADER.size
MAX_PIECES = MAX_MESSAGE_BYTES // PIECE_BYTES + 64
"""Most pieces of a message, with room for what stands beside its tensors."""

REASONS = (
    "truncated",
    "no envelope of this version",
    "of an unknown kind",
    "oversize",
    "damaged",
    "of another generation",
    "replayed",
    "skipped",
    "out of place",
    "under another worker's name",
    "from a worker that is connected already",
)
"""Why something was refused."""
TRUNCATED, FOREIGN, UNKNOWN, OVERSIZE, DAMAGED, STALE, REPLAYED, SKIPPED, MISPLACED, MISNAMED, TAKEN = REASONS


@final
class Envelope(NamedTuple):
    """The header of a piece.

    Args:
        kind: WHOLE, FIRST, MORE or HELLO.
        flags: 0; for later use.
        generation: of the run; grows when its members change.
        sequence: number of the piece on its stream and direction, from 0.
        length: bytes that follow.
        total: pieces that the message has.
    """

    kind: int
    flags: int
    generation: int
    sequence: int
    length: int
    total: int


@final
class Position(NamedTuple):
    """What a stream must bring next.

    Args:
        generation: of every piece.
        sequence: of the next piece.
        left: pieces that the message begun still lacks.
        total: pieces that it has.
    """

    generation: int
    sequence: int = 0
    left: int = 0
    total: int = 0


def seal(kind: int, generation: int, sequence: int, parts: Sequence[memoryview | bytes], total: int = 1) -> bytes:
    """Return a piece: the header, and `parts` together, at most `PIECE_BYTES`."""
    length = sum(map(len, parts))
    header = _HEADER.pack(MAGIC, kind, 0, generation, sequence, length, total, 0)[:_CHECKED]
    checksum = crc32(header)
    for part in parts:
        checksum = crc32(part, checksum)
    return b"".join((header, checksum.to_bytes(4, "little"), *parts))


def unseal(piece: bytes) -> tuple[Envelope, memoryview]:
    """Return header and body (not copied) of a piece.

    Raises:
        InternalError: it is not what `seal` returns.
    """
    if len(piece) < HEADER_BYTES:
        raise unreadable(TRUNCATED)
    magic, *fields, checksum = _HEADER.unpack_from(piece)
    envelope = Envelope._make(fields)
    body = memoryview(piece)[HEADER_BYTES:]
    if magic != MAGIC:
        raise unreadable(FOREIGN)
    if envelope.length > PIECE_BYTES or len(body) > envelope.length or envelope.total > MAX_PIECES:
        raise unreadable(OVERSIZE)
    if len(body) < envelope.length:
        raise unreadable(TRUNCATED)
    if crc32(body, crc32(piece[:_CHECKED])) != checksum:
        raise unreadable(DAMAGED)
    if not WHOLE <= envelope.kind <= HELLO or envelope.flags:
        raise unreadable(UNKNOWN)
    return envelope, body


def follow(position: Position, envelope: Envelope) -> Position:
    """Return the position after a piece.

    Raises:
        InternalError: another piece must come at `position`.
    """
    if envelope.generation != position.generation:
        raise unreadable(STALE)
    if envelope.sequence != position.sequence:
        raise unreadable(REPLAYED if envelope.sequence < position.sequence else SKIPPED)
    kind, total, begun = envelope.kind, envelope.total, position.left > 0
    fits = {
        HELLO: position.sequence == 0 and total == 1,
        WHOLE: position.sequence > 0 and not begun and total == 1,
        FIRST: position.sequence > 0 and not begun and total > 1,
        MORE: begun and total == position.total,
    }
    if not fits[kind]:
        raise unreadable(MISPLACED)
    left = (position.left if begun else total) - 1
    if left and envelope.length != PIECE_BYTES:
        raise unreadable(TRUNCATED)
    return Position(position.generation, position.sequence + 1, left, total)


def cut(buffers: Iterable[memoryview]) -> list[list[memoryview]]:
    """Return the parts of each piece of a message, whose bytes are `buffers` one after the other; nothing is copied."""
    pieces: list[list[memoryview]] = [[]]
    room = PIECE_BYTES
    for buffer in buffers:
        while buffer:
            if not room:
                pieces.append([])
                room = PIECE_BYTES
            pieces[-1].append(buffer[:room])
            buffer, room = buffer[room:], room - len(pieces[-1][-1])
    return pieces
