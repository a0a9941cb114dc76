"""With torch's meta device, which every machine has; tests/standin runs losses on a device that has values."""

from __future__ import annotations

from typing import Any

import torch

from roundelay.frontend.stages.on_device import OnDevice, on_device

META, CPU = torch.device("meta"), torch.device("cpu")


def test_what_the_code_makes_is_made_there_unless_it_says_otherwise() -> None:
    with OnDevice(META):
        assert torch.arange(4).device == META
        assert torch.tensor([1.0]).device == META
        assert torch.zeros(2, device="cpu").device == CPU
        drawn = torch.rand(3, generator=torch.Generator())
        assert drawn.device == CPU  # a generator of the CPU draws there
        assert (drawn * torch.zeros(3)).device == META
    assert torch.arange(4).device == CPU


def test_a_tensor_of_the_cpu_that_meets_one_of_the_device_is_copied_once() -> None:
    """Until it is written to; and not for longer than it lives."""
    kept, there, mode = [torch.ones(3)], torch.zeros(3, device=META), OnDevice(META)

    def copy() -> torch.Tensor:
        (held,) = kept
        with mode:
            assert torch.stack([there, held, there * held]).device == META
        assert len(mode._copies) == 1
        found: torch.Tensor = mode._copies[held][1]
        return found

    first = copy()
    assert copy() is first
    kept[0].add_(1)
    assert copy() is not first
    kept.clear()
    assert not len(mode._copies)


def test_tensors_of_one_device_are_left_alone() -> None:
    held = torch.ones(3)
    with OnDevice(META):
        assert (held + held).device == CPU
        assert held.to(torch.zeros(1)).device == META  # which asks for it


def test_gradients_flow_to_what_the_code_holds() -> None:
    held = torch.ones(3, requires_grad=True)
    with OnDevice(META) as mode:
        product = held * torch.zeros(3)
    assert product.requires_grad
    assert not len(mode._copies)


def test_on_the_cpu_nothing_is_in_between() -> None:
    def call(value: Any) -> Any:
        return value

    assert on_device(CPU, call) is call
    made = on_device(META, lambda: torch.arange(3))
    assert made().device == META
    assert torch.arange(3).device == CPU
