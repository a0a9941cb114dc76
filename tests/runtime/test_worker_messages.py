"""A report passes through a pipe as it was, with tensors of any shape and dtype, and none is copied on the way in."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import pytest
import torch

from roundelay.runtime.processes.worker_messages import Report, ReportAssembler, encode, error_of, write_report

TENSORS = {
    "float": torch.randn(3, 5),
    "odd": torch.randn(7).bfloat16(),
    "double": torch.randn(2, dtype=torch.float64),
    "nothing": torch.empty(0, 3),
    "number": torch.tensor(3),
    "bool": torch.tensor([True, False, True]),
    "conjugate": torch.randn(2, dtype=torch.complex64).conj(),
    "across": torch.randn(4, 5).t(),
    "ends": torch.full((), torch.nan),
}


def heard(incoming: ReportAssembler, data: bytes, sizes: Iterable[int]) -> Iterator[Report]:
    """What comes out of bytes that are read in parts of these sizes, the last of them again and again."""
    for size in sizes:
        if not data:
            return
        read = 0
        for room in incoming.rooms():
            part = data[: min(len(room), size - read)]
            room[: len(part)] = part
            data, read = data[len(part) :], read + len(part)
        yield from incoming.filled(read)


def bytes_of(*reports: Report) -> bytes:
    return b"".join(itertools.chain.from_iterable(map(pieces_of, reports)))


def pieces_of(report: Report) -> list[bytes]:
    """What is written to a pipe."""
    encoded = encode(report)
    return [len(encoded.header).to_bytes(8, "little") + encoded.header, *(b.numpy().tobytes() for b in encoded.buffers)]


def same(got: Report, sent: Report) -> None:
    assert (got.kind, got.worker, got.data) == (sent.kind, sent.worker, sent.data)
    assert list(got.tensors) == list(sent.tensors)
    for name, tensor in sent.tensors.items():
        there = got.tensors[name]
        assert (there.dtype, there.shape) == (tensor.dtype, tensor.shape)
        torch.testing.assert_close(there, tensor, rtol=0, atol=0, equal_nan=True)


STATE = Report("state", 3, {"loss": 0.1 + 0.2, "names": ["ä"]}, TENSORS)
SHORT = Report("progress", 0, {"update": 1})


def test_no_more_rooms_are_offered_than_one_call_of_the_system_takes() -> None:
    incoming = ReportAssembler()
    pieces = pieces_of(Report("state", 0, {}, {str(n): torch.zeros(1) for n in range(2000)}))
    reading, writing = os.pipe()
    try:
        os.write(writing, pieces[0])
        assert incoming.read(reading) == []
        os.write(writing, b"".join(pieces[1:]))
        heard: list[Report] = []
        while not heard:
            heard += incoming.read(reading) or []
        assert len(heard[0].tensors) == 2000
    finally:
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 20])
def test_reports_come_out_of_their_bytes_as_they_were(size: int) -> None:
    sent = [SHORT, STATE, STATE, SHORT, SHORT]
    got = list(heard(ReportAssembler(), bytes_of(*sent), itertools.repeat(size)))
    assert len(got) == len(sent)
    for pair in zip(got, sent, strict=True):
        same(*pair)


def test_reports_come_out_of_bytes_in_parts_of_any_size() -> None:
    """Tensors of more than is read at once, and more of them than one call fills."""
    large = Report("state", 1, {}, {"x": torch.randn(50_000)})
    many = Report("state", 2, {}, {str(i): torch.full((i % 5,), float(i)) for i in range(200)})
    for seed in range(20):
        draw = random.Random(seed)
        sent = [draw.choice([SHORT, STATE, large, many]) for _ in range(10)]
        sizes = (draw.choice([1, 100, 5_000, 200_000]) for _ in itertools.count())
        got = list(heard(ReportAssembler(), bytes_of(*sent), sizes))
        assert len(got) == len(sent)
        for pair in zip(got, sent, strict=True):
            same(*pair)


def test_a_report_is_there_with_its_last_byte() -> None:
    data, incoming = bytes_of(STATE), ReportAssembler()
    assert not list(heard(incoming, data[:-1], itertools.repeat(1000)))
    assert [report.kind for report in heard(incoming, data[-1:], [1])] == ["state"]


def test_the_bytes_of_a_large_tensor_are_read_to_where_it_stays() -> None:
    sent, incoming = Report("state", 0, {}, {"x": torch.randn(100_000)}), ReportAssembler()
    pieces = pieces_of(sent)
    assert not list(heard(incoming, b"".join(pieces[:-1]), [1000]))
    (room,) = incoming.rooms()
    assert len(room) == 400_000
    room[:] = pieces[-1]
    (got,) = incoming.filled(len(room))
    same(got, sent)
    room[:4] = bytes(4)
    assert got.tensors["x"][0] == 0.0


def test_an_encoded_report_shares_the_memory_of_its_tensors() -> None:
    """Copying holds the interpreter, which the worker in the same process needs."""
    tensor = torch.zeros(8)
    (buffer,) = encode(Report("state", 0, {}, {"x": tensor})).buffers
    assert buffer.data_ptr() == tensor.data_ptr()


def test_reports_pass_through_a_pipe_until_it_is_closed() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading), os.fdopen(writing, "wb") as closes:
        write_report(writing, STATE)
        write_report(writing, SHORT)
        os.write(writing, bytes_of(STATE)[:100])
        closes.close()
        incoming, got = ReportAssembler(), list[Report]()
        while (reports := incoming.read(reading)) is not None:
            got += reports
    same(got[0], STATE)
    same(got[1], SHORT)
    assert len(got) == 2, "one that is cut short is none"


def test_numbers_of_numpy_arrive_as_plain_ones() -> None:
    class Name(str):
        __slots__ = ()

    sent = Report("loss", 0, {"lr": np.float64(0.1), "name": Name("a"), "keys": {1: (1, 2)}, "nan": float("inf")})
    (got,) = heard(ReportAssembler(), bytes_of(sent), [1000])
    assert got.data == {"lr": 0.1, "name": "a", "keys": {1: [1, 2]}, "nan": float("inf")}
    assert [type(got.data[key]) for key in ("lr", "name")] == [float, str]


@pytest.mark.parametrize("held", [object(), 2**64, torch.zeros(1), 1j], ids=["object", "integer", "tensor", "complex"])
def test_a_report_that_cannot_be_encoded_becomes_a_failure(held: object) -> None:
    (got,) = heard(ReportAssembler(), bytes_of(Report("progress", 2, {"x": held})), [10_000])
    assert (got.kind, got.worker) == ("failed", 2)
    assert error_of(got).subject == "worker 2, progress"


GOOD = ["state", 3, {}, [["x", "float32", [2]]]]


@pytest.mark.parametrize(
    "damaged",
    [
        ["no-such-kind", *GOOD[1:]],
        ["state", "3", *GOOD[2:]],
        ["state", 3, [], GOOD[3]],
        GOOD[:3],
        [*GOOD, 1],
        ["state", 3, {}, [["x", "float32", [-2]]]],
        ["state", 3, {}, [["x", "float32", [2**62]]]],
        ["state", 3, {}, [["x", "float32", [2**30, 2**30]]]],
        ["state", 3, {}, [["x", "manual_seed", [2]]]],
        ["state", 3, {}, [["x", "float32"]]],
    ],
    ids=str,
)
def test_a_damaged_header_is_refused(damaged: object) -> None:
    header = msgspec.msgpack.encode(damaged)
    with pytest.raises(ValueError, match=r"."):
        list(heard(ReportAssembler(), len(header).to_bytes(8, "little") + header, [10_000]))


@pytest.mark.parametrize("bytes_", [bytes(16), b"\xff" * 16, (3).to_bytes(8, "little") + b"abc"], ids=str)
def test_bytes_that_are_no_report_are_refused(bytes_: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        list(heard(ReportAssembler(), bytes_, [100]))
