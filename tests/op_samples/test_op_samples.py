"""PyTorch's samples of its operators: what global tensors give is what plain tensors give, or is refused by name.

Every commit takes another of these tests; ``python -m tests.op_samples`` makes all checks.
"""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.op_samples.checks import EQUAL, INTERNAL, REFUSED, WRONG, checks_of, name_of, operators, outcome, samples_of
from tests.op_samples.simulated import Ranks

GROUPS = 60
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool)
OPERATORS = list(operators())


@pytest.mark.parametrize("group", range(GROUPS))
def test_operators_on_parts_give_what_the_plain_ones_give(group: int) -> None:
    found: dict[str, list[str]] = {EQUAL: [], REFUSED: [], WRONG: [], INTERNAL: []}
    workers = 2 + group % 2
    with warnings.catch_warnings(), Ranks(workers).active() as ranks:
        warnings.simplefilter("ignore")
        for op in OPERATORS[group::GROUPS]:
            for dtype in DTYPES:
                for number, sample in samples_of(op, dtype, most=2).items():
                    for check in checks_of(op, number, sample, workers, dtype):
                        how, why = outcome(check, sample, ranks)
                        found.setdefault(how, []).append(f"{check}: {why}")
    assert found[WRONG] == found[INTERNAL] == []
    assert len(found[EQUAL]) > len(found[REFUSED]) / 2, "most are computed"


def test_a_wrong_operator_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from roundelay.global_tensor import operators as own

    (op,) = [one for one in OPERATORS if name_of(one) == "sigmoid"]
    monkeypatch.setattr(own, "_plain", lambda local: local.contiguous() + 1)
    monkeypatch.setattr(own, "_COMPILED", {})
    with Ranks(2).active() as ranks:
        (number, sample), *_ = samples_of(op, torch.float64).items()
        outcomes = {outcome(check, sample, ranks)[0] for check in checks_of(op, number, sample, 2, torch.float64)}
    assert outcomes == {WRONG}
