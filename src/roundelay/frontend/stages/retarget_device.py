"""Copy a part of the exported graph to another device than the one on which it was captured.

Export writes the device of its sample into every operation that creates a tensor (``arange``, ``zeros``, ``full``) or
names a device (``to``), lifts constants on that device, and enters autocast for that device type. A model is captured
on the CPU; for a stage on another device all of these are rewritten here. The graph on the CPU is not changed.

Where the sample's strides allowed it, export has written ``reshape`` as ``view`` and left out ``contiguous``. Kernels
of another device may give a result other strides, so there every ``view`` is a ``reshape``: a view where it can be one,
and else the copy that the person's program makes there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx
from torch.fx.node import map_aggregate

from roundelay.frontend.stages.keyed_rng import keyed_call

CPU = torch.device("cpu")

_RESHAPED = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten.view_as.default: torch.ops.aten.reshape_as.default,
}


def retarget(piece: torch.fx.GraphModule, device: torch.device) -> torch.fx.GraphModule:
    """Return a copy of ``piece`` that computes on ``device``, its constants included; for the CPU ``piece`` itself."""
    if device == CPU:
        return piece
    graph, owner = torch.fx.Graph(), torch.nn.Module()
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in piece.graph.nodes:
        if node.op == "get_attr":
            setattr(owner, str(node.target), _moved(getattr(piece, str(node.target)), device))
        env[node] = graph.node_copy(node, lambda n: env[n])
        if node.op == "call_function":
            _rewrite(env[node], device)
    return torch.fx.GraphModule(owner, graph)


def _moved(value: Any, device: torch.device) -> Any:
    """Move a constant, or the graph that a higher-order operation runs."""
    if isinstance(value, torch.fx.GraphModule):
        return retarget(value, device)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _rewrite(node: torch.fx.Node, device: torch.device) -> None:
    """Replace every device that the operation names, and name one where it would use the default device."""

    def retargeted(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    operator: Any = node.target
    node.target = _RESHAPED.get(operator, operator)
    node.args, node.kwargs = map_aggregate(node.args, retargeted), map_aggregate(node.kwargs, retargeted)
    if operator is torch.ops.higher_order.wrap_with_autocast and torch.amp.is_autocast_available(device.type):
        node.args = (device.type, *node.args[1:])
    if operator is keyed_call:
        operator = node.args[0]
        node.kwargs = {**node.kwargs, "on": device}
    if _uses_default_device(operator, node):
        node.kwargs = {**node.kwargs, "device": device}


def _uses_default_device(operator: Any, node: torch.fx.Node) -> bool:
    """Whether an operation creates a tensor on the default device: it reads no tensor and names no device."""
    if not isinstance(operator, torch._ops.OpOverload) or node.kwargs.get("device") is not None:
        return False
    arguments = operator._schema.arguments
    takes = any(argument.name == "device" and argument.kwarg_only for argument in arguments)
    return takes and not any("Tensor" in str(argument.type) for argument in arguments)
