"""Measured stages: the bytes on the tape are those that autograd really holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from roundelay.frontend import Mode
from roundelay.planning.stage_profiler import profile
from tests.frontend.cutting import (
    DRAW,
    MODES,
    buffers_of,
    captured_of,
    differing,
    even_cuts,
    forwards,
    run,
    sample,
    weights_of,
)

NAMES = ["mlp", "gpt2", "batchnorm", "views", "tied_head", "lstm", "frozen"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mlp", "batchnorm", "tied_head"])
def test_the_profiles_bytes_are_those_of_a_measured_forward(name: str, mode: Mode) -> None:
    captured, batch = captured_of(name), sample(name)
    cut = even_cuts(captured, 3)
    kept = {n: t.clone() for n, t in captured.model.state_dict().items()}
    profiles = profile(captured, cut, batch, mode, repeats=1)
    made = forwards(captured, cut, batch, weights_of(captured), buffers_of(captured), mode=mode, measure=True)
    assert [one.tape_bytes for one in profiles] == [one.tape.num_bytes for one in made]
    assert all(one.forward_s > 0 and one.backward_s > 0 and one.update_s >= 0 for one in profiles)
    assert differing(dict(captured.model.state_dict()), kept) == []
    assert all(parameter.grad is None for parameter in captured.model.parameters())


def counted(name: str, k: int, mode: Mode) -> tuple[int, int]:
    """Bytes of stage k as measured, and as torch's own hooks around the same forward count them."""
    captured = captured_of(name)
    cut = even_cuts(captured, 3)
    one = forwards(captured, cut, sample(name), weights_of(captured), buffers_of(captured), mode=mode, measure=True)[k]
    owned = {p.untyped_storage().data_ptr() for p in one.params.values()}
    saved: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor.detach()

    own = {n: buffers_of(captured)[n] for n in one.spec.buffers}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, tape = one.function.forward(one.params, own, one.inputs, DRAW, mode="stash")
    ends = [t for part in tape.tapes for t in (*part.roots.values(), *part.inputs.values())]
    saved |= {t.untyped_storage().data_ptr(): t.untyped_storage() for t in ends}
    return one.tape.num_bytes, sum(s.nbytes() for address, s in saved.items() if address not in owned)


@pytest.mark.parametrize("mode", ["stash", "mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_bytes_equal_what_saved_tensor_hooks_count_and_hold_no_parameter(name: str, mode: Mode) -> None:
    for k in range(3):
        measured, wanted = counted(name, k, mode)
        assert measured == wanted > 0


def test_recompute_holds_the_stages_inputs_and_the_buffers_that_change() -> None:
    captured = captured_of("batchnorm")
    made = forwards(
        captured, even_cuts(captured, 3), sample("batchnorm"), weights_of(captured), buffers_of(captured),
        mode="recompute", measure=True,
    )  # fmt: skip
    for one in made:
        inputs = sum(v.numel() * v.element_size() for v in one.inputs.values() if isinstance(v, Tensor))
        changed = sum(captured.graph.buffers[n] for n in one.spec.buffers if n in captured.mutated_buffers())
        assert one.tape.num_bytes == inputs + changed
        assert one.tape.tapes == []


def test_an_unmeasured_forward_says_so_and_measuring_changes_no_bit() -> None:
    captured, batch = captured_of("mlp"), sample("mlp")
    params, cut = weights_of(captured), even_cuts(captured, 2)
    plain, measured = (run(captured, cut, batch, params, measure=measure) for measure in (False, True))
    assert [one.tape.num_bytes for one in plain.forwards] == [-1, -1]
    assert torch.equal(plain.loss, measured.loss)
    assert differing(plain.grads, measured.grads) == []
