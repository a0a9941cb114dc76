"""What workers tell whoever launched them, as plain data that fits through a pipe without pickling."""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch

Kind = Literal["loss", "progress", "events", "loads", "digest", "state", "skipped", "failed", "finished"]


@dataclass(frozen=True, slots=True)
class Report:
    """One report.

    Args:
        kind: what it is about.
        worker: who reports.
        data: values that JSON can hold; floats survive exactly.
        tensors: by name; own copies.
    """

    kind: Kind
    worker: int
    data: dict[str, Any] = field(hash=False)
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict, hash=False)


Reporter = Callable[[Report], None]


_SCRATCH_BYTES = 1 << 16
"""Read at once where no tensor waits for its bytes; those of a tensor that come along are copied once more."""

_VECTOR = 64
"""Tensors that one call may fill."""


def pieces_of(report: Report) -> list[bytes | memoryview]:
    """A report as pieces of bytes: some JSON behind its length, and each tensor's own memory.

    Nothing is copied: the interpreter is held while bytes are, and the worker beside the sender stands still.
    """
    tensors = [tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in report.tensors.values()]
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    named = [[name, *kind] for name, kind in zip(report.tensors, kinds, strict=True)]
    text = json.dumps([report.kind, report.worker, report.data, named]).encode()
    return [len(text).to_bytes(8, "little") + text, *map(_bytes_of, tensors)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@final
class ReportAssembler:
    """Reports out of pieces, one after the other as their bytes come; a tensor's are read to where it will stay.

    It reads nothing itself: whoever does asks for the :meth:`rooms`, and says how many bytes were :meth:`filled` in.
    """

    def __init__(self) -> None:
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._text = bytearray()  # what belongs to no tensor
        self._begun: Report | None = None
        self._open: deque[memoryview] = deque()  # of its tensors, what has yet to be filled

    def rooms(self) -> list[memoryview]:
        """Where the next bytes belong, in order."""
        return list(itertools.islice(self._open, _VECTOR)) or [self._scratch]

    def filled(self, size: int) -> Iterator[Report]:
        """The reports that are whole now that so many bytes have been read into the rooms."""
        if self._open:
            self._advance(size)
        else:
            self._text += self._scratch[:size]
        while self._begun is not None or self._begin():
            self._pour()
            if self._open:
                return
            assert self._begun is not None
            yield self._begun
            self._begun = None

    def _begin(self) -> bool:
        """Begin with the next report if all its JSON is there."""
        size = 8 + int.from_bytes(self._text[:8], "little")
        if len(self._text) < max(size, 9):
            return False
        kind, worker, values, named = json.loads(self._text[8:size])
        del self._text[:size]
        tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in named}
        self._begun = Report(kind, worker, values, tensors)
        self._open.extend(_bytes_of(tensor) for tensor in tensors.values() if tensor.nbytes)
        return True

    def _pour(self) -> None:
        """Bytes of tensors that came along with the JSON to where they belong."""
        while self._open and self._text:
            size = min(len(self._open[0]), len(self._text))
            self._open[0][:size] = self._text[:size]
            del self._text[:size]
            self._advance(size)

    def _advance(self, size: int) -> None:
        while size:
            room = self._open.popleft()
            if size < len(room):
                self._open.appendleft(room[size:])
            size -= min(size, len(room))
