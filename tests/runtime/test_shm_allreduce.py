"""Sums in shared memory have the bits of exchanges by messages, in whatever order the holders' words arrive."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import InternalError
from roundelay.ir.exchange import ExchangePlan
from roundelay.runtime.shm_allreduce import ALIGNMENT, PhaseDone, SharedSum, block_of, shared_bytes
from tests.lower.plans import OF_WEIGHTS, plan_of, replicated, works

DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Run:
    """Holders in one process, whose words arrive in an order of chance, those of one pair in the order of sending."""

    def __init__(self, holders: int, sizes: list[int], seed: int) -> None:
        names = ["float32", "float64"]
        dtypes = tuple(names[i % 2] for i in range(len(sizes)))
        plan = ExchangePlan(**OF_WEIGHTS, dtypes=dtypes, shapes=tuple((size,) for size in sizes))
        memory = torch.empty((holders + 1) * (sum(plan.sizes) + ALIGNMENT * len(sizes)), dtype=torch.uint8)
        blocks = [block_of(memory, plan, number) for number in range(holders + 1)]
        self.dtypes = [DTYPES[name] for name in dtypes]
        self.sums = [SharedSum(blocks[:-1], blocks[-1], position) for position in range(holders)]
        self.lanes: dict[tuple[int, int], list[PhaseDone]] = {}
        self.chance = random.Random(seed)

    def tell(self, source: int, words: list[PhaseDone]) -> None:
        for told in words:
            for target in range(len(self.sums)):
                if target != source:
                    self.lanes.setdefault((source, target), []).append(told)

    def step(self) -> None:
        source, target = self.chance.choice([lane for lane, waiting in self.lanes.items() if waiting])
        self.tell(target, self.sums[target].take(source, self.lanes[source, target].pop(0)))


@given(
    st.integers(1, 4),
    st.lists(st.integers(0, 9), max_size=3),
    st.integers(0, 999),
    st.lists(st.booleans(), min_size=12),
)
def test_the_sum_is_in_the_order_of_the_holders_whatever_arrives_first(
    holders: int, sizes: list[int], seed: int, present: list[bool]
) -> None:
    """Three sums one after the other; each holder begins the next as soon as it has read the one before."""
    run, made = Run(holders, sizes, seed), torch.Generator().manual_seed(seed)
    given_by = [
        [
            [torch.randn(size, generator=made).to(dtype) for size, dtype in zip(sizes, run.dtypes, strict=True)]
            for _ in range(3)
        ]
        for _ in range(holders)
    ]
    adds = [[present[(3 * position + number) % len(present)] for number in range(3)] for position in range(holders)]
    begun, read = [0] * holders, [0] * holders
    while min(read) < 3:
        for position, own in enumerate(run.sums):
            if begun[position] == read[position] < 3:
                number = begun[position]
                if adds[position][number]:
                    for room, tensor in zip(own.own, given_by[position][number], strict=True):
                        room.copy_(tensor)
                run.tell(position, own.start(number, adds[position][number]))
                begun[position] += 1
            if own.finished(read[position]):
                found = own.result(read[position])
                parts = [given_by[p][read[position]] for p in range(holders) if adds[p][read[position]]]
                assert len(found) == (len(sizes) if parts else 0)
                for i, tensor in enumerate(found):
                    total = parts[0][i]
                    for part in parts[1:]:
                        total = total + part[i]
                    assert tensor.numpy().tobytes() == total.numpy().tobytes()
                read[position] += 1
        if any(run.lanes.values()):
            run.step()


def test_the_memory_has_a_block_for_each_holder_and_one_for_the_sum() -> None:
    plan = replicated(plan_of("1f1b", 2, 1), 3)
    assert set(shared_bytes(works(plan)).values()) == {4 * (64 + 64)}
    assert shared_bytes(works(plan_of("1f1b", 2, 1))) == {}


def test_words_out_of_place_are_errors() -> None:
    own = Run(2, [3], 0).sums[0]
    own.start(0, True)
    with pytest.raises(InternalError, match="the start of exchange 1"):
        own.start(1, True)
    own.take(1, PhaseDone(1, 0, True))
    with pytest.raises(InternalError, match="a second word of holder 1 on exchange 1"):
        own.take(1, PhaseDone(1, 0, True))
