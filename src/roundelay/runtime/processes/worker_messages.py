"""Encodes what workers report: plain data as msgpack, tensors as their own memory. Nothing is pickled.

An encoded report is a header, and one buffer of bytes for each tensor. A pipe carries the length of the header, the
header and the buffers; the control channel carries header and buffers as tensors of bytes.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, final

import msgspec
import torch

from roundelay import errors
from roundelay.errors import InternalError, RoundelayError
from roundelay.runtime.processes.user_errors import unexpected

Kind = Literal[
    "loss", "progress", "events", "loads", "digest", "state", "skipped", "letters", "failed", "finished", "verdict"
]


@dataclass(frozen=True, slots=True)
class Report:
    """One report.

    Args:
        kind: what it is about.
        worker: who reports.
        data: numbers, strings, lists and dicts; floats survive exactly.
        tensors: by name; own copies.
    """

    kind: Kind
    worker: int
    data: dict[str, Any] = field(hash=False)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict, hash=False)


Reporter = Callable[[Report], None]

MAX_HEADER_BYTES = 2**30
MAX_TENSOR_BYTES = 2**40

ERRORS: dict[str, type[RoundelayError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, RoundelayError)
}
"""Every error that a report may be of, by name."""

_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_LENGTH_BYTES = 8

_SCRATCH_BYTES = 1 << 16
"""Bytes to read at once outside of tensors; bytes of a tensor that are read with them are copied once more."""

_VECTOR = 64
"""Buffers that one call of the system may fill."""


def failure(worker: int, error: RoundelayError, trace: str = "") -> Report:
    """Return an error as a report; :func:`error_of` is the inverse."""
    what = {"subject": error.subject, "got": error.got, "expected": error.expected, "remedy": error.remedy}
    return Report("failed", worker, {"kind": type(error).__name__, **what, "trace": trace})


def error_of(report: Report) -> RoundelayError:
    """Return the error of a ``failed`` report."""
    data = report.data
    kind = ERRORS.get(data["kind"], InternalError)
    error = kind(data["subject"], got=data["got"], expected=data["expected"], remedy=data["remedy"])
    error.add_note(str(data["trace"]))
    return error


def unsendable(report: Report, error: Exception) -> Report:
    """Return the failure that replaces a report that cannot be encoded or sent."""
    cause = error if isinstance(error, RoundelayError) else unexpected(f"worker {report.worker}, {report.kind}", error)
    return failure(report.worker, cause)


@final
class Header(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A report without the bytes of its tensors, of which it has name, dtype and shape."""

    kind: Kind
    worker: int
    data: dict[str, Any]
    tensors: tuple[tuple[str, str, tuple[Annotated[int, msgspec.Meta(ge=0)], ...]], ...]

    def sizes(self) -> list[int]:
        """Return the bytes of each tensor.

        Raises:
            ValueError: a dtype is unknown, or a tensor is too large.
        """
        if unknown := {dtype for _, dtype, _ in self.tensors} - _DTYPES.keys():
            raise ValueError(f"a report with tensors of dtype {', '.join(unknown)}")
        sizes = [math.prod(shape) * _DTYPES[dtype].itemsize for _, dtype, shape in self.tensors]
        if (largest := max(sizes, default=0)) > MAX_TENSOR_BYTES:
            raise ValueError(f"a report with a tensor of {largest} bytes")
        return sizes

    def report(self, buffers: Sequence[torch.Tensor]) -> Report:
        """Return the report whose tensors are these buffers, without copying them.

        Raises:
            RuntimeError: a buffer does not have the size of its tensor.
            ValueError: their number is wrong.
        """
        tensors = {
            name: buffer.view(_DTYPES[dtype]).reshape(shape)
            for (name, dtype, shape), buffer in zip(self.tensors, buffers, strict=True)
        }
        return Report(self.kind, self.worker, self.data, tensors)


class Encoded(NamedTuple):
    """An encoded report: header, and the memory of each tensor as a tensor of bytes."""

    kind: Kind
    header: bytes
    buffers: list[torch.Tensor]


def encode(report: Report) -> Encoded:
    """Encode a report, without copying its tensors if they are contiguous and on the CPU.

    Copying would hold the interpreter, which the worker in this process needs. A report that cannot be encoded is
    replaced by a failure that says why.
    """
    try:
        return _encode(report)
    except Exception as error:
        return _encode(unsendable(report, error))


def _encode(report: Report) -> Encoded:
    tensors = [tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in report.tensors.values()]
    kinds = ((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors)
    specs = tuple((name, *kind) for name, kind in zip(report.tensors, kinds, strict=True))
    header = _ENCODER.encode(Header(report.kind, report.worker, report.data, specs))
    return Encoded(report.kind, header, [tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def _plain(value: Any) -> Any:
    """Convert an instance of a subclass of a plain type, such as ``numpy.float64``."""
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a report cannot hold an object of type {type(value).__name__}")


_ENCODER, _DECODER = msgspec.msgpack.Encoder(enc_hook=_plain), msgspec.msgpack.Decoder(Header)


def decode(header: bytes | memoryview) -> Header:
    """Decode a header and check it.

    Raises:
        ValueError: it is damaged.
    """
    decoded = _DECODER.decode(header)
    decoded.sizes()
    return decoded


def write_report(descriptor: int, report: Report) -> None:
    """Write an encoded report to a pipe."""
    encoded = encode(report)
    start = len(encoded.header).to_bytes(_LENGTH_BYTES, "little") + encoded.header
    pieces: list[bytes | memoryview] = [start, *(buffer.numpy().data for buffer in encoded.buffers)]
    for piece in pieces:
        view = memoryview(piece)
        while view:
            view = view[os.write(descriptor, view) :]


@final
class ReportAssembler:
    """Assembles reports from a pipe, reading the bytes of large tensors into their final memory."""

    def __init__(self) -> None:
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._bytes = bytearray()  # read, and not part of a tensor yet
        self._header: Header | None = None
        self._buffers: list[torch.Tensor] = []
        self._unfilled: deque[memoryview] = deque()  # of the buffers

    def read(self, descriptor: int) -> list[Report] | None:
        """Read once from a pipe and return the reports that are complete; None at its end.

        Raises:
            ValueError: the bytes are damaged.
        """
        size = os.readv(descriptor, self.rooms())
        return [*self.filled(size)] if size else None

    def rooms(self) -> list[memoryview]:
        """Return where to read the next bytes, in order."""
        return list(itertools.islice(self._unfilled, _VECTOR)) or [self._scratch]

    def filled(self, size: int) -> Iterator[Report]:
        """Yield the reports that are complete after ``size`` bytes were read into the rooms."""
        if self._unfilled:
            self._advance(size)
        else:
            self._bytes += self._scratch[:size]
        while self._header is not None or self._begin():
            while self._unfilled and self._bytes:
                room = self._unfilled[0]
                size = min(len(room), len(self._bytes))
                room[:size] = self._bytes[:size]
                del self._bytes[:size]
                self._advance(size)
            if self._unfilled:
                return
            assert self._header is not None
            yield self._header.report(self._buffers)
            self._header = None

    def _begin(self) -> bool:
        """Decode the next header if all of its bytes are there."""
        length = int.from_bytes(self._bytes[:_LENGTH_BYTES], "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"a report whose header has {length} bytes")
        end = _LENGTH_BYTES + length
        if len(self._bytes) < max(end, _LENGTH_BYTES + 1):
            return False
        self._header = decode(bytes(self._bytes[_LENGTH_BYTES:end]))
        del self._bytes[:end]
        self._buffers = [torch.empty(size, dtype=torch.uint8) for size in self._header.sizes()]
        self._unfilled.extend(buffer.numpy().data for buffer in self._buffers if buffer.nbytes)
        return True

    def _advance(self, size: int) -> None:
        while size:
            room = self._unfilled.popleft()
            if size < len(room):
                self._unfilled.appendleft(room[size:])
            size -= min(size, len(room))
