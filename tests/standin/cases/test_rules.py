"""Rules, options, layouts and places: a sample of the table, each run bit for bit its reference."""

from __future__ import annotations

import pytest
import torch

from tests.standin.matrix import LINES, PLACES, Case, each_once, layouts, pairs, races_of, run

MISSING = [name for name, devices in PLACES.items() if f"cuda:{torch.cuda.device_count() - 1}" < max(devices)]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # kernels that a GPU has in no deterministic form


@pytest.mark.parametrize("case", [*each_once(pairs()), *layouts()], ids=str)
def test_a_run_on_devices_is_its_reference(case: Case) -> None:
    if case.place in MISSING:
        pytest.skip("there is one device here")
    assert run(case) == ""


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
