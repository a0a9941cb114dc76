"""Nothing that export has written down keeps a stage on the CPU, shown on a device that computes nothing: meta."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundelay.frontend import Mode, StageFunction, capture
from roundelay.frontend.stages.retarget_device import retarget
from roundelay.ir.graph import LOSS
from tests.frontend.cutting import DRAW, buffers_of, captured_of, even_cuts, run, sample, weights_of
from tests.zoo import ZOO

META = torch.device("meta")


class OffDevice(TorchDispatchMode):
    """Notes every operation that makes a tensor elsewhere than on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(leaf.device != META for leaf in tree_leaves(made) if isinstance(leaf, Tensor)):
            self.seen.append(str(func))
        return made


def on_meta(named: dict[str, Any]) -> dict[str, Any]:
    """Copies on the meta device; what is no tensor stays."""
    return {n: v.to(META) if isinstance(v, Tensor) else v for n, v in named.items()}


def shapes(named: dict[str, Any]) -> dict[str, Any]:
    """Shape and dtype of every tensor, and all else as it is."""
    return {n: (v.shape, v.dtype) if isinstance(v, Tensor) else v for n, v in named.items()}


@pytest.mark.parametrize("mode", ["stash", "recompute"])
@pytest.mark.parametrize("name", ZOO)
def test_every_operation_of_every_stage_stays_on_the_stages_device(name: str, mode: Mode) -> None:
    captured = captured_of(name)
    cut = even_cuts(captured, 3)
    weights = weights_of(captured)
    told = run(captured, cut, sample(name), weights, mode=mode)
    values = on_meta(dict(captured.values(sample(name))))
    params, buffers = on_meta(weights), on_meta(buffers_of(captured))
    done: list[tuple[StageFunction, Any, list[str]]] = []
    with OffDevice() as elsewhere:
        for spec, cpu in zip(cut.stages, told.forwards, strict=True):
            function = captured.stage(spec, META)
            inputs = {n: values[n] for n in function.inputs}
            outputs, tape = function.forward(params, buffers, inputs, DRAW, mode=mode)
            assert shapes(outputs) == shapes(cpu.outputs)
            values |= outputs
            done.append((function, tape, list(spec.parameters)))
        grads: dict[str, Any] = {LOSS: torch.ones_like(values[LOSS])}
        of_params: dict[str, Any] = {}
        for function, tape, _ in reversed(done):
            entering = {n: grads.pop(n, None) for n in function.outputs}
            of_inputs, own = function.backward(tape, entering, params)
            grads |= of_inputs
            of_params |= own
    assert elsewhere.seen == []
    assert shapes(of_params) == shapes(told.grads)
    assert {grad.device for grad in of_params.values()} == {META}


class Baked(nn.Module):
    """Makes tensors in every way in which export writes a device down."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``."""
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
        with torch.no_grad():
            table = torch.arange(4).float() + torch.ones(4)
        ramp = torch.linspace(0.0, 1.0, 4) + torch.full((4,), 2.0)
        noise = 0.1 * torch.rand(4) + 0.1 * torch.randn(4)
        out: Tensor = self.layer((x * scale + table).to("cpu", torch.float32)) * ramp + noise
        return out


def test_a_copy_on_another_device_leaves_the_graph_on_the_cpu_as_it_was() -> None:
    batch = (torch.randn(4, 4), torch.randn(4, 4))
    captured = capture(Baked(), lambda outputs, batch: (outputs - batch[1]).square().mean(), batch)
    cut = even_cuts(captured, 1)
    weights = weights_of(captured)
    before = run(captured, cut, batch, weights)
    with OffDevice() as elsewhere:
        function = captured.stage(cut.stages[0], META)
        values = on_meta(dict(captured.values(batch)))
        outputs, tape = function.forward(on_meta(weights), {}, values, DRAW, mode="stash")
        function.backward(tape, {LOSS: torch.ones_like(outputs[LOSS])}, on_meta(weights))
    after = run(captured, cut, batch, weights)
    assert [op for op in elsewhere.seen if "aten.detach" not in op] == []
    assert outputs[LOSS].device == META
    assert torch.equal(before.loss, after.loss)
    assert after.loss.device.type == "cpu"


def test_an_operation_that_is_not_told_where_is_told() -> None:
    graph = torch.fx.Graph()
    made = graph.call_function(torch.ops.aten.zeros.default, ([2],))
    graph.output((made,))
    piece = torch.fx.GraphModule(nn.Module(), graph)
    assert retarget(piece, META)()[0].device == META
    assert retarget(piece, torch.device("cpu")) is piece


def test_autocast_is_that_of_the_devices_kind() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out: Tensor = self.layer(x)
            return out.float()

    captured = capture(Cast(), lambda outputs, batch: outputs.square().mean(), (torch.randn(4, 4), torch.randn(4)))
    piece = captured.stage(even_cuts(captured, 1).stages[0]).segments[0].call.__self__  # type: ignore[attr-defined]
    calls = [n for n in retarget(piece, torch.device("cuda", 0)).graph.nodes if n.op == "call_function"]
    starts = [node for node in calls if "autocast" in str(node.target)]
    assert [node.args[0] for node in starts] == ["cuda"]
