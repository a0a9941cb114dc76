"""What Ravnest assumes to be bounded: its numbers on functions, letters and spans that can be counted by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.peers.assumptions import STAGES, Letters, run_of
from benchmarks.peers.bounds import block_lipschitz, global_delays, lipschitz, most_in_flight, spread_of
from benchmarks.peers.hosted import staleness
from roundelay.observe.trace import Span
from tests.observe.spans import span

CURVED = torch.tensor([[2.0, 1.0], [1.0, 5.0]])
START, FIRST, LAST = torch.tensor([1.0, 1.0]), torch.tensor([4.0, 1.0]), torch.tensor([4.0, -1.0])

HELD = Letters(stale=2, mean=1.5, most=3, allowed=3, delay=7, backwards=9, updates=9)
BROKEN = {
    "planned": {"most": 4},
    "stale by 3": {"stale": 3},
    "at the last stage": {},
    "letters B": {"backwards": 8},
}


def gradient(weights: Tensor) -> Tensor:
    """Of half of w A w."""
    return CURVED @ weights


def test_gradients_of_batches_lie_around_that_of_all_data() -> None:
    full, step = gradient(START), torch.tensor([3.0, 4.0])
    found = spread_of(full, [full + step, full - step, full])
    assert found.bias == pytest.approx(0.0)
    assert found.variance == pytest.approx((25 + 25 + 0) / 3)
    assert found.largest == pytest.approx((6.0**2 + 10.0**2) ** 0.5)
    assert spread_of(full, [full + step, full]).bias == pytest.approx(2.5)


def test_a_quadratic_is_as_curved_as_its_matrix() -> None:
    points = [START, FIRST, LAST]
    columns = [float(CURVED[:, k].norm()) for k in (0, 1)]
    assert lipschitz(points, [gradient(point) for point in points]) == pytest.approx(columns)


@pytest.mark.parametrize(("block", "curvature"), [([True, False], 2.0), ([False, True], 5.0), ([True, True], None)])
def test_of_a_block_alone_only_its_own_curvature_counts(block: list[bool], curvature: float | None) -> None:
    expected = lipschitz([START, LAST], [gradient(START), gradient(LAST)])[0] if curvature is None else curvature
    assert block_lipschitz(gradient, START, LAST, torch.tensor(block)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("letters", "stale", "most"),
    [("FBFB", [0, 0], 1), ("FFFBBB", [0, 1, 2], 3), ("FFBFBFBB", [0, 1, 1, 1], 2), ("FFBBFB", [0, 1, 0], 2)],
)
def test_staleness_counts_the_updates_between_a_forward_and_its_own_backward(
    letters: str, stale: list[int], most: int
) -> None:
    assert staleness(letters) == stale
    assert most_in_flight(letters) == most
    assert max(stale) < most


def in_turn(actions: str) -> list[Span]:
    """Spans of a second each, one after another: stage 1's update of micro-batch 0 is 1U0."""
    kinds = {"F": "forward", "U": "update"}
    return [
        span(int(stage), kinds[kind], int(g), start, start + 1.0)
        for start, (stage, kind, g) in enumerate(actions.split())
    ]


def test_delays_count_the_updates_of_all_stages() -> None:
    """Stage 1 is never stale, but stage 0 updates once between its second forward and that one's update."""
    assert global_delays(in_turn("0F0 0F1 1F0 1U0 1F1 0U0 1U1 0U1"), 2) == [[1, 3], [0, 1]]


def test_what_a_plan_allows_is_no_violation() -> None:
    assert HELD.broken(last=False) == []
    assert dataclasses.replace(HELD, stale=0, most=1, allowed=1).broken(last=True) == []


@pytest.mark.parametrize("what", BROKEN)
def test_each_violation_is_reported(what: str) -> None:
    (text,) = dataclasses.replace(HELD, **BROKEN[what]).broken(last=what == "at the last stage")
    assert what in text


def test_a_run_is_within_what_its_plan_allows(tmp_path: Path) -> None:
    found = run_of("shm", 0, 1, tmp_path)
    assert [own.broken(last=k == STAGES - 1) for k, own in enumerate(found.letters)] == [[]] * STAGES
    assert {own.updates for own in found.letters} == {44}
    bounds = found.bounds
    assert (len(bounds.norms), len(bounds.spreads), len(bounds.whole)) == (2, 2, 1)
    assert all(len(block) == 1 and block[0] > 0 for block in bounds.blocks)
    for own in found.memory:
        assert 0.5 < own["peak_tensor_bytes"] / own["predicted"]["total"] <= 1.0
