"""A measured profile gives every operation its own time, and leaves the model as it was."""

from __future__ import annotations

import itertools

import pytest
import torch

from roundelay.planning import op_profiler
from roundelay.planning.op_profiler import measure_operations
from tests.frontend.cutting import captured_of, differing, sample

NAMES = ["mlp", "gpt2", "batchnorm", "views", "tied_head", "lstm", "frozen"]


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_is_measured_and_the_model_stays_as_it_was(name: str) -> None:
    captured, batch = captured_of(name), sample(name)
    kept = {n: t.clone() for n, t in captured.model.state_dict().items()}
    state = torch.random.get_rng_state()
    found = measure_operations(captured, batch, repeats=1)
    assert {len(found.forward_s), len(found.backward_s), len(found.update_s)} == {len(captured.graph.ops) + 1}
    assert all(seconds > 0 for seconds in found.forward_s)
    assert all(seconds >= 0 for seconds in (*found.backward_s, *found.update_s))
    assert found.backward_s[-1] > 0
    assert differing(dict(captured.model.state_dict()), kept) == []
    assert all(parameter.grad is None for parameter in captured.model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


class Ticks:
    """A clock that advances by one whenever it is read."""

    def __init__(self) -> None:
        self.perf_counter = self.thread_time = itertools.count().__next__


def test_a_backward_belongs_to_the_operation_whose_forward_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = captured_of("mlp")
    monkeypatch.setattr(op_profiler, "time", Ticks())
    monkeypatch.setattr(op_profiler, "BUDGET_S", 1e9)
    found = measure_operations(captured, sample("mlp"), repeats=2)
    assert set(found.forward_s) == {1}
    values = captured.graph.values
    for op, ticks in zip(captured.graph.ops, found.backward_s, strict=False):
        assert (ticks > 0) == values[op.name].requires_grad


def test_only_the_first_user_of_a_parameter_updates_it() -> None:
    captured = captured_of("tied_head")
    found = measure_operations(captured, sample("tied_head"), repeats=1)
    seen: set[str] = set()
    for op, seconds in zip(captured.graph.ops, found.update_s, strict=False):
        if set(op.parameters) - seen:
            assert seconds > 0
        seen |= set(op.parameters)
    assert found.update_s[-1] == 0


def test_no_run_begins_when_the_budget_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    monkeypatch.setattr(op_profiler, "BUDGET_S", 0.0)
    real = op_profiler._run
    monkeypatch.setattr(op_profiler, "_run", lambda *args: begun.append(1) or real(*args))
    measure_operations(captured_of("mlp"), sample("mlp"), repeats=5)
    assert len(begun) == 2  # one to warm up, one that counts
