"""A report passes through a pipe as it was, with tensors of any shape and dtype, and none is copied on the way in."""

from __future__ import annotations

import torch

from roundelay.runtime.report import Report, pieces_of, report_of

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


def test_a_report_comes_out_of_its_bytes_as_it_was() -> None:
    report = Report("state", 3, {"loss": 0.1 + 0.2, "names": ["ä"]}, TENSORS)
    found = report_of(bytearray(b"".join(pieces_of(report))))
    assert (found.kind, found.worker, found.data) == ("state", 3, report.data)
    assert list(found.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        there = found.tensors[name]
        assert (there.dtype, there.shape) == (tensor.dtype, tensor.shape)
        torch.testing.assert_close(there, tensor, rtol=0, atol=0, equal_nan=True)


def test_a_report_without_tensors_is_short() -> None:
    report = Report("progress", 0, {"update": 1})
    assert report_of(bytearray(b"".join(pieces_of(report)))) == report


def test_what_is_sent_lies_in_the_tensors_own_memory() -> None:
    """Copying holds the interpreter, which the worker beside it needs."""
    tensor = torch.zeros(8)
    pieces = pieces_of(Report("state", 0, {}, {"x": tensor}))
    tensor.fill_(1.0)
    assert torch.equal(report_of(bytearray(b"".join(pieces))).tensors["x"], tensor)
