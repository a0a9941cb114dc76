"""Export of recurrent layers (``nn.LSTM``, ``nn.GRU``, ``nn.RNN``) for sequences of any length.

Each of them is one ATen operation over a whole padded sequence. Export computes the shapes of its results by a loop
over the steps in Python, which fixes the length and takes seconds. So during export a custom operator stands in for the
operation, which computes these shapes directly; afterwards the operation itself is put back. What a stage runs and
differentiates is torch's own kernel.

Packed sequences are refused: their lengths are values of a tensor, which cannot be sizes in a graph.
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
from roundelay.frontend.stages.keyed_rng import keyed_call

aten = torch.ops.aten

OPERATORS = {
    "lstm": aten.lstm.input,
    "gru": aten.gru.input,
    "rnn_tanh": aten.rnn_tanh.input,
    "rnn_relu": aten.rnn_relu.input,
}
"""Name of torch's function (and of its stand-in) to its operation over padded sequences."""

ARGUMENTS = 9
"""Number of arguments of each; a stand-in has one more: the dtype to which autocast casts the operation, or None."""


def _results(operator: Any, *args: Any) -> tuple[torch.Tensor, ...]:
    """Empty tensors with the layout of the operation's results: steps and last states.

    Steps are (length, rows, directions x width), in this order in memory also if ``batch_first``; states are
    (layers x directions, rows, width), like the initial ones. With a projection an LSTM's two states differ in width.
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
    """Whether the last state under autocast is a sum with the previous one, and so has the wider dtype.

    True for a GRU, and for an LSTM's cell with a projection; without one oneDNN computes the layer in the lower dtype.
    """
    return operator is aten.gru.input or (len(states) == 2 and states[0].size(2) != states[1].size(2))


def _define(name: str, operator: Any) -> None:
    """Register a stand-in: the operation's signature, with the dtype as one more argument."""
    arguments, results = str(operator._schema).split("(", 1)[1].split(") -> ")
    torch.library.define(f"roundelay::{name}", f"({arguments}, ScalarType? lowered) -> {results}")
    torch.library.impl(f"roundelay::{name}", "CompositeExplicitAutograd", lambda *args: operator(*args[:ARGUMENTS]))
    torch.library.register_fake(f"roundelay::{name}", partial(_results, operator))


for _name, _operator in OPERATORS.items():
    _define(_name, _operator)


@final
class StandingIn(TorchFunctionMode):
    """Calls stand-ins in place of recurrent operations over padded sequences.

    Args:
        between: called before each torch function.
    """

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._between = between

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the stand-in for ``func`` if there is one, else ``func``."""
        self._between()
        name = getattr(func, "__name__", "")
        if func is torch._pack_padded_sequence:
            raise CaptureError(
                "pack_padded_sequence in the model's forward",
                got="lengths that are values of a tensor",
                expected="padded sequences, whose length is the size of a tensor; it may differ from batch to batch",
                remedy="Give the recurrent layer the padded sequence, and mask the padding out of the loss.",
            )
        if name in OPERATORS and func is getattr(torch, name) and _padded(args):
            return getattr(torch.ops.roundelay, name)(*args, _lowered(args[0]))
        return func(*args, **(kwargs or {}))


def _padded(args: tuple[Any, ...]) -> bool:
    """Whether these are arguments for a padded sequence; a packed one has the sizes of its steps in addition."""
    return len(args) == ARGUMENTS and isinstance(args[3], bool)


def _lowered(x: torch.Tensor) -> torch.dtype | None:
    """The dtype to which the model's own autocast, if active, casts ``x``; None if it does not."""
    if x.dtype is torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return None
    return torch.get_autocast_dtype(x.device.type)


_CUDNN = {aten.rnn_relu.input: (0, 1), aten.rnn_tanh.input: (1, 1), aten.lstm.input: (2, 4), aten.gru.input: (3, 3)}
"""cuDNN's number for each operation, and its gates, whose weights lie in one tensor."""


def weights_of(node: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
    """The weights of a recurrent operation in a graph, in their order; none if it is another operation."""
    operator, arguments = _called(node)
    return tuple(arguments[2]) if operator in _CUDNN else ()


def _called(node: torch.fx.Node) -> tuple[Any, Sequence[Any]]:
    """An operation and its arguments, also if it draws random numbers and is keyed."""
    return (node.args[0], node.args[1:]) if node.target is keyed_call else (node.target, node.args)


def flatten(node: torch.fx.Node, weights: Sequence[torch.Tensor]) -> None:
    """Move the weights of a recurrent operation on a GPU into one memory, which cuDNN else copies them to at each call.

    As `torch.nn.RNNBase.flatten_parameters` does for a module.

    Args:
        node: the operation.
        weights: all of its weights, by :func:`weights_of`; their memory is replaced.
    """
    operator, arguments = _called(node)
    mode, gates = _CUDNN[operator]
    _, _, _, has_biases, layers, _, _, bidirectional, batch_first = arguments[:ARGUMENTS]
    entering, repeating = weights[0], weights[1]
    alike = len({(weight.dtype, weight.device) for weight in weights}) == 1
    if not alike or len({weight.data_ptr() for weight in weights}) < len(weights):
        return
    if not torch.backends.cudnn.is_acceptable(entering):
        return
    width = entering.shape[0] // gates
    projected = repeating.shape[1] if repeating.shape[1] != width else 0
    each = (4 if has_biases else 2) + bool(projected)
    with torch.no_grad(), torch.cuda.device_of(entering):
        torch._cudnn_rnn_flatten_weight(
            list(weights), each, entering.shape[1], mode, width, projected, layers, batch_first, bidirectional
        )


def _lstm_flops(x: Sequence[int], entering: Sequence[int], repeating: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of one layer's forward in one direction, from shapes: every step multiplies by both matrices."""
    return 2 * x[0] * x[1] * (math.prod(entering) + math.prod(repeating))


FLOPS: dict[Any, Callable[..., int]] = {aten.mkldnn_rnn_layer: _lstm_flops}
"""The LSTM kernel, which torch's FLOP counter lacks; the other operations consist of products that it counts."""

REPLACEMENTS = {
    getattr(torch.ops.roundelay, name).default: (operator, ARGUMENTS) for name, operator in OPERATORS.items()
}
"""Stand-in to the operation, and to how many of its arguments the operation takes."""
