"""What a call changes is found wherever it lies, and put back as if nobody had called."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import roundelay
from roundelay.reach.reachable_state import ReachableState
from tests.programs.table import Body, entropy, job


class Holder:
    """An object of one's own."""

    shared = 0

    def __init__(self) -> None:
        self.number, self.items, self.table = 0, [1], {"a": 1}
        self.last, self.draws, self.calls = deque([1], 2), np.random.default_rng(0), itertools.count()


def number(holder: Holder) -> None:
    holder.number += 1


def items(holder: Holder) -> None:
    holder.items.append(2)


def replaced(holder: Holder) -> None:
    holder.items.append(2)
    holder.items = holder.items[-1:]  # what it was is out of reach now, and changed


def table(holder: Holder) -> None:
    holder.table["b"] = 2
    del holder.table["a"]


def last(holder: Holder) -> None:
    holder.last.extend([2, 3])


def draws(holder: Holder) -> None:
    holder.draws.random()


def calls(holder: Holder) -> None:
    next(holder.calls)


def shared(holder: Holder) -> None:
    Holder.shared += 1


def shown(holder: Holder) -> Any:
    state = repr(holder.draws.bit_generator.state)
    return holder.number, holder.items, holder.table, list(holder.last), state, repr(holder.calls), Holder.shared


@pytest.mark.parametrize("change", [number, items, replaced, table, last, draws, calls, shared])
def test_what_a_call_changes_is_found_and_put_back_more_than_once(change: Any) -> None:
    holder = Holder()
    before, whole = shown(holder), holder.items
    world = ReachableState([("loss", lambda: holder)])
    assert world.changes() == []
    for _ in range(2):
        change(holder)
        assert world.changes()
        world.restore()
        assert shown(holder) == before
        assert holder.items is whole
        assert world.changes() == []


def test_a_hook_that_a_call_registers_is_taken_away_again() -> None:
    model = Body()
    world = ReachableState([("model", model)])
    model.b.register_forward_hook(lambda *_: None)
    world.restore()
    assert not model.b._forward_hooks


def test_capture_and_planning_leave_no_trace_in_what_the_jobs_code_keeps() -> None:
    history: list[float] = []
    made: list[Any] = []

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        history.append(1.0)
        return entropy(outputs, batch)

    def optimizer(named: Any) -> torch.optim.Optimizer:
        made.append(len(named))
        return torch.optim.SGD(named, lr=0.1)

    roundelay.plan(job(Body(), loss, optimizer=optimizer), workers=2, rule="1f1b")
    assert history == []
    assert made == []


def test_a_list_that_two_modules_share_is_one_list_behind_capture() -> None:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []
            self.part = nn.Identity()
            self.part.kept = self.kept  # type: ignore[assignment]

    model = Model()
    roundelay.capture(job(model))
    assert model.part.kept is model.kept


def test_a_replaced_buffer_is_written_where_its_value_is_known() -> None:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(16))

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
            return self.rest(h)

    graph = roundelay.capture(job(Model())).graph
    last = max(i for i, op in enumerate(graph.ops) if op.buffers)
    assert any(cut > last for cut in graph.cuts), "layers behind it can be cut apart"


def test_what_an_evaluation_does_to_frozen_weights_is_taken_back() -> None:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.b.requires_grad_(False)

        def train(self, mode: bool = True) -> Body:
            if mode != self.training:
                self.b.weight.data += 0.1 if mode else -0.1  # which leaves rounding
            return super().train(mode)

    model = Model()
    before = model.b.weight.detach().clone()
    roundelay.train(job(model, evaluate=lambda own: {"loss": 0.0}), workers=2, rule="1f1b", micro_batches=1, epochs=2)
    assert torch.equal(model.b.weight, before)
