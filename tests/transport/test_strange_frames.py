"""A frame of any bytes is a message or is refused: no other error, and no more memory than has come.

A member of a run may send a right envelope with anything in it.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings

from roundelay.errors import InternalError
from roundelay.transport import grpc_stream as stream
from roundelay.transport import wire_format as wire
from roundelay.transport.endpoint import MAX_VALUES, Message
from tests.transport import strange_frames
from tests.transport.strange_frames import APART, INSIDE, frame, tensor

PYTHON_BYTES = 2**17
"""What reading a short frame may take beside its tensors."""


class Memory:
    """Counts the bytes of tensors that are made while it is open, and the most that Python has allocated."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tensors, self.most, self._monkeypatch, self._made = 0, 0, monkeypatch, torch.empty_strided

    def __enter__(self) -> Memory:
        def counted(*args: Any, **options: Any) -> torch.Tensor:
            made = self._made(*args, **options)
            self.tensors += made.nbytes
            return made

        self._monkeypatch.setattr(torch, "empty_strided", counted)
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        self._monkeypatch.undo()


def read(received: bytes) -> Message | str:
    """The message, or why it is refused; "control" for another frame."""
    view = memoryview(received)
    try:
        head = stream._head(view)
        return stream._message(head, view) if head.kind in (wire.MESSAGE, wire.MESSAGE_APART) else "control"
    except InternalError as refused:
        return refused.got if refused.subject == "bytes from another worker" else pytest.fail(f"{refused}")


@given(strange_frames.FRAMES)
@example(frame(tensor(INSIDE, 0, [2**34, 2**34, 0])))
@example(frame(tensor(APART, 11, [2**34, 2**27, 0])))
@settings(deadline=None, max_examples=1500)
def test_any_frame_is_a_message_or_is_refused_and_takes_what_has_come(received: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch, Memory(patch) as memory:
        got = read(received)
    assert memory.tensors <= len(received)
    assert memory.most <= PYTHON_BYTES
    if isinstance(got, Message):
        assert got.payload_bytes == memory.tensors
    else:
        assert len(got) < 1000


@given(strange_frames.messages())
@settings(deadline=None)
def test_what_is_sent_is_read_and_with_a_byte_more_or_less_is_not(received: bytes) -> None:
    assert isinstance(read(received), Message)
    assert isinstance(read(received[:-1]), str)
    assert isinstance(read(received + b"\0"), str)


LONG: dict[str, bytes] = {
    "nothing, 4 Mi times": frame(bytes(2**22)),
    "scalars behind the frame": frame(tensor(APART, 8, []) * 2**20),
    "one value too many": frame(bytes(MAX_VALUES + 1)),
    "of an unknown kind": frame(bytes(MAX_VALUES) + b"\x09" * 2**20),
    "sizes that no frame has": frame(b"".join(tensor(INSIDE, 8, [size]) for size in range(1, 40_000))),
    "too much behind it": frame(tensor(APART, 8, [2**34]) * 60_000),
}


@pytest.mark.parametrize("what", LONG)
def test_a_long_layout_takes_no_more_than_a_message_may_have_values(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Memory(monkeypatch) as memory:
        got = read(LONG[what])
    assert isinstance(got, str)
    assert len(got) < 1000
    assert memory.tensors == 0
    assert memory.most < len(LONG[what]) + 400 * min(MAX_VALUES, len(LONG[what]))


@pytest.mark.parametrize("control", [wire.grant_frame(3), wire.ack_frame(), wire.end_frame("over")])
@pytest.mark.parametrize("more", [-1, 1, 2**20])
def test_another_frame_has_the_length_that_it_says(control: bytearray, more: int) -> None:
    assert read(bytes(control)) == "control"
    assert read(bytes(control[:more] if more < 0 else control + bytes(more))) == "truncated"
