"""A state's digest is the same whoever holds which part of it, and another for any other state."""

from __future__ import annotations

import pytest
import torch

from roundelay.checkpoint.shards import Ranges, Shard, whole_ranges
from roundelay.observe.state_digest import element_sum, joined, state_digest, sums_of

CUTS: list[list[Ranges]] = [
    [((0, 4), (0, 2), (0, 3)), ((4, 5), (0, 2), (0, 3)), ((5, 5), (0, 2), (0, 3))],
    [((0, 5), (0, 2), (1, 3)), ((0, 2), (0, 2), (0, 1)), ((2, 5), (0, 2), (0, 1))],
]


def values(dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 100
    return (torch.complex(numbers, -numbers) if dtype.is_complex else numbers).to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("cuts", CUTS)
def test_sums_of_parts_add_up_to_that_of_the_whole(dtype: torch.dtype, cuts: list[Ranges]) -> None:
    whole = values(dtype).view(5, 2, 3)
    parts = [element_sum(whole[tuple(slice(*own) for own in ranges)], ranges) for ranges in cuts]
    assert sum(parts) % 2**64 == element_sum(whole, whole_ranges(whole.shape))


def test_parts_may_lie_in_each_block() -> None:
    whole = values(torch.float32)
    blocks = whole.view(5, 2, 3)
    parts = [(blocks[..., :1].reshape(5, 2), (0, 1, 3)), (blocks[..., 1:].reshape(5, 4), (1, 3, 3))]
    found = sum(element_sum(part, ((0, 5), columns)) for part, columns in parts)
    assert found % 2**64 == element_sum(whole, ((0, 5), (0, 6)))


def test_a_tensor_in_many_chunks_is_summed_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = values(torch.float32)
    at_once = element_sum(whole, whole_ranges(whole.shape))
    monkeypatch.setattr("roundelay.observe.state_digest._CHUNK", 7)
    assert element_sum(whole, whole_ranges(whole.shape)) == at_once


def test_holders_of_parts_of_the_same_make_one_digest() -> None:
    weight, step = values(torch.float32), torch.tensor(3.0)
    state = {"weight": weight, "mean": weight * 2, "step": step, "rate": 0.5}
    whole = sums_of("a", state, Shard(((0, 5), (0, 6)), weight))

    def part(begin: int, end: int) -> dict[str, dict[str, int]]:
        own = weight[begin:end]
        return sums_of("a", {**state, "weight": own, "mean": own * 2}, Shard(((begin, end), (0, 6)), own))

    assert state_digest(joined([part(0, 2), part(2, 5), part(0, 2)])) == state_digest(whole)


@pytest.mark.parametrize("other", ["a sign", "two elements", "a dtype", "a name", "a number", "less"])
def test_another_state_has_another_digest(other: str) -> None:
    weight = values(torch.float32)
    state = {"weight": weight, "rate": 0.5}
    changed = {
        "a sign": {**state, "weight": weight.clone().index_put_((torch.tensor(1), torch.tensor(2)), -weight[1, 2])},
        "two elements": {**state, "weight": weight[:, [1, 0, 2, 3, 4, 5]]},
        "a dtype": {**state, "weight": weight.view(torch.int32)},
        "a name": {"other": weight, "rate": 0.5},
        "a number": {**state, "rate": 0.25},
        "less": {"weight": weight},
    }
    assert state_digest(sums_of("a", changed[other])) != state_digest(sums_of("a", state))
