"""Recurrent layers of any length: ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` while a model is exported.

Each of them is one ATen operation over a whole padded sequence, and stays one in the exported graph. But export finds
the shapes of its results by walking through the steps in Python: that fixes the length, and takes seconds. So while a
model is exported, an operator of our own stands in for it, which says the layout of its results without a walk; then
the operation itself is put back. What a stage runs and differentiates is torch's own kernel.

Packed sequences are refused: their lengths are values, which a graph of any size cannot hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
import torch.fx
from torch.overrides import TorchFunctionMode

from roundelay.errors import CaptureError

aten = torch.ops.aten

OPERATORS = {
    "lstm": aten.lstm.input,
    "gru": aten.gru.input,
    "rnn_tanh": aten.rnn_tanh.input,
    "rnn_relu": aten.rnn_relu.input,
}
"""Name of torch's function, and of its stand-in, to the operation over padded sequences."""

ARGUMENTS = 9
"""Of each of them; a stand-in has one more: the dtype to which autocast lowers the operation, or None."""


def _results(operator: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    """Empty tensors as the operation makes them: steps and last states.

    Steps are (length, rows, directions x width), in this order in memory also where rows come first; states are
    (layers x directions, rows, width), as those of the start. With a projection an LSTM's two states differ in width.
    """
    x, start, *_, bidirectional, batch_first, lowered = args
    states: Sequence[torch.Tensor] = start if operator is aten.lstm.input else (start,)
    kinds = [state.dtype if lowered is None else lowered for state in states]
    if lowered is not None and _promotes(operator, states):
        kinds[-1] = torch.promote_types(lowered, states[-1].dtype)
    rows, length = (x.size(0), x.size(1)) if batch_first else (x.size(1), x.size(0))
    width = states[0].size(2) * (2 if bidirectional else 1)
    steps = x.new_empty((length, rows, width), dtype=kinds[0])
    last = (state.new_empty(state.size(), dtype=kind) for state, kind in zip(states, kinds, strict=True))
    return (steps.transpose(0, 1) if batch_first else steps, *last)


def _promotes(operator: Any, states: Sequence[torch.Tensor]) -> bool:
    """Whether the last state under autocast is a sum with what it was before, so that the wider dtype wins.

    A GRU's is, and an LSTM's cell with a projection; without one oneDNN computes the whole layer in the lower dtype.
    """
    return operator is aten.gru.input or (len(states) == 2 and states[0].size(2) != states[1].size(2))


def _called(operator: Any, *args: Any) -> Any:
    """What a stand-in computes if it is called on real tensors."""
    return operator(*args[:ARGUMENTS])


def _define(name: str, operator: Any) -> None:
    """Make a stand-in: the operation's own signature, and the dtype."""
    given, made = str(operator._schema).split("(", 1)[1].split(") -> ")
    torch.library.define(f"roundelay::{name}", f"({given}, ScalarType? lowered) -> {made}")
    torch.library.impl(f"roundelay::{name}", "CompositeExplicitAutograd", partial(_called, operator))
    torch.library.register_fake(f"roundelay::{name}", partial(_results, operator))


for _name, _operator in OPERATORS.items():
    _define(_name, _operator)


@final
class StandingIn(TorchFunctionMode):
    """While it lasts, stand-ins are called in the place of recurrent operations over padded sequences.

    Args:
        between: called before each of torch's operations.
    """

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._between = between

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call one of them, or what was called."""
        self._between()
        name = getattr(func, "__name__", "")
        if func is torch._pack_padded_sequence:
            raise _refused()
        if name in OPERATORS and func is getattr(torch, name) and _padded(args):
            return getattr(torch.ops.roundelay, name)(*args, _lowered(args[0]))
        return func(*args, **(kwargs or {}))


def _refused() -> CaptureError:
    return CaptureError(
        "pack_padded_sequence in the model's forward",
        got="lengths that are values of a tensor",
        expected="padded sequences, whose length is the size of a tensor; it may differ from batch to batch",
        remedy="Give the recurrent layer the padded sequence, and leave the padding out of the loss by a mask.",
    )


def _padded(args: tuple[Any, ...]) -> bool:
    """Whether a sequence is called for as one tensor: a packed one comes with the sizes of its steps."""
    return len(args) == ARGUMENTS and isinstance(args[3], bool)


def _lowered(x: torch.Tensor) -> torch.dtype | None:
    """To which dtype autocast, if the model's own is active, casts a tensor of this kind."""
    if x.dtype is torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


def _lstm_flops(x: Sequence[int], entering: Sequence[int], repeating: Sequence[int], *_: Any, **__: Any) -> int:
    """Of one layer's forward in one direction, from shapes: every step multiplies by both of its matrices."""
    return 2 * x[0] * x[1] * (math.prod(entering) + math.prod(repeating))


FLOPS: dict[Any, Callable[..., int]] = {aten.mkldnn_rnn_layer: _lstm_flops}
"""The kernel of LSTMs that torch's own counter does not know; the other operations are products that it does."""


def put_back(module: torch.fx.GraphModule) -> None:
    """Replace the stand-ins of a graph, and of the graphs that its operations run, by what they stand for."""
    originals = {getattr(torch.ops.roundelay, name).default: operator for name, operator in OPERATORS.items()}
    for inner in module.modules():
        if isinstance(inner, torch.fx.GraphModule):
            for node in inner.graph.nodes:
                if node.target in originals:
                    node.target, node.args = originals[node.target], node.args[:ARGUMENTS]
            inner.recompile()
