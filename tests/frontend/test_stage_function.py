"""Stage functions in three backward modes, for every model of the zoo, however it is cut."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from roundelay.frontend import Captured, Mode, RngKey, capture
from roundelay.ir.graph import LOSS, WEIGHT
from roundelay.lower.partition import partition
from tests.frontend.cutting import (
    DRAW,
    MODES,
    backwards,
    buffers_of,
    captured_of,
    cut_after,
    differing,
    eager,
    even_cuts,
    forwards,
    plain_cuts,
    run,
    sample,
    weights_of,
)
from tests.zoo import ZOO

TINY = [name for name, entry in ZOO.items() if entry.name not in ("gpt2", "llama", "bert_classifier", "t5")]
WITH_BUFFERS = [name for name, entry in ZOO.items() if entry.buffers]
EVERY = pytest.mark.parametrize("name", ZOO)
BY_MODE = pytest.mark.parametrize("mode", MODES)


def snapshot(values: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of the tensors."""
    return {name: value.clone() for name, value in values.items() if isinstance(value, Tensor)}


@EVERY
def test_every_mode_and_number_of_stages_equals_the_persons_own_module_bit_for_bit(name: str) -> None:
    captured, batch = captured_of(name), sample(name, 7)
    params = weights_of(captured, 0.05)
    wanted = eager(ZOO[name], batch, params)
    assert wanted.grads
    plain = plain_cuts(captured, batch)
    for num_stages in (1, 2, 3, 4):
        for mode in MODES if num_stages != 3 else ("stash",):
            done = run(captured, even_cuts(captured, num_stages, plain), batch, params, mode=mode)
            assert torch.equal(done.loss, wanted.loss), (num_stages, mode)
            assert (done.count is None) == (wanted.count is None)
            assert done.count is None or float(done.count) == float(wanted.count)  # type: ignore[arg-type]
            assert differing(done.grads, wanted.grads) == [], (num_stages, mode)
            assert differing(done.buffers, {n: wanted.buffers[n] for n in done.buffers}) == [], (num_stages, mode)


@pytest.mark.parametrize("name", TINY)
def test_every_legal_cut_equals_the_persons_own_module_and_leaves_what_it_is_given(name: str) -> None:
    captured, batch = captured_of(name), sample(name, 7)
    params = weights_of(captured, 0.05)
    wanted, kept = eager(ZOO[name], batch, params), snapshot(params)
    assert captured.graph.cuts
    for cut in captured.graph.cuts:
        mode = MODES[cut % 3]
        buffers = buffers_of(captured)
        made = forwards(captured, cut_after(captured, [cut]), batch, params, buffers, mode=mode)
        handed = [snapshot(one.inputs | one.outputs) for one in made]
        grads, _, _ = backwards(made, params)
        assert torch.equal(made[-1].outputs[LOSS], wanted.loss), cut
        assert differing(grads, wanted.grads) == [], cut
        assert differing(buffers, {n: wanted.buffers[n] for n in buffers}) == [], cut
        for one, before in zip(made, handed, strict=True):
            assert differing(snapshot(one.inputs | one.outputs), before) == [], cut
    assert differing(params, kept) == []
    assert differing(snapshot(dict(captured.values(batch))), snapshot(dict(captured.values(sample(name, 7))))) == []


@EVERY
def test_stash_differentiates_at_the_forwards_weights_whatever_backward_is_given(name: str) -> None:
    captured, batch = captured_of(name), sample(name, 7)
    old, new = weights_of(captured, 0.05, seed=1), weights_of(captured, 0.05, seed=2)
    cut = even_cuts(captured, 3)
    wanted, got = run(captured, cut, batch, old), run(captured, cut, batch, old, later=new)
    assert differing(got.grads, wanted.grads) == []


@EVERY
def test_recompute_differentiates_everything_at_the_backwards_weights_from_the_stages_saved_inputs(name: str) -> None:
    captured, batch, differed = captured_of(name), sample(name, 7), 0
    old, new = weights_of(captured, 0.05, seed=1), weights_of(captured, 0.05, seed=2)
    done = run(captured, even_cuts(captured, 3), batch, old, later=new, mode="recompute")
    for k, one in enumerate(done.forwards):
        own = {n: new[n] for n in one.spec.parameters}
        buffers = {n: b for n, b in buffers_of(captured).items() if n in one.spec.buffers}
        _, tape = one.function.forward(own, buffers, one.inputs, DRAW, mode="stash")
        of_inputs, of_params = one.function.backward(tape, done.entering[k], {})
        assert differing(done.leaving[k], of_inputs) == []
        assert differing({n: done.grads[n] for n in own if n in done.grads}, of_params) == []
        at_old = one.function.forward(one.params, dict(buffers), one.inputs, DRAW, mode="stash")[1]
        differed += differing(one.function.backward(at_old, done.entering[k], {})[1], of_params) != []
    assert differed


@BY_MODE
def test_what_enters_a_stage_lies_as_a_network_would_deliver_it(mode: Mode) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    batch = torch.randn(4, 5), torch.ones(4, 3)
    captured = capture(model, lambda outputs, batch: (outputs - batch[1]).square().mean(), batch)
    first = captured.stage(cut_after(captured, [0]).stages[0])
    lay: list[tuple[int, bool]] = []

    def look(tensor: Tensor) -> None:
        lay.append((tensor.data_ptr() % 64, tensor.is_contiguous()))

    def call(*args: Any) -> Any:
        look(args[-2])  # the input, before the key of the random numbers
        made = segment.call(*args)
        made[0].register_hook(look)
        return made

    segment = first.segments[0]
    watched = replace(first, segments=(replace(segment, call=call),))
    params = {n: p.detach() for n, p in captured.parameters().items()}
    odd = (torch.randn(21)[1:].view(4, 5), torch.randn(5, 4).t(), torch.randn(4, 5))
    for x, grad in product(odd, odd):
        lay.clear()
        outputs, tape = watched.forward(params, {}, dict.fromkeys(first.inputs, x), DRAW, mode=mode)
        watched.backward(tape, dict.fromkeys(first.outputs, grad), params)
        assert set(lay) == {(0, True)}
        assert len(lay) == (3 if mode == "recompute" else 2)
        assert torch.equal(outputs[first.outputs[0]], model[0](x.clone(memory_format=torch.contiguous_format)))


@BY_MODE
@pytest.mark.parametrize("name", ["gpt2", "batchnorm", "views", "tied_head", "lstm"])
def test_outputs_and_gradients_leave_a_stage_contiguous_and_own_their_memory(name: str, mode: Mode) -> None:
    captured, batch = captured_of(name), sample(name, 7)
    for num_stages in (2, 4):
        done = run(captured, even_cuts(captured, num_stages), batch, weights_of(captured), mode=mode)
        for one, leaving in zip(done.forwards, done.leaving, strict=True):
            tensors = [v for v in one.outputs.values() if isinstance(v, Tensor)]
            assert all(t.is_contiguous() for t in (*tensors, *leaving.values()))
            assert not any(t.requires_grad for t in (*tensors, *leaving.values()))
        assert all(grad.is_contiguous() for grad in done.grads.values())


@pytest.mark.parametrize("name", ["gpt2", "t5", "tied_head"])
def test_a_lent_weight_is_a_copy_that_later_updates_do_not_reach(name: str) -> None:
    captured, batch = captured_of(name), sample(name)
    params = weights_of(captured)
    before = snapshot(params)
    made = forwards(captured, even_cuts(captured, 3), batch, params, buffers_of(captured))
    lent = [(n.removeprefix(WEIGHT), v) for one in made for n, v in one.outputs.items() if n.startswith(WEIGHT)]
    assert lent
    for weight in params.values():
        weight.add_(1.0)
    assert all(torch.equal(value, before[n]) for n, value in lent)


class Windows(nn.Module):
    """Sends a view of a weight across stages."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(24.0).view(4, 6))
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of x."""
        row = self.table[1]
        out: Tensor = self.last(x.tanh()) + row
        return out


def squares(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean squared error."""
    return functional.mse_loss(outputs, batch["y"])


def pairs(rows: int = 4, seed: int = 0, width: int = 6) -> dict[str, Tensor]:
    """A batch of two random tensors."""
    draws = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, width, generator=draws), "y": torch.randn(rows, width, generator=draws)}


def only_x(batch: dict[str, Tensor]) -> tuple[tuple[Tensor], dict[str, Any]]:
    """The model gets x alone."""
    return (batch["x"],), {}


def captured_from(model: nn.Module) -> Captured:
    """Any model from x to the shape of y."""
    return capture(model, squares, pairs(), only_x)


def test_a_view_of_a_weight_that_leaves_a_stage_is_a_copy() -> None:
    captured = captured_from(Windows())
    params = weights_of(captured)
    made = forwards(captured, cut_after(captured, [0]), pairs(), params, {})
    (row,) = (v for v in made[0].outputs.values())
    params["table"].zero_()
    assert torch.equal(row, torch.arange(6.0, 12.0))


@BY_MODE
@pytest.mark.parametrize("name", WITH_BUFFERS)
def test_two_forwards_then_two_backwards_change_buffers_twice_and_equal_one_after_the_other(
    name: str, mode: Mode
) -> None:
    captured, batches = captured_of(name), [sample(name, 7), sample(name, 8)]
    params, cut = weights_of(captured, 0.05), even_cuts(captured, 3)
    wanted, buffers = [], buffers_of(captured)
    for g, batch in enumerate(batches):
        done = run(captured, cut, batch, params, buffers=buffers, draw=RngKey(0, g), mode=mode)
        wanted.append(done.grads)
    together = buffers_of(captured)
    made = [
        forwards(captured, cut, batch, params, together, draw=RngKey(0, g), mode=mode)
        for g, batch in enumerate(batches)
    ]
    after = snapshot(together)
    for one, grads in zip(made, wanted, strict=True):
        assert differing(backwards(one, params)[0], grads) == []
    assert differing(together, after) == []
    assert differing(together, buffers) == []
    assert differing(together, buffers_of(captured)) == sorted(captured.mutated_buffers())


@BY_MODE
def test_a_forward_replaces_a_buffer_and_never_writes_into_it(mode: Mode) -> None:
    captured = captured_of("batchnorm")
    (spec,) = cut_after(captured, []).stages
    buffers = buffers_of(captured)
    given, before = dict(buffers), snapshot(buffers)
    function = captured.stage(spec)
    inputs = {n: v for n, v in captured.values(sample("batchnorm")).items() if n in function.inputs}
    _, tape = function.forward(weights_of(captured), buffers, inputs, DRAW, mode=mode)
    assert differing(given, before) == []
    assert {n for n in buffers if buffers[n] is not given[n]} == captured.mutated_buffers()
    assert sum("num_batches_tracked" in n and int(b) == 1 for n, b in buffers.items()) > 1
    after = snapshot(buffers)
    function.backward(tape, {LOSS: torch.tensor(1.0)}, weights_of(captured))
    assert differing(buffers, after) == []


def test_a_stage_of_several_segments_equals_one_segment() -> None:
    captured, batch = captured_of("skip"), sample("skip")
    names = [captured.graph.ops[i].name for i in captured.graph.cuts] + [captured.graph.ops[-1].name]
    cut = partition(captured.graph, [names[:3], names[3:4], names[4:]])
    params = weights_of(captured)
    for mode in MODES:
        one, many = run(captured, cut_after(captured, []), batch, params), run(captured, cut, batch, params, mode=mode)
        assert torch.equal(one.loss, many.loss)
        assert differing(one.grads, many.grads) == []


def test_a_name_shared_by_an_operation_and_a_parameter_is_no_confusion() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.first_weight = nn.Parameter(torch.randn(6))
            self.linear = nn.Parameter(torch.randn(6))

        def forward(self, x: Tensor) -> Tensor:
            return (self.first(x) * self.first_weight) + self.linear

    model = Named()
    squares(model(pairs()["x"]), pairs()).backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    captured = captured_from(model)
    assert captured.graph.ops[0].name == "linear"
    for cut in ([], [0], [0, 1]):
        done = run(captured, cut_after(captured, cut), pairs(), weights_of(captured))
        assert differing(done.grads, wanted) == []


class Squeezing(nn.Module):
    """Its last operation saves its own result for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of x."""
        out: Tensor = self.last(self.first(x).tanh()).exp()
        return out


@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("mode", ["stash", "mixed"])
def test_a_tape_that_is_dropped_without_a_backward_frees_its_memory_at_once(mode: Mode, measure: bool) -> None:
    captured = captured_from(Squeezing())
    params, cut = weights_of(captured), cut_after(captured, [0])
    gc.disable()
    try:
        made = forwards(captured, cut, pairs(), params, {}, mode=mode, measure=measure)
        held = [weakref.ref(root) for one in made for tape in one.tape.tapes for root in tape.roots.values()]
        assert len(held) == 3
        del made
        assert [ref() for ref in held] == [None, None, None]
    finally:
        gc.enable()


def test_mixed_does_not_keep_the_forwards_weights() -> None:
    captured = captured_from(Squeezing())
    new, held = weights_of(captured, 0.1), {}
    for mode in ("stash", "mixed"):
        params = weights_of(captured)
        made = forwards(captured, cut_after(captured, []), pairs(), params, {}, mode=mode)
        storages = {p.untyped_storage().data_ptr() for p in params.values()}
        leaves = [p for tape in made[0].tape.tapes for p in tape.parameters.values()]
        held[mode] = sum(p.untyped_storage().data_ptr() in storages for p in leaves)
        assert backwards(made, new)[0].keys() == params.keys()
    assert held == {"stash": 4, "mixed": 0}


def test_mixed_reads_weights_of_another_layout_by_their_indices() -> None:
    captured = captured_from(Squeezing())
    old, new = weights_of(captured), weights_of(captured, 0.1)
    turned = {n: p.t().contiguous().t() if p.ndim == 2 else p for n, p in old.items()}
    cut = cut_after(captured, [1])
    wanted = run(captured, cut, pairs(), old, later=new, mode="mixed").grads
    got = run(captured, cut, pairs(), turned, later=new, mode="mixed").grads
    assert all(torch.allclose(got[n], wanted[n], atol=1e-6) for n in wanted)
