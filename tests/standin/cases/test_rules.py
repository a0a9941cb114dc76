"""Rules, options, layouts and places: a sample of the table, each run bit for bit its reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import roundelay
from roundelay.finals import search_plan
from roundelay.planner.plan_options import Choices
from roundelay.planning.piece_profiler import measure_pieces
from tests.standin.matrix import LINES, PLACES, Case, bench, each_once, layouts, pairs, races_of, run

MISSING = [name for name, devices in PLACES.items() if f"cuda:{torch.cuda.device_count() - 1}" < max(devices)]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # kernels that a GPU has in no deterministic form


@pytest.mark.parametrize("case", [*each_once(pairs()), *layouts()], ids=str)
def test_a_run_on_devices_is_its_reference(case: Case) -> None:
    if case.place in MISSING:
        pytest.skip("there is one device here")
    assert run(case) == ""


@pytest.mark.parametrize(
    "fields",
    [{"data_parallel": 2, "zero": 3, "precision": "bf16"}, {"hybrid": "2x2", "tensor_parallel": 2}],
    ids=str,
)
def test_the_whole_proof_holds_on_devices(fields: dict[str, Any]) -> None:
    """Plain PyTorch, a mesh against none, and the run against its reference."""
    if "two" in MISSING:
        pytest.skip("there is one device here")
    devices = ",".join(["cuda:0", "cuda:1"] * (4 if "hybrid" in fields else 1))
    chosen = {"workers": 1, "rule": "1f1b", "micro_batches": 2, "cuts": "equal", "devices": devices, **fields}
    found = roundelay.verify(bench("mlp").job(), steps=2, **chosen)
    assert found.equal, found
    assert found.fidelity is not None
    assert found.fidelity.mesh


@pytest.mark.parametrize(
    "case",
    [
        *(Case(line) for line in LINES[::5]),
        Case("1f1b", option="zero", place="two"),
        Case("1f1b", option="zero 3", place="two"),
        Case("1f1b", option="mesh"),
        Case("mp cdp-v2", place="two"),
        Case("zero cdp-v2", model="batchnorm"),
    ],
    ids=str,
)
def test_streams_wait_for_each_other_in_training(case: Case) -> None:
    if case.place in MISSING:
        pytest.skip("there is one device here")
    assert races_of(case)[:10] == []


def test_cuts_are_chosen_by_what_the_device_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def measured(captured: Any, micro_batch: Any, device: torch.device) -> Any:
        seen.append(device.type)
        return measure_pieces(captured, micro_batch, device)

    monkeypatch.setattr("roundelay.planning.profiling.measure_pieces", measured)
    monkeypatch.setenv("ROUNDELAY_CACHE", "none")
    plan = roundelay.plan(bench("mlp").job(), workers=2, devices="cuda:0,cuda:0", cuts="measured", micro_batches=2)
    assert seen == ["cuda"]
    assert plan.num_stages == 2


def test_a_search_is_made_on_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_plan, "FINAL_S", 0.05)
    monkeypatch.setenv("ROUNDELAY_CACHE", "none")
    job = bench("mlp").job()
    found = search_plan.SearchPlan(job, roundelay.capture(job), Choices(workers=2), 0, lambda words: None).run(1)
    assert [final.why for final in found.finals] == [""] * len(found.finals)
    assert {device.partition(":")[0] for device in found.planned.plan.devices} == {"cuda"}
    assert found.chosen.priced.plan.devices == found.planned.plan.devices
