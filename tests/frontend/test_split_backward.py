"""Backwards in two halves: the bits of the whole one, and nothing computed before it is due."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundelay.frontend import Captured, capture
from roundelay.frontend.stages.stage_function import StageFunction
from roundelay.ir.graph import LOSS
from roundelay.lower.partition import partition
from tests.frontend.cutting import (
    DRAW,
    MODES,
    buffers_of,
    captured_of,
    cut_after,
    differing,
    even_cuts,
    run,
    sample,
    weights_of,
)
from tests.zoo import ZOO

WITHOUT = ("gru", "lstm")
"""Models of the zoo whose recurrent kernels make both halves at once."""


@pytest.mark.parametrize("name", ZOO)
def test_two_halves_have_the_bits_of_the_whole_backward_for_every_model(name: str) -> None:
    captured, batch = captured_of(name), sample(name, 7)
    params = weights_of(captured, 0.05)
    for num_stages, mode in ((1, "stash"), (2, "stash"), (3, "recompute"), (3, "mixed")):
        cut = even_cuts(captured, num_stages)
        whole = run(captured, cut, batch, params, mode=mode)
        halved = run(captured, cut, batch, params, mode=mode, halved=True)
        assert torch.equal(halved.loss, whole.loss)
        assert differing(halved.grads, whole.grads) == [], (num_stages, mode)
        assert differing(halved.buffers, whole.buffers) == [], (num_stages, mode)
        for ours, theirs in zip(halved.leaving, whole.leaving, strict=True):
            assert differing(ours, theirs) == [], (num_stages, mode)


@pytest.mark.parametrize("mode", ["recompute", "mixed"])
@pytest.mark.parametrize("name", ["mlp", "batchnorm", "tied_head", "gpt2"])
def test_two_halves_of_a_backward_at_other_weights_too(name: str, mode: str) -> None:
    captured, batch = captured_of(name), sample(name, 7)
    params, later = weights_of(captured, 0.05), weights_of(captured, 0.1, seed=5)
    cut = even_cuts(captured, 2)
    whole = run(captured, cut, batch, params, later=later, mode=mode)
    halved = run(captured, cut, batch, params, later=later, mode=mode, halved=True)
    assert differing(halved.grads, whole.grads) == []


@pytest.mark.parametrize("name", [name for name in ZOO if name not in WITHOUT])
def test_most_weights_of_a_model_wait_for_the_second_half(name: str) -> None:
    captured = captured_of(name)
    graph = captured.graph
    (function,) = (captured.stage(spec, halved=True) for spec in cut_after(captured, []).stages)
    late = late_of(function)
    sizes = {n: p.num_bytes for n, p in graph.parameters.items() if p.trainable}
    assert sum(sizes[n] for n in late) > 0.5 * sum(sizes.values()), sorted(set(sizes) - late)


def late_of(function: StageFunction) -> frozenset[str]:
    """Parameters whose gradients come in the second half."""
    return frozenset(n for segment in function.segments if segment.halves for n in segment.halves.late)


class Of(nn.Module):
    """A module made of one function and some parameters, a to z, behind a trained shift of its input."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(()))
        self.function = function
        self.names = [chr(ord("a") + i) for i in range(len(shapes))]
        for name, shape in zip(self.names, shapes, strict=True):
            setattr(self, name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x + self.first, *(getattr(self, name) for name in self.names))


def one(
    function: Callable[..., Tensor], x: Tensor, *shapes: tuple[int, ...], precision: str = "fp32"
) -> tuple[Captured, StageFunction]:
    """The only stage of such a module, halved."""
    captured = capture(Of(function, *shapes), lambda outputs, batch: (outputs * outputs).sum(), {"x": x})
    captured = captured.lowering(precision)
    spec = partition(captured.graph, [(captured.graph.ops[-1].name,)]).stages[0]
    return captured, captured.stage(spec, halved=True)


def linear_of_turned(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A tensor that is not contiguous, and a bias."""
    return functional.linear(x.transpose(1, 2), a, b)


SPLIT: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[tuple[int, ...], ...]]] = {
    "rows": (functional.linear, (4, 5), ((3, 5), (3,))),
    "rows without a bias": (functional.linear, (4, 5), ((3, 5),)),
    "a column": (functional.linear, (4, 1), ((3, 1), (3,))),
    "to a column": (functional.linear, (4, 5), ((1, 5), (1,))),
    "three dimensions": (functional.linear, (4, 6, 5), ((3, 5), (3,))),
    "four dimensions, no bias": (functional.linear, (4, 2, 6, 5), ((3, 5),)),
    "not contiguous": (linear_of_turned, (4, 5, 6), ((3, 5), (3,))),
    "not contiguous, no bias": (lambda x, a: functional.linear(x.transpose(1, 2), a), (4, 5, 6), ((3, 5),)),
    "matmul": (torch.matmul, (4, 6, 5), ((5, 3),)),
    "matmul with a transposed weight": (lambda x, a: x @ a.t(), (4, 6, 5), ((3, 5),)),
    "mm": (torch.mm, (4, 5), ((5, 3),)),
    "addmm": (lambda x, a, b: torch.addmm(b, x, a), (4, 5), ((5, 3), (3,))),
    "conv1d": (functional.conv1d, (4, 3, 9), ((6, 3, 3), (6,))),
    "conv2d, strided and padded": (
        lambda x, a, b: functional.conv2d(x, a, b, 2, 1),
        (4, 3, 8, 8),
        ((6, 3, 3, 3), (6,)),
    ),
    "conv2d, grouped": (lambda x, a: functional.conv2d(x, a, None, groups=3), (4, 3, 8, 8), ((6, 1, 3, 3),)),
    "conv3d": (functional.conv3d, (4, 2, 5, 5, 5), ((3, 2, 3, 3, 3),)),
    "transposed 1": (lambda x, a: functional.conv_transpose1d(x, a, stride=2), (4, 3, 9), ((3, 6, 3),)),
    "transposed 2": (functional.conv_transpose2d, (4, 3, 5, 5), ((3, 6, 3, 3), (6,))),
    "read twice": (lambda x, a: functional.linear(torch.tanh(functional.linear(x, a)), a), (4, 5), ((5, 5),)),
    "read twice through one view": (lambda x, a: (lambda t: torch.tanh(x @ t) @ t)(a.t()), (4, 5), ((5, 5),)),
    "a weight of two parameters": (lambda x, a, b: functional.linear(x, a * b.exp()), (4, 5), ((3, 5), (3, 1))),
    "chain": (lambda x, a, b: torch.tanh(x @ a) @ b, (4, 5), ((5, 3), (3, 2))),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SPLIT)
def test_every_operator_that_is_split_has_the_bits_of_autograd(name: str, mode: str) -> None:
    torch.manual_seed(1)
    function, shape, shapes = SPLIT[name]
    x = torch.randn(shape)
    captured, stage = one(function, x, *shapes)
    assert late_of(stage) == frozenset(chr(ord("a") + i) for i in range(len(shapes)))
    whole = run(captured, cut_after(captured, []), {"x": x}, weights_of(captured), mode=mode)
    halved = run(captured, cut_after(captured, []), {"x": x}, weights_of(captured), mode=mode, halved=True)
    assert len(whole.grads) == 1 + len(shapes)
    assert torch.equal(halved.loss, whole.loss)
    assert differing(halved.grads, whole.grads) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", SPLIT)
def test_it_has_them_under_autocast_too(name: str, precision: str, mode: str) -> None:
    torch.manual_seed(1)
    function, shape, shapes = SPLIT[name]
    x = torch.randn(shape)
    captured, stage = one(function, x, *shapes, precision=precision)
    assert late_of(stage) == frozenset(chr(ord("a") + i) for i in range(len(shapes)))
    cut, params = cut_after(captured, []), weights_of(captured)
    whole = run(captured, cut, {"x": x}, params, mode=mode)
    halved = run(captured, cut, {"x": x}, params, mode=mode, halved=True)
    assert {grad.dtype for grad in halved.grads.values()} == {torch.float32}
    assert torch.equal(halved.loss, whole.loss)
    assert differing(halved.grads, whole.grads) == []


@pytest.mark.parametrize("mode", ["recompute", "mixed"])
@pytest.mark.parametrize("name", ["mlp", "batchnorm", "gpt2"])
def test_two_halves_under_autocast_at_other_weights(name: str, mode: str) -> None:
    captured, batch = captured_of(name).lowering("bf16"), sample(name, 7)
    params, later = weights_of(captured, 0.05), weights_of(captured, 0.1, seed=5)
    cut = even_cuts(captured, 2)
    whole = run(captured, cut, batch, params, later=later, mode=mode)
    halved = run(captured, cut, batch, params, later=later, mode=mode, halved=True)
    assert differing(halved.grads, whole.grads) == []


def convolution(x: Tensor, a: Tensor) -> Tensor:
    """The operator that autocast casts on some devices only."""
    return torch.convolution(x, a, None, [1], [0], [1], False, [0], 1)


def test_what_autocast_does_not_cast_everywhere_is_whole_under_it() -> None:
    x = torch.randn(4, 3, 9)
    for precision, late in (("fp32", {"a"}), ("bf16", set[str]())):
        captured, stage = one(convolution, x, (6, 3, 3), precision=precision)
        assert late_of(stage) == late
        cut, params = cut_after(captured, []), weights_of(captured)
        whole = run(captured, cut, {"x": x}, params)
        assert differing(run(captured, cut, {"x": x}, params, halved=True).grads, whole.grads) == []


EARLY: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    "a normalisation": (lambda x, a, b: functional.layer_norm(x, (5,), a, b), ((5,), (5,))),
    "a sum": (torch.add, ((5,),)),
    "one operation that is split, one that is not": (lambda x, a: x @ a + a.sum(), ((5, 5),)),
    "three readers": (lambda x, a: torch.tanh(torch.tanh(x @ a) @ a) @ a, ((5, 5),)),
    "a weight that is no parameter's": (lambda x, a: (x + a) @ (x * a).t(), ((5,),)),
    "a bias that is no parameter's": (lambda x, a: functional.linear(x, a, x.sum(0)[:3]), ((3, 5),)),
    "a parameter in the place of the tensor": (lambda x, a: torch.mm(a, x), ((3, 4),)),
    "a vector": (torch.matmul, ((5,),)),
}


@pytest.mark.parametrize("name", EARLY)
def test_what_cannot_be_split_to_the_bit_is_computed_in_the_first_half(name: str) -> None:
    torch.manual_seed(1)
    function, shapes = EARLY[name]
    x = torch.randn(4, 5)
    captured, stage = one(function, x, *shapes)
    assert late_of(stage) == frozenset()
    whole = run(captured, cut_after(captured, []), {"x": x}, weights_of(captured))
    halved = run(captured, cut_after(captured, []), {"x": x}, weights_of(captured), halved=True)
    assert differing(halved.grads, whole.grads) == []


def test_a_bias_beside_a_parameter_that_cannot_wait_does_not_wait_either() -> None:
    x = torch.randn(4, 5)
    _, stage = one(lambda x, a, b, c: functional.linear(x * a.sum(), a, b) @ c, x, (3, 5), (3,), (3, 2))
    assert late_of(stage) == {"c"}


def test_embeddings_wait_whole() -> None:
    captured = captured_of("gpt2")
    spec = even_cuts(captured, 4).stages[0]
    assert {n for n in spec.parameters if "wpe" in n} <= late_of(captured.stage(spec, halved=True))


def test_the_first_half_makes_no_late_gradient_and_the_second_makes_nothing_else() -> None:
    captured, batch = captured_of("batchnorm"), sample("batchnorm")
    params = weights_of(captured)
    (spec,) = cut_after(captured, []).stages
    whole, halved = captured.stage(spec), captured.stage(spec, halved=True)
    assert (whole.halved, halved.halved) == (False, True)
    inputs = dict(captured.values(batch))
    made, tape = halved.forward(params, buffers_of(captured), {n: inputs[n] for n in halved.inputs}, DRAW, mode="stash")
    _, first = halved.backward(tape, {LOSS: torch.ones_like(made[LOSS])}, params)
    second = halved.backward_weights(tape.debt)
    late = late_of(halved)
    assert late
    assert second.keys() == late
    assert first.keys() == {n for n, p in captured.graph.parameters.items() if p.trainable} - late


@pytest.mark.parametrize("name", ["mlp", "batchnorm", "gpt2"])
def test_a_tape_for_two_halves_holds_what_a_whole_one_holds(name: str) -> None:
    captured, batch = captured_of(name), sample(name)
    tapes = [
        [
            one.tape.num_bytes
            for one in run(captured, even_cuts(captured, 2), batch, weights_of(captured), **how).forwards
        ]
        for how in ({"measure": True}, {"measure": True, "halved": True})
    ]
    assert tapes[0] == tapes[1]


def test_frozen_weights_owe_nothing() -> None:
    captured = captured_of("frozen")
    trainable = {n for n, p in captured.graph.parameters.items() if p.trainable}
    assert all(late_of(captured.stage(spec, halved=True)) <= trainable for spec in even_cuts(captured, 3).stages)
