"""What is split over replicas, under each rule, over each transport, over several numbers of them: the whole table."""

from __future__ import annotations

from typing import Any

import pytest

from roundelay.planner import weight_segments
from roundelay.proof.tamper_ways import EXCHANGE_WAYS, ORDER, STALE_GATHER
from tests.equivalence.cells import bench
from tests.equivalence.test_zero import held, split

RULES = ("1f1b", "pipedream", "pipeoptim", "zb-h1", "interleaved-1f1b", "cdp-v2")
TRANSPORTS = ("memory", "shm", "gloo")
HOLDERS: tuple[tuple[int | str, dict[str, Any]], ...] = (
    *((replicas, {"zero": zero}) for replicas in (2, 3) for zero in (1, 2, 3)),
    ("2x2", {}),
)


@pytest.mark.parametrize(("replicas", "fields"), HOLDERS)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_holds_over_every_transport(
    monkeypatch: pytest.MonkeyPatch, rule: str, transport: str, replicas: int | str, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(weight_segments, "LEAST", 1)
    place = bench("mlp")
    held(place, split(place, rule, 2, replicas, transport=transport, **fields), steps=4)


@pytest.mark.parametrize("way", [*EXCHANGE_WAYS[1:], STALE_GATHER])
@pytest.mark.parametrize(("replicas", "fields"), HOLDERS)
@pytest.mark.parametrize("transport", ["memory", "gloo"])
def test_what_is_broken_in_an_exchange_is_found(
    transport: str, replicas: int | str, fields: dict[str, Any], way: str
) -> None:
    if way == STALE_GATHER and fields.get("zero", 3) < 3:
        pytest.skip("no weights are gathered")
    if way == ORDER and replicas == 2:
        pytest.skip("a sum of two has no other order")
    place = bench("mlp")
    assert not place.verify(split(place, "1f1b", 2, replicas, transport=transport, **fields), tamper=way).equal
