"""What workers tell whoever launched them, as plain data that fits through a pipe without pickling."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

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


_ALIGNED = 16
"""Where a tensor may begin."""


def pieces_of(report: Report) -> list[bytes | memoryview]:
    """A report as pieces of bytes: the length of some JSON, the JSON, and each tensor's own memory behind a filling.

    Nothing is copied: the interpreter is held while bytes are, and the worker beside the sender stands still.
    """
    tensors = [tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in report.tensors.values()]
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    named = [[name, *kind] for name, kind in zip(report.tensors, kinds, strict=True)]
    text = json.dumps([report.kind, report.worker, report.data, named]).encode()
    pieces: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
    at = 8 + len(text)
    for tensor in tensors:
        filling = -at % _ALIGNED
        pieces += [bytes(filling), tensor.reshape(-1).view(torch.uint8).numpy().data]
        at += filling + tensor.nbytes
    return pieces


def report_of(data: bytearray) -> Report:
    """The report whose pieces these are, with tensors of its own."""
    size = int.from_bytes(data[:8], "little")
    kind, worker, values, named = json.loads(data[8 : 8 + size])
    at, tensors = 8 + size, {}
    for name, dtype, shape in named:
        at += -at % _ALIGNED
        empty = torch.empty(shape, dtype=getattr(torch, dtype))
        if empty.nbytes:
            there = torch.frombuffer(data, dtype=empty.dtype, count=empty.numel(), offset=at)
            empty.copy_(there.reshape(shape))
        tensors[name] = empty
        at += empty.nbytes
    return Report(kind, worker, values, tensors)
