"""What a worker must be sent along an edge: compared before a message is taken, so that its sender can be named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch

from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.program import SCALARS, Channel
from roundelay.ir.stage import Edge
from roundelay.ir.value_layout import ValueLayout
from roundelay.transport.endpoint import Message, Value

Look = Callable[[Message], None]


@final
class DueValues(NamedTuple):
    """What looks at the messages between a worker and others, by channel.

    Args:
        sent: notes what this worker sends.
        came: raises ValueError for a message that must not come.
    """

    sent: Mapping[int, Look]
    came: Mapping[int, Look]


Layouts = Callable[[str], ValueLayout | None]
"""What is known of a value, by its name."""

_LARGEST_SCALE = 1023
"""Base-2 logarithm beyond which a double has no loss scale."""


@final
class DueForwards:
    """Checks the values that an earlier stage sends.

    Args:
        edge: names them.
        layouts: what is known of each.
    """

    def __init__(self, edge: Edge, layouts: Sequence[ValueLayout]) -> None:
        self._names, self._layouts = edge.values, layouts
        self._last: tuple[int, tuple[Any, ...]] = (-1, ())  # rows and description of what was taken last

    def check(self, message: Message) -> None:
        """Raise ValueError unless values and header can be those of a micro-batch."""
        rows, came = _rows_of(message), described(message.values)
        if (rows, came) == self._last:
            return
        _count(came, len(self._names) if rows else 0)
        if rows:
            for name, layout, value in zip(self._names, self._layouts, came, strict=True):
                if not _fits(layout, value, rows):
                    raise ValueError(f"{name}: {_text(value)}, where for {rows} rows {layout} is due")
        self._last = rows, came


@final
class DueGradients:
    """Checks the gradients of values that this worker has sent.

    Args:
        edge: names the values and the gradients.
    """

    def __init__(self, edge: Edge) -> None:
        self._names = edge.gradients
        self._at = [edge.values.index(name) for name in edge.gradients]
        self._sent: dict[int, tuple[Any, ...]] = {}  # by micro-batch, until its gradients have come

    def note(self, message: Message) -> None:
        """Note what is sent."""
        self._sent[message.header[0]] = described(message.values)

    def check(self, message: Message) -> None:
        """Raise ValueError unless there is a number, and each gradient is like its value, or there is none."""
        sent = self._sent.pop(message.header[0], None)
        if sent is None:
            raise ValueError(f"gradients of micro-batch {message.header[0]}, for which none are due")
        came = described(message.values)
        _count(came, 1 + len(self._names) if sent else 0)
        if not sent:
            return
        check_number(message)
        for name, at, value in zip(self._names, self._at, came[1:], strict=True):
            if value not in (sent[at], type(None)):
                raise ValueError(f"gradient of {name}: {_text(value)}, where {_text(sent[at])} was sent")


def due_values(
    worker: int, edges: Mapping[int, tuple[Channel, Edge]], channels: Sequence[Channel], layout: Layouts
) -> DueValues:
    """What looks at the messages between a worker and others.

    Args:
        worker: its number.
        edges: the edge of every channel that has one.
        channels: those of the worker.
        layout: what is known of a value; None where its parts lie on several workers.
    """
    sent: dict[int, Look] = {}
    came: dict[int, Look] = {channel.id: check_number for channel in channels if channel.kind in SCALARS}
    between = {n: of for n, of in edges.items() if not (of[0].filled_by(worker) and of[0].read_by(worker))}
    backward = {edge: number for number, (channel, edge) in between.items() if channel.kind == "gradient"}
    for number, (channel, edge) in between.items():
        layouts = [known for name in edge.values if (known := layout(name)) is not None]
        if channel.kind != "forward" or len(layouts) < len(edge.values):
            continue
        if channel.read_by(worker):
            came[number] = DueForwards(edge, layouts).check
        elif edge in backward:
            gradients = DueGradients(edge)
            sent[number], came[backward[edge]] = gradients.note, gradients.check
    return DueValues(sent, came)


def check_number(message: Message) -> None:
    """Raise ValueError unless a message begins with a number, or with None for 0."""
    if not message.values or not isinstance(message.values[0], int | float | None):
        raise ValueError(f"{_text(*described(message.values[:1]))}, where a number is due")


def described(values: Sequence[Value]) -> tuple[Any, ...]:
    """Dtype and shape of each tensor, and the type of what is none."""
    return tuple([(value.dtype, value.shape) if isinstance(value, torch.Tensor) else type(value) for value in values])


def _rows_of(message: Message) -> int:
    """The rows of a message's micro-batch, of whose other numbers none is out of range."""
    header = MicroBatch.of(message.header)
    if not (
        0 <= header.rows <= header.batch_rows
        and header.batch_rows > 0
        and 0 <= header.index < header.count
        and min(header.g, header.batch, header.epoch) >= 0
        and 0 <= header.replica < header.replicas
        and abs(header.scale_log2) <= _LARGEST_SCALE
    ):
        raise ValueError(f"{header}")
    return header.rows


def _fits(layout: ValueLayout, value: Any, rows: int) -> bool:
    if layout.kind == "other":
        return True
    if isinstance(value, tuple):
        return layout.due(str(value[0]).removeprefix("torch."), tuple(value[1]), rows)
    return layout.kind == "number" and value in (int, float)


def _count(came: tuple[Any, ...], due: int) -> None:
    if len(came) != due:
        raise ValueError(f"{len(came)} values, where {due} are due")


def _text(value: Any = None) -> str:
    """A value as :func:`described` describes it."""
    if isinstance(value, tuple):
        return f"a tensor of {str(value[0]).removeprefix('torch.')} {tuple(value[1])}"
    return "nothing" if value is None else f"a value of type {value.__name__}"
