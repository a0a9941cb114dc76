from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import roundelay
from roundelay.errors import NondeterministicError
from roundelay.planning.torch_scope import user_code
from roundelay.proof import run_vs_reference
from roundelay.runtime.processes.determinism import deterministic, nondeterministic
from tests.api.jobs import make, mlp

NAME = "scatter_by_chance_kernel"


def flags() -> tuple[Any, ...]:
    backends = torch.backends.cuda
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark,
        (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.cudnn_sdp_enabled()),
    )


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_asked_of_torch_within_it_and_not_after(strict: bool) -> None:
    """Where torch only warns, its fused attentions are not exact, and are left out."""
    before = flags()
    with deterministic(strict=strict):
        assert flags() == (True, not strict, False, False, (strict,) * 3)
    assert flags() == before
    with deterministic(False):
        assert flags() == before


def by_chance(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    """A loss that raises as an operation without a deterministic form does."""
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        raise RuntimeError(f"{NAME} does not have a deterministic implementation, but you set 'torch.use_determin...")
    return nn.functional.cross_entropy(outputs, batch[1])


def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison takes the plan's devices for others than the CPU."""
    monkeypatch.setattr(run_vs_reference, "uses_device", lambda devices: True)


def test_a_run_with_an_operation_without_such_a_form_is_compared_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch)
    result = roundelay.verify(make(mlp(), loss=by_chance), workers=2, rule="1f1b", steps=2)
    assert NAME in result.nondeterministic
    assert result.equal
    assert result.exit_code == 0
    assert result.fidelity is not None
    assert NAME in str(result.fidelity)


def test_with_other_processes_nothing_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known to have no such form is computed as it comes; else it is an error."""
    on_a_device(monkeypatch)
    plan = roundelay.plan(make(mlp()), workers=2, rule="1f1b")
    calls: list[bool] = []

    def call() -> None:
        calls.append(torch.is_deterministic_algorithms_warn_only_enabled())
        by_chance(torch.zeros(1, 3), (None, torch.zeros(1, dtype=torch.long)))

    assert run_vs_reference._exactly(call, plan, None, NAME) == (None, NAME)
    with pytest.raises(NondeterministicError), user_code("a call"):
        run_vs_reference._exactly(call, plan, None)
    assert calls == [True, False]


def test_then_a_difference_names_the_operation_and_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_device(monkeypatch)
    result = roundelay.verify(make(mlp(), loss=by_chance), workers=2, rule="pipedream", steps=4, tamper="stash")
    assert result.difference
    assert NAME in result.nondeterministic
    assert result.exit_code == run_vs_reference.UNPROVED


def test_so_does_a_difference_from_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    result = roundelay.verify(make(mlp()), workers=2, rule="1f1b", steps=2)
    differs = run_vs_reference.Fidelity(equal=False, difference="the loss in update 1", nondeterministic=NAME)
    told = dataclasses.replace(result, equal=False, fidelity=differs)
    assert told.exit_code == run_vs_reference.UNPROVED
    assert str(differs).startswith(f"captured = plain PyTorch: cannot be compared: {NAME}")
    both = dataclasses.replace(told, difference="stage 1: update 0 differs")
    assert both.exit_code == run_vs_reference.DIFFERENT


def test_a_plan_that_asks_for_such_forms_ends_with_the_operation_s_name() -> None:
    job = make(mlp(), loss=by_chance)
    with pytest.raises(NondeterministicError, match=NAME):
        roundelay.train(job, workers=2, rule="1f1b", steps=2, deterministic=True, check="off")
    roundelay.train(job, workers=2, rule="1f1b", steps=2, check="off")


def test_matrix_products_whose_workspace_came_too_late_are_told_apart() -> None:
    text = "Deterministic behavior was enabled ..., but this operation is not deterministic because it uses CuBLAS and"
    told = nondeterministic("stage 1", RuntimeError(text))
    assert told is not None
    assert "CUBLAS_WORKSPACE_CONFIG=:4096:8" in told.expected
    assert nondeterministic("stage 1", RuntimeError("another")) is None


def test_what_was_not_compared_is_not_proved() -> None:
    result = roundelay.verify(make(mlp()), workers=2, rule="1f1b", steps=2)
    assert result.exit_code == 0
    unchecked = dataclasses.replace(result, fidelity=run_vs_reference.Fidelity(unchecked="there is no room"))
    assert unchecked.exit_code == run_vs_reference.UNPROVED
    assert dataclasses.replace(unchecked, equal=False, difference="weights").exit_code == run_vs_reference.DIFFERENT
