"""A boxing gives every worker what the reference says, and sends as many elements as the plan does."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from roundelay.ir.boxing import exchanged_shape, phases_of
from roundelay.ir.exchange import elements_sent
from roundelay.ir.sbp import P_MAX, B, P, Signature, Split, local_shape
from roundelay.lower.signatures import is_local, moved
from roundelay.reference.mesh import _boxed, part_of
from roundelay.runtime.boxing_parts import Boxing
from tests.runtime.test_collectives import Run

SHAPE = (4, 12, 5)
SPLITS = [Split(0), Split(1), Split(1, 2), Split(1, 1, 3), Split(2)]
PAIRS = [
    (source, target)
    for source, target in product([B, P, P_MAX, *SPLITS], [B, *SPLITS])
    if not is_local(source, target) and moved(source, target, 1.0, 2) < float("inf")
]


def has(source: Signature, parts: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    whole = [torch.randn(SHAPE, dtype=torch.float64) for _ in range(parts)]
    return [part_of(whole[0], source, parts, w) for w in range(parts)] if isinstance(source, Split) else whole


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
@pytest.mark.parametrize("parts", [2, 3])
def test_every_worker_gets_what_the_reference_says(source: Signature, target: Signature, parts: int) -> None:
    given = has(source, parts)
    boxing = Boxing("x", True, source, target)
    phases = phases_of(source, target)
    run = Run(phases, parts)
    (found,) = zip(*run.exchange([boxing.packed(one)[0].contiguous() for one in given]), strict=True)
    for worker, correct in enumerate(_boxed(given, source, target)):
        own = found[worker]
        assert own is not None
        assert torch.equal(boxing.unpacked((own,), given[worker].shape), correct)
        assert correct.shape == local_shape(SHAPE, target, parts, worker)
        shape = exchanged_shape(SHAPE, source, target)
        assert run.sent[worker] == elements_sent(phases, shape, parts, worker)


def test_all_pairs_are_tried() -> None:
    kinds = {(type(source).__name__, type(target).__name__) for source, target in PAIRS}
    assert kinds == {(a, b) for a in ("Split", "Partial") for b in ("Split", "Broadcast")}


@pytest.mark.parametrize(("source", "target"), [(Split(0), Split(1)), (Split(1, 1, 3), Split(0))], ids=str)
def test_the_price_is_what_is_sent(source: Signature, target: Signature) -> None:
    """On average over the workers."""
    parts = 2
    shape = exchanged_shape(SHAPE, source, target)
    sent = sum(sum(elements_sent(phases_of(source, target), shape, parts, w)) for w in range(parts))
    numbers = 4 * 12 * 5
    assert moved(source, target, numbers, parts) == pytest.approx(sent / parts)
