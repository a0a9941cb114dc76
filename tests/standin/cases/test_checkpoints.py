"""Checkpoints go from device to device: what is loaded lies where it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

import roundelay
from roundelay.ir.plan import Plan
from tests.standin.matrix import Case, bench, plan_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # kernels that a GPU has in no deterministic form

ON_CPU = ("cpu", "cpu")
ON_ONE = ("cuda:0", "cuda:0")


def _moved(plan: Plan, devices: tuple[str, str]) -> Plan:
    text = plan.text()
    for k, worker in enumerate(plan.workers):
        name = f'name = "{worker.name}"\ndevice = '
        assert f'{name}"{worker.device}"' in text
        text = text.replace(f'{name}"{worker.device}"', f'{name}"{devices[k % 2]}"')
    return Plan.parse(text)


@pytest.mark.parametrize(
    ("line", "option", "first", "then"),
    [
        ("1f1b", "ema", ON_ONE, ON_ONE),
        ("1f1b", "ema", ON_ONE, ON_CPU),
        ("1f1b", "ema", ON_CPU, ON_ONE),
        ("pipeoptim improved stash", "nothing", ON_ONE, ON_ONE),
        ("1f1b", "zero", ON_ONE, ON_ONE),
        ("cdp-v2", "replicas", ON_CPU, ON_ONE),
    ],
)
def test_a_run_goes_on(line: str, option: str, first: tuple[str, str], then: tuple[str, str], tmp_path: Path) -> None:
    plan = plan_of(Case(line, option=option, model="batchnorm"))
    place = bench("batchnorm")
    place.restore()
    job = place.job()
    roundelay.train(job, plan=_moved(plan, first), steps=2, save_to=tmp_path / "run")
    found = roundelay.verify(job, plan=_moved(plan, then), steps=2, resume=tmp_path / "run")
    assert found.equal, found.differences()
