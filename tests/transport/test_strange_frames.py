"""A frame of any bytes is a message or is refused: no other error, and no more memory than has come.

A member of a run may send a right envelope with anything in it.
"""

from __future__ import annotations

import itertools
import traceback
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings

from roundelay.errors import DeadlineError, InternalError
from roundelay.transport import grpc_stream as stream
from roundelay.transport import wire_format as wire
from roundelay.transport.endpoint import MAX_VALUES, Arrived, Lost, Message
from roundelay.transport.grpc_link import head_in, message_in
from roundelay.transport.grpc_stream import GrpcEndpoint
from tests.transport import strange_frames
from tests.transport.harness import fork_all
from tests.transport.strange_frames import APART, INSIDE, frame, tensor
from tests.transport.test_gloo import settled
from tests.transport.test_grpc import WAIT_S, open_one

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
        head = head_in(view)
        return message_in(head, view) if head.kind in (wire.MESSAGE, wire.MESSAGE_APART) else "control"
    except InternalError as refused:
        return refused.got if refused.subject == "bytes from another worker" else pytest.fail(f"{refused}")


@given(strange_frames.FRAMES)
@example(frame(tensor(INSIDE, 0, [2**34, 2**34, 0])))
@example(frame(tensor(APART, 11, [2**34, 2**27, 0])))
@settings(deadline=None, max_examples=1000)
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


# --- between two endpoints


Pair = tuple[GrpcEndpoint, GrpcEndpoint]


@contextmanager
def paired(folder: Path) -> Iterator[Pair]:
    """Two endpoints of this process, which are aborted at the end."""
    folder.mkdir()
    with ThreadPoolExecutor(2) as both:
        ends = tuple(both.map(lambda worker: open_one(worker, 2, folder), range(2)))
        try:
            yield ends
        finally:
            deque(both.map(lambda end: end.abort("over"), ends))
    assert not any(end._thread.is_alive() for end in ends)


def told(end: GrpcEndpoint) -> list[Any]:
    """What an endpoint is delivered, up to the loss of the other, or to the message on channel 99."""
    got: list[Any] = []
    while not got or not (isinstance(got[-1], Lost) or getattr(got[-1], "message", END).channel == END.channel):
        got.append(end.receive(WAIT_S))
    return got


END = Message(99, (), ())


def in_child(task: Callable[[], Any]) -> Any:
    def outcome() -> dict[str, Any]:
        try:
            return {"result": task()}
        except BaseException:
            return {"error": traceback.format_exc()}

    (told,) = fork_all([outcome])
    assert "result" in told, told["error"]
    return told["result"]


@pytest.mark.parametrize("sender", [0, 1])
def test_a_frame_that_is_none_loses_its_sender_at_once_and_nothing_else_comes(sender: int, tmp_path: Path) -> None:
    """What a member sends in right envelopes: the other hears what was read, or that its sender is lost, and why."""

    def trials() -> Counter[str]:
        outcomes, folders = Counter[str](), itertools.count()

        @given(strange_frames.FRAMES.filter(lambda sent: isinstance(read(sent), str)))
        @settings(deadline=None, max_examples=25, database=None)
        def trial(sent: bytes) -> None:
            due = read(sent)
            with paired(tmp_path / str(next(folders))) as ends:
                ends[sender]._post(ends[sender]._links[1 - sender], bytearray(sent))
                if due != "control":
                    assert told(ends[1 - sender]) == [
                        Lost(sender, f"it sent bytes that are no message ({due})", unfit=True)
                    ]
                    (lost,) = told(ends[sender])
                    assert (lost.source, lost.unfit) == (1 - sender, False)
            outcomes[due] += 1

        trial()
        return outcomes

    outcomes = in_child(trials)
    assert outcomes["truncated"]
    assert len(outcomes) > 3


@pytest.mark.parametrize("sender", [0, 1])
def test_who_sends_what_is_none_is_cut_off_when_the_other_knows_of_it(sender: int, tmp_path: Path) -> None:
    """Else it could be the first to tell that a worker is lost, while the other still computes."""

    def trial() -> list[Any]:
        with paired(tmp_path / "pair") as ends:
            ends[sender]._post(ends[sender]._links[1 - sender], bytearray(wire.HEAD_BYTES))
            assert settled(lambda: ends[1 - sender].refused["no message"], 1)
            with pytest.raises(DeadlineError):
                ends[sender].receive(0.5)
            return told(ends[1 - sender]) + told(ends[sender])

    first, then = in_child(trial)
    assert (first[0], first[2]) == (sender, True)
    assert (then[0], then[2]) == (1 - sender, False)


def test_after_its_end_a_worker_sends_no_more(tmp_path: Path) -> None:
    def trial() -> list[Any]:
        with paired(tmp_path / "pair") as (lead, other):
            for frame in (wire.end_frame("my end"), wire.end_frame("my other end"), wire.encode(END)[0]):
                other._post(other._links[0], frame)
            assert settled(lambda: lead.refused["no message"], 1)
            lead._inbox.put(Arrived(1, END))
            return told(lead) + told(lead)

    assert in_child(trial) == [[1, "my end", False], [1, [99, [], []]]]


def test_credits_beyond_what_a_plan_has_in_flight_are_refused(tmp_path: Path) -> None:
    def trial() -> list[Any]:
        with paired(tmp_path / "pair") as (lead, other):
            for _ in range(stream.MOST_WAITING + 10):
                other.grant(0, 3)
            settled(lambda: len(lead._credits), stream.MOST_WAITING + 1)
            return [len(lead._credits), lead.receive(WAIT_S, credits=False)]

    credits, (source, reason, unfit) = in_child(trial)
    assert credits == stream.MOST_WAITING + 1
    assert (source, unfit) == (1, True)
    assert reason.startswith("it sent bytes that are no message (Head(kind=3,")


def test_what_waits_is_weighed_by_what_it_takes_once_it_is_read(tmp_path: Path) -> None:
    """A message of many values of next to no bytes is much to keep."""

    def trial() -> int:
        with paired(tmp_path / "pair") as (lead, other):
            lead._most_pieces = 2
            for _ in range(3):
                other.send(0, Message(0, (), tuple(torch.empty(4000, 0).unbind())))
            settled(lambda: lead._inbox.qsize(), 3)
            waiting = lead._inbox.qsize()
            assert all(isinstance(lead.receive(WAIT_S), Arrived) for _ in range(3))
            return waiting

    assert in_child(trial) == 1
