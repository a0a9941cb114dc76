"""Over gRPC a run computes the bits that the reference does."""

from __future__ import annotations

import pytest

from tests.equivalence.cells import VARIANTS, bench


@pytest.mark.parametrize(
    ("name", "stages", "replicas"),
    [
        ("1f1b", 2, 1),
        ("pipedream", 2, 1),
        ("pipeoptim improved mixed", 2, 1),
        ("zb-v", 4, 1),
        ("1f1b", 1, 2),
        ("1f1b", 2, 2),
    ],
)
def test_a_run_over_grpc_equals_the_reference(name: str, stages: int, replicas: int) -> None:
    place = bench("tied_head")
    plan = place.plan(VARIANTS[name], stages, 4, "grpc")
    found = place.verify(place.replicated(plan, replicas) if replicas > 1 else plan)
    assert found.equal, found.difference
    assert len({worker["pid"] for worker in found.workers.values()}) == len(plan.workers) * replicas
