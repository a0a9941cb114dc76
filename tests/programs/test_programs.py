"""Every program of the table trains as in plain PyTorch, or is refused in the words that stand there."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

import roundelay
from roundelay.errors import RoundelayError
from tests.programs import buffers, calls, habits, losses, results, states, table, weights  # noqa: F401  they fill the table
from tests.programs.launched import launched
from tests.programs.plain import STEPS, difference, fresh, trained, trained_plainly
from tests.programs.table import PROGRAMS

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of what is old
USAGE = 2
EQUAL = sorted(name for name, one in PROGRAMS.items() if one.refused is None and not one.draws)
REFUSED = sorted(name for name, one in PROGRAMS.items() if one.refused is not None)
Ways = list[dict[str, Any]]
PIPELINES: Ways = [
    {"workers": 2, "rule": "1f1b", "micro_batches": 1, "transport": "shm"},
    {"workers": 2, "rule": "1f1b", "micro_batches": 4, "transport": "memory"},
    {"workers": 2, "rule": "pipeoptim", "micro_batches": 1, "backward": "mixed", "transport": "shm"},
    {"workers": 2, "rule": "pipeoptim", "micro_batches": 2, "backward": "recompute", "transport": "memory"},
    {"workers": 2, "rule": "zb-h1", "micro_batches": 4, "transport": "shm"},
]
LAYOUTS: Ways = [
    {"layout": "single", "rule": "cdp-v2", "micro_batches": 2, "stages": 3},
    {"layout": "dp", "rule": "cdp-v2", "micro_batches": 2, "stages": 2, "transport": "shm"},
    {"layout": "mp", "rule": "cdp-v1", "micro_batches": 2, "stages": 2, "transport": "memory"},
    {"layout": "zero", "rule": "cdp-v1", "micro_batches": 2, "stages": 3, "transport": "shm"},
]
SPREAD = [way for way in LAYOUTS if way["layout"] in ("dp", "zero")]
"""Several workers call the loss."""
GOING_ON = "calls.a_metric_that_goes_on_from_call_to_call"
WHOLE = bool(os.environ.get("ROUNDELAY_ALL_PROGRAMS"))
PAIRS = [
    (name, way)
    for ways in (PIPELINES, LAYOUTS)
    for i, name in enumerate(EQUAL)
    for j, way in enumerate(ways)
    if (WHOLE or i % len(ways) == j) and not (name == GOING_ON and way in SPREAD)
]


@pytest.mark.parametrize("name", EQUAL)
def test_it_trains_as_in_plain_pytorch(name: str) -> None:
    one = PROGRAMS[name]
    ours = trained(one.make, rule="1f1b", micro_batches=1)
    assert difference(trained_plainly(one.make), ours, rounding=one.rounding) == ""


EVERYWHERE = ("buffers.a_buffer_that_the_loss_reads",)


@pytest.mark.parametrize("name", EQUAL)
def test_it_does_so_wherever_it_is_cut(name: str) -> None:
    """At one place of each, or at all of them; behind a transposition other kernels round otherwise."""
    one = PROGRAMS[name]
    graph = roundelay.capture(fresh(one.make)).graph
    places = [graph.ops[cut].name for cut in graph.cuts if cut + 1 < len(graph.ops)]
    plain = trained_plainly(one.make)
    for place in places if WHOLE or name in EVERYWHERE or not places else [places[EQUAL.index(name) % len(places)]]:
        ours = trained(one.make, rule="1f1b", micro_batches=1, cuts=place, check="off")
        assert difference(plain, ours, rounding=True) == "", place


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_every_run_of_it_equals_its_reference(name: str, way: dict[str, Any]) -> None:
    found = roundelay.verify(fresh(PROGRAMS[name].make), epochs=2, **way)
    assert found.equal, found.difference


@pytest.mark.parametrize("way", [*SPREAD, {"workers": 1, "data_parallel": 2, "rule": "1f1b"}], ids=str)
def test_a_metric_that_goes_on_from_call_to_call_needs_one_worker_that_calls_the_loss(way: dict[str, Any]) -> None:
    with pytest.raises(RoundelayError, match=r"hits\['right'\].* and a metric reads: got 2 workers that call the loss"):
        roundelay.train(fresh(PROGRAMS[GOING_ON].make), steps=STEPS, **way)


@pytest.mark.parametrize("name", sorted(name for name, one in PROGRAMS.items() if one.draws))
def test_what_draws_trains(name: str) -> None:
    told, _ = trained(PROGRAMS[name].make, rule="1f1b", micro_batches=1)
    assert len(told) == STEPS


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(name: str) -> None:
    one = PROGRAMS[name]
    with pytest.raises(RoundelayError, match=one.refused) as raised:
        trained(one.make, rule="1f1b", micro_batches=1)
    assert raised.value.exit_code == USAGE


def test_a_metric_that_tells_the_time_is_not_taken_for_one_that_goes_on_from_call_to_call() -> None:
    calls_of, began = {"loss": 0}, time.perf_counter()

    def loss(outputs: torch.Tensor, batch: Any) -> dict[str, Any]:
        calls_of["loss"] += 1
        return {"loss": table.entropy(outputs, batch), "elapsed": time.perf_counter() - began}

    assert roundelay.capture(table.job(table.Body(), loss)).effects.read_by_metric == ""


def test_what_a_forward_leaves_reaches_the_loss_under_torchrun() -> None:
    assert launched("results.an_auxiliary_loss_in_an_attribute", 2) == ""


def test_a_callback_that_sets_what_the_loss_reads_is_refused() -> None:
    weight = {"of it": 1.0}
    made = table.job(table.Body(), lambda outputs, batch: weight["of it"] * table.entropy(outputs, batch))
    with pytest.raises(RoundelayError, match=r"weight\['of it'\], changed by the job while it trains"):
        roundelay.train(
            made,
            steps=STEPS,
            rule="1f1b",
            transport="shm",
            on_update=lambda update: weight.update({"of it": 2.0}),
        )
