"""Exchanges compute the same bits in whatever order messages arrive, and send as many elements as foretold."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import InternalError
from roundelay.ir.exchange import (
    Phase,
    all_gather,
    all_reduce,
    all_to_all,
    bounds,
    elements_sent,
    reduce_scatter,
)
from roundelay.runtime.collectives import Exchange, Parts

Part = torch.Tensor | None


class Run:
    """Holders whose messages arrive in an order of chance, those of one pair in the order of sending."""

    def __init__(self, phases: Sequence[Phase], holders: int, seed: int = 0) -> None:
        self.exchanges = [Exchange(phases, position, holders) for position in range(holders)]
        self.lanes: dict[tuple[int, int], list[tuple[int, int, Parts]]] = {}
        self.sent = [[0] * len(phases) for _ in range(holders)]
        self.chance = random.Random(seed)

    def send(self, source: int, pieces: Sequence[tuple[int, int, int, Parts]]) -> None:
        for target, number, phase, part in pieces:
            assert target != source
            self.lanes.setdefault((source, target), []).append((number, phase, part))
            self.sent[source][phase] += sum(each.numel() for each in part)

    def step(self) -> None:
        source, target = self.chance.choice([lane for lane, waiting in self.lanes.items() if waiting])
        number, phase, part = self.lanes[source, target].pop(0)
        self.send(target, self.exchanges[target].take(source, number, phase, part))

    def exchange(self, tensors: Sequence[Part], numbers: int = 1) -> list[list[Part]]:
        """Each holder's results of as many exchanges of the same tensors, started as early as possible."""
        results: list[list[Part]] = [[] for _ in tensors]
        begun = [-1] * len(tensors)
        while min(map(len, results)) < numbers:
            for position, own in enumerate(self.exchanges):
                if own.finished(begun[position]):
                    results[position].append(next(iter(own.result(begun[position])), None))
                if begun[position] < len(results[position]) < numbers:
                    begun[position] += 1
                    self.send(position, own.start(begun[position], () if (t := tensors[position]) is None else (t,)))
            if any(self.lanes.values()):
                self.step()
        return results


def same(a: Part, b: Part) -> bool:
    return a is b or (a is not None and b is not None and a.shape == b.shape and torch.equal(a, b))


def numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum in order, written out."""
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


def slices(tensor: torch.Tensor, dim: int, holders: int) -> list[torch.Tensor]:
    return [tensor.narrow(dim, start, end - start) for start, end in bounds(tensor.shape[dim], holders)]


SHAPES = st.tuples(st.integers(0, 7), st.integers(0, 7))


@given(shape=SHAPES, holders=st.integers(1, 5), dim=st.integers(0, 1), seed=st.integers(0, 999))
def test_the_result_is_that_of_the_signature_whatever_arrives_first(
    shape: tuple[int, int], holders: int, dim: int, seed: int
) -> None:
    partial = [numbers(shape, seed + i) for i in range(holders)]
    whole = total(partial)
    split, other = slices(whole, dim, holders), slices(whole, 1 - dim, holders)
    cases: list[tuple[tuple[Phase, ...], Sequence[torch.Tensor], Sequence[torch.Tensor]]] = [
        (all_reduce(dim), partial, [whole] * holders),
        (reduce_scatter(dim), partial, split),
        (all_gather(dim), split, [whole] * holders),
        (all_to_all(dim, 1 - dim), split, other),
    ]
    for phases, before, after in cases:
        run = Run(phases, holders, seed)
        for found, expected in zip(run.exchange([t.contiguous() for t in before], 3), after, strict=True):
            assert all(same(each, expected) for each in found), phases
        for position in range(holders):
            foretold = elements_sent(phases, shape, holders, position)
            assert run.sent[position] == [3 * count for count in foretold], phases


def test_an_all_reduce_sends_what_a_ring_sends() -> None:
    assert [sum(elements_sent(all_reduce(), (12,), 4, i)) for i in range(4)] == [2 * 3 * 12 // 4] * 4


def test_the_sum_is_in_the_order_of_the_holders() -> None:
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8]), torch.tensor([1.0])]
    (found,), *_ = Run(all_reduce(), 4).exchange(parts)
    assert found is not None
    assert found.item() == total(parts).item() == 1.0
    (other,), *_ = Run(all_reduce(), 4).exchange(parts[::-1])
    assert other is not None
    assert other.item() == total(parts[::-1]).item() == 0.0


@pytest.mark.parametrize("absent", [(0,), (1, 2), (0, 1, 2)])
def test_holders_with_nothing_to_add_change_no_bit(absent: tuple[int, ...]) -> None:
    parts = [None if i in absent else torch.tensor([-0.0, i + 0.25, 7.0]) for i in range(3)]
    present = [part for part in parts if part is not None]
    for (found,) in Run(all_reduce(), 3).exchange(parts):
        if not present:
            assert found is None
        else:
            assert found is not None
            assert found.numpy().tobytes() == total(present).numpy().tobytes()


def test_an_exchange_waits_for_the_one_before_and_takes_each_part_once() -> None:
    own = Exchange(all_reduce(), 0, 2)
    own.start(0, (torch.ones(2),))
    with pytest.raises(InternalError, match="the start of exchange 1"):
        own.start(1, (torch.ones(2),))
    own.take(1, 0, 0, (torch.ones(1),))
    with pytest.raises(InternalError, match="a second part"):
        Exchange(all_reduce(), 0, 2).take(2, 0, 0, ())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((torch.ones(3),), "parts of different shapes"),
        ((torch.ones(2), torch.ones(2)), "holders with different numbers of tensors"),
    ],
)
def test_tensors_that_cannot_be_added_are_an_error(tensors: tuple[torch.Tensor, ...], message: str) -> None:
    own = Exchange(reduce_scatter(), 0, 2)
    own.take(1, 0, 0, tensors)
    with pytest.raises(InternalError, match=message):
        own.start(0, (torch.ones(2),))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=3), st.integers(1, 4))
def test_several_tensors_are_exchanged_together(shapes: list[tuple[int, int]], holders: int) -> None:
    run = [Exchange(all_reduce(), position, holders) for position in range(holders)]
    own = [tuple(numbers(shape, 9 * i + j) for j, shape in enumerate(shapes)) for i in range(holders)]
    waiting = [(i, piece) for i, each in enumerate(run) for piece in each.start(0, own[i])]
    while waiting:
        source, (target, number, phase, parts) = waiting.pop(0)
        waiting += [(target, piece) for piece in run[target].take(source, number, phase, parts)]
    for each in run:
        found = each.result(0)
        assert [tensor.tolist() for tensor in found] == [total(of).tolist() for of in zip(*own, strict=True)]
