"""A device without enough memory, or one that has failed: what a person is told, and what must not be touched then.

An assertion in a kernel, most often an index outside of its range, is reported later and by another call, and ends all
use of the device in the process: even to free a tensor may end the process. So the integers of the latest micro-batches
are kept on the host to tell which of them was wrong, and what uses the device is kept until the process has told it.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any, final

import torch

from roundelay.errors import DeviceError
from roundelay.ir.graph import BATCH, Graph

KEPT = 32
"""Micro-batches whose integers are kept: more than are on their way through a pipeline of eight stages."""

_INTEGERS = (torch.int64, torch.int32)

_IGNORED = -100
"""The label that torch's losses leave out."""

_TRIED = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_SPACE = re.compile(r"GPU (\d+) has a total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")
_ALLOWED = re.compile(r"([\d.]+ \w+) allowed")

_lost: list[Any] = []


def keep(*used: object) -> None:
    """Keep objects that use a failed device until the process ends."""
    _lost.extend(used)


def has_failed() -> bool:
    """Whether a device has failed in this process, which should then end without unloading anything."""
    return bool(_lost)


def device_error(subject: str, error: BaseException, wrong: str = "") -> DeviceError | None:
    """Describe torch's error for a lack of memory on a device, or for its failure; None if ``error`` is another one.

    Args:
        subject: what was computed.
        error: as torch raised it.
        wrong: what is known to be wrong with the micro-batch's integers.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return _out_of_memory(subject, str(error))
    if not isinstance(error, torch.AcceleratorError):
        return None
    keep(error)
    asserted = "device-side assert" in str(error)
    usual = "an assertion in a kernel failed: an index outside of its range, such as a label or a token"
    return DeviceError(
        subject,
        got=(wrong or usual) if asserted else " ".join(str(error).partition("\n")[0].split()),
        expected="indices and labels within their ranges" if asserted else "a device that works",
        remedy="Correct the data or the model; the kernel's own lines name the condition. This process cannot use the "
        "device any more: CUDA_LAUNCH_BLOCKING=1 in the environment, or --devices cpu, shows the very operation."
        if asserted
        else "Start again; if it comes again, see the system's log for the device.",
    )


def _out_of_memory(subject: str, text: str) -> DeviceError:
    tried, space, allowed = _TRIED.search(text), _SPACE.search(text), _ALLOWED.search(text)
    got = f"out of memory on {f'cuda:{space[1]}' if space else 'the device'}"
    if tried:
        got += f": {tried[1]} more were asked for"
    if space:
        got += f", where {space[3]} of {space[2]} are free" + (f" and {allowed[1]} allowed" if allowed else "")
    return DeviceError(
        subject,
        got=got,
        expected="memory for weights, gradients, optimizer states, and the activations of micro-batches",
        remedy="Give more --micro-batches, which are smaller then; --recompute all, which keeps fewer activations; "
        "more --workers, of which each has fewer layers; or --zero 1 with --data-parallel. --memory-limit refuses such "
        "a plan beforehand.",
    )


@final
class RecentIntegers:
    """The integers of the latest micro-batches, on the host.

    Args:
        graph: of the model, whose outputs tell how many classes there may be.
    """

    def __init__(self, graph: Graph) -> None:
        shapes = [graph.values[name].shape for name in graph.outputs if name in graph.values]
        self._classes = max((max(shape[1], shape[-1]) for shape in shapes if len(shape) > 1), default=0)
        self._kept: deque[tuple[int, dict[str, torch.Tensor]]] = deque(maxlen=KEPT)

    def note(self, g: int, values: Mapping[str, torch.Tensor]) -> None:
        """Keep the integers of a micro-batch that is copied to a device."""
        self._kept.append((g, {n: v for n, v in values.items() if v.dtype in _INTEGERS and v.numel()}))

    def wrong(self, g: int) -> str:
        """What is wrong with the integers of a micro-batch, as far as their ranges tell; empty if it is not known."""
        values = next((values for number, values in list(self._kept) if number == g), {})  # others may append
        ranges = {name: (int(value.min()), int(value.max())) for name, value in values.items()}
        ranges_text = ", ".join(
            f"{_field(name)} has integers from {low} to {high}" for name, (low, high) in ranges.items()
        )
        if any(name.startswith(BATCH) and self._is_odd(*both) for name, both in ranges.items()):
            return f"labels outside of 0..{self._classes - 1}: {ranges_text}"
        return ranges_text and f"an index outside of its range: {ranges_text}"

    def _is_odd(self, low: int, high: int) -> bool:
        return self._classes > 0 and (high >= self._classes or (low < 0 and low != _IGNORED))


def _field(name: str) -> str:
    kind, _, rest = name.partition(".")
    return f"{'batch field' if kind + '.' == BATCH else 'input'} {rest!r}"
