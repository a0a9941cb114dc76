"""Models that write in place, into buffers, inputs and what they should not; cut everywhere, against eager torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundelay.errors import CaptureError
from roundelay.frontend import Captured, capture, graph_passes
from tests.frontend.cutting import MODES, captured_of, cut_after, differing, run, sample, weights_of

Forward = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    """Two layers and two buffers; what it does is given."""

    average: Tensor
    count: Tensor

    def __init__(self, does: Forward) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.plain = torch.zeros(6)
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of x."""
        return self.does(self, x)


def chain(net: Net, x: Tensor) -> Tensor:
    h = net.a(x).mul_(0.5).add_(1.0)
    h += x
    h.relu_()
    return functional.dropout(net.b(h).sigmoid_(), 0.0, True, inplace=True)


def slices(net: Net, x: Tensor) -> Tensor:
    h = torch.zeros_like(x)
    h[:, :3] = net.a(x)[:, :3]
    h[:, 3:] = 2.0
    h[0] += 1.0
    return net.b(h)


def seen_through_a_view(net: Net, x: Tensor) -> Tensor:
    h = net.a(x) * 1.0
    half = h[:, :3]
    h.mul_(2.0)
    out: Tensor = net.b(h) + half.sum()
    return out


def into_the_input(net: Net, x: Tensor) -> Tensor:
    x.mul_(0.5)
    x[:, 0] = 1.0
    return net.b(net.a(x) + x)


def into_the_input_without_gradient(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.clamp_(-0.5, 0.5)
    return net.b(net.a(x))


def activation_without_gradient(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    h = h * 1.5
    with torch.no_grad():
        h.clamp_(-0.5, 0.5)
    return net.b(h)


def average_without_gradient(net: Net, x: Tensor) -> Tensor:
    h = net.a(x).relu()
    with torch.no_grad():
        net.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return net.b(h - net.average)


def count_that_nothing_reads(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.count += 1
    return net.b(net.a(x).relu())


def buffer_through_a_view_that_stays_zero(net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    net.average.view(-1)[:3].mul_(0.9)
    return net.b(h + net.average)


def buffer_with_a_reader_that_is_dropped(net: Net, x: Tensor) -> Tensor:
    _ = net.average.sum()
    h = net.a(x).relu()
    h = net.b(h - net.average).tanh()
    net.average.add_(1.0)
    return h


def constant(net: Net, x: Tensor) -> Tensor:
    table = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    table.add_(x.mean())
    return net.b(net.a(x) + table)


NETS: dict[str, Forward] = {
    does.__name__: does
    for does in (
        chain,
        slices,
        seen_through_a_view,
        into_the_input,
        into_the_input_without_gradient,
        activation_without_gradient,
        average_without_gradient,
        count_that_nothing_reads,
        buffer_through_a_view_that_stays_zero,
        buffer_with_a_reader_that_is_dropped,
        constant,
    )
}


def squares(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.mse_loss(outputs, batch["y"])


def only_x(batch: dict[str, Tensor]) -> tuple[tuple[Tensor], dict[str, Any]]:
    return (batch["x"],), {}


def pairs(seed: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(4, 6, generator=draws), "y": torch.randn(4, 6, generator=draws)}


def captured_net(name: str) -> tuple[Captured, Net]:
    """The captured net, and a copy of it from before."""
    torch.manual_seed(0)
    net = Net(NETS[name])
    kept = copy.deepcopy(net)
    batch = pairs(0)
    captured = capture(net, squares, batch, only_x)
    assert differing(batch, pairs(0)) == []
    assert differing(net.state_dict(), kept.state_dict()) == []
    return captured, kept


@pytest.mark.parametrize("name", NETS)
def test_every_cut_and_mode_equals_eager_and_writes_into_nothing_it_was_given(name: str) -> None:
    captured, net = captured_net(name)
    params = weights_of(captured)
    batch = pairs(1)
    loss = squares(net(batch["x"]), batch)
    loss.backward()
    wanted = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    after = {n: b for n, b in net.named_buffers() if n in captured.buffers()}
    for cut in [[], *[[cut] for cut in captured.graph.cuts]]:
        for mode in MODES:
            batch = pairs(1)
            done = run(captured, cut_after(captured, cut), batch, params, mode=mode)
            assert torch.equal(done.loss, loss.detach()), (cut, mode)
            assert differing(done.grads, wanted) == [], (cut, mode)
            assert differing(done.buffers, after) == [], (cut, mode)
            assert differing(batch, pairs(1)) == [], (cut, mode)


def between(captured: Captured, first: str, last: str) -> set[int]:
    """Cuts at or after one operation and before another."""
    names = [op.name for op in captured.graph.ops]
    return set(range(names.index(first), names.index(last)))


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("slices", "zeros_like", "add_"),
        ("seen_through_a_view", "mul", "mul_"),
        ("activation_without_gradient", "mul", "clamp_"),
        ("into_the_input_without_gradient", "clone_default", "clamp_"),
        ("buffer_with_a_reader_that_is_dropped", "sub", "add_"),
        ("buffer_through_a_view_that_stays_zero", "view", "add"),
    ],
)
def test_no_cut_falls_between_a_storages_birth_and_its_last_write(name: str, first: str, last: str) -> None:
    captured, _ = captured_net(name)
    closed = between(captured, first, last)
    assert closed
    assert closed.isdisjoint(captured.graph.cuts)
    assert captured.graph.cuts


@pytest.mark.parametrize("name", ["chain", "into_the_input"])
def test_an_in_place_operation_whose_storage_nothing_else_sees_forbids_no_cut(name: str) -> None:
    captured, _ = captured_net(name)
    if name == "chain":
        assert captured.graph.cuts == tuple(range(len(captured.graph.ops) - 1))
        assert not [op.target for op in captured.graph.ops if "_." in op.target]
    assert len(captured.graph.cuts) > 1


@pytest.mark.parametrize(
    ("name", "mutated"),
    [
        ("average_without_gradient", {"average"}),
        ("count_that_nothing_reads", {"count"}),
        ("buffer_through_a_view_that_stays_zero", {"average"}),
        ("chain", set()),
    ],
)
def test_buffers_that_a_forward_changes_are_known(name: str, mutated: set[str]) -> None:
    assert captured_net(name)[0].mutated_buffers() == mutated


def into_a_weight(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.a.weight.mul_(0.5)
    return net.a(x)


def into_a_view_of_a_weight(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.a.weight[0].zero_()
    return net.a(x)


def into_two_weights(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        for weight in net.parameters():
            weight.clamp_(-0.1, 0.1)
    return net.a(x)


def into_halves_of_a_weight(net: Net, x: Tensor) -> Tensor:
    upper, lower = net.a.weight[:2], net.a.weight[2:]
    with torch.no_grad():
        lower.mul_(0.5)
    return net.a(x) + upper.sum()


def into_a_list_of_weights(net: Net, x: Tensor) -> Tensor:
    torch._foreach_mul_([net.a.weight.detach(), net.b.weight.detach()], 0.5)
    return net.a(x)


def into_a_plain_attribute(net: Net, x: Tensor) -> Tensor:
    net.plain.add_(1.0)
    return net.a(x) + net.plain


@pytest.mark.parametrize(
    ("does", "got"),
    [
        (into_a_weight, "parameter 'a.weight', which the model's forward writes into"),
        (into_a_view_of_a_weight, "parameter 'a.weight', which the model's forward writes into"),
        (into_two_weights, "parameter 'a.weight', which the model's forward writes into"),
        (into_halves_of_a_weight, "parameter 'a.weight', which the model's forward writes into"),
        (into_a_list_of_weights, "parameter 'a.weight', which the model's forward writes into"),
        (into_a_plain_attribute, "tensor 'plain', which is no buffer, which the model's forward writes into"),
    ],
)
def test_a_write_into_a_weight_or_a_plain_attribute_is_refused_and_no_weight_has_changed(
    does: Forward, got: str
) -> None:
    net = Net(does)
    kept = copy.deepcopy(net)
    with pytest.raises(CaptureError, match=got):
        capture(net, squares, pairs(0), only_x)
    assert differing(net.state_dict(), kept.state_dict()) == []


@pytest.mark.parametrize("name", ["inplace_relu", "views"])
def test_a_stage_may_be_repeated_on_the_same_inputs(name: str) -> None:
    captured, batch = captured_of(name), sample(name)
    params, cut = weights_of(captured), cut_after(captured, [])
    first, again = (run(captured, cut, batch, params) for _ in range(2))
    assert torch.equal(first.loss, again.loss)
    assert differing(first.grads, again.grads) == []


def below_autocast(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out: Tensor = net.b(net.a(x)).float()
    return out


@pytest.mark.parametrize("does", [into_the_input, below_autocast])
def test_the_weights_of_a_model_are_not_copied_to_capture_it(monkeypatch: pytest.MonkeyPatch, does: Forward) -> None:
    """A model whose weights lie in a file is larger than what a process can hold."""
    net, seen, copied = Net(does), set[int](), set[int]()
    clone = Tensor.clone

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        copied.add(tensor.data_ptr())
        return clone(tensor, *args, **kwargs)

    run_nodes = graph_passes.run_nodes

    def watched(*args: Any, **kwargs: Any) -> Any:
        values, writes = run_nodes(*args, **kwargs)
        seen.update(value.data_ptr() for value in values.values() if isinstance(value, Tensor))
        return values, writes

    monkeypatch.setattr(graph_passes, "run_nodes", watched)
    monkeypatch.setattr(Tensor, "clone", noted)
    capture(net, squares, pairs(0), only_x)
    own = {parameter.data_ptr() for parameter in net.parameters()}
    assert own <= seen
    assert copied, "nothing was watched"
    assert not own & copied


def test_a_parameter_without_elements_is_like_any_other() -> None:
    def does(net: Net, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = x.mean().mul_(2.0)
        first, _ = net.b(net.a(x) + mean + net.empty.sum()).chunk(2)
        out: Tensor = first
        return out

    net = Net(does)
    net.empty = nn.Parameter(torch.empty(0))
    assert capture(net, lambda outputs, batch: outputs.square().sum(), pairs(0), only_x).graph.ops
