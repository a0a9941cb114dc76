"""What workers tell whoever launched them, as plain data that fits through a pipe without pickling."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from safetensors.torch import load, save

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


def to_bytes(report: Report) -> bytes:
    """A report as bytes: length and JSON, length and safetensors."""
    text = json.dumps([report.kind, report.worker, report.data]).encode()
    blob = save({name: tensor.contiguous() for name, tensor in report.tensors.items()}) if report.tensors else b""
    return b"".join((len(text).to_bytes(8, "little"), text, len(blob).to_bytes(8, "little"), blob))


def from_bytes(data: bytes) -> Report:
    """The report that :func:`to_bytes` made."""
    size = int.from_bytes(data[:8], "little")
    kind, worker, values = json.loads(data[8 : 8 + size])
    blob = data[16 + size :]
    return Report(kind, worker, values, load(blob) if blob else {})
