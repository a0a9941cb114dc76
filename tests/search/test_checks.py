"""A sample of ``python -m tests.search.long``."""

from __future__ import annotations

import pytest

from tests.search.checks import no_expert_is_faster, signatures_are_the_best

SEEDS = {"one process": 1001, "data parallel": 1007, "DDP": 1030, "Megatron": 1034, "few fit": 1060, "pipeline": 1176}
"""By what is the fastest of the baselines there."""


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
def test_no_expert_is_faster_on_random_models_and_clusters(seed: int) -> None:
    found = no_expert_is_faster(seed, most_workers=3)
    assert not found.complaint, found


def test_an_integer_program_and_brute_force_find_the_same_signatures() -> None:
    pytest.importorskip("scipy.optimize")
    found = [one for seed in range(1000, 1020) if (one := signatures_are_the_best(seed, 5_000))]
    assert len(found) > 10
    assert [one for one in found if one.complaint] == []
