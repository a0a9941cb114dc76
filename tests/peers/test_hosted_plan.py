"""The plan of a hosted run follows the machines that have come, and keeps what the run before it had chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundelay
from roundelay import Job
from roundelay.cli.hosted_plan import drafted
from roundelay.cli.plan_from_options import PlanSource
from roundelay.ir.plan import Plan
from roundelay.planner.plan_options import Choices
from roundelay.session.offer import Offer
from tests.cli.jobs import mlp

BLOCKS = 5


def wide() -> Job:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(BLOCKS)]
    return mlp.make(model=nn.Sequential(nn.Linear(6, 1024), *blocks, nn.Linear(1024, 3)))


def plan_for(speeds: tuple[float, ...], source: PlanSource, **choices: object) -> Plan:
    """The plan for machines so many times as fast as one that needs 0.1 s for the probe."""
    offers = [Offer("a" * 16, f"{k}" * 16, 1, 0.1 / speed, 0.1 / speed, 10**9) for k, speed in enumerate(speeds)]
    draft = drafted(wide(), Choices(**choices), len(speeds), 0, source, quiet=True)  # type: ignore[arg-type]
    return draft.for_machines(offers).plan


def sizes(plan: Plan) -> list[int]:
    return [stage.parameter_bytes for stage in plan.stages]


def test_a_run_that_is_continued_is_cut_for_the_machines_that_it_has_now(tmp_path: Path) -> None:
    first = plan_for((1.0, 0.1), PlanSource(), rule="pipedream", clip="stage:2.0")
    (tmp_path / "plan.toml").write_text(first.text())
    again = plan_for((0.1, 1.0), PlanSource(resume=tmp_path))
    assert (again.rule, again.clip, again.micro_batches) == (first.rule, first.clip, first.micro_batches)
    assert sizes(first)[0] > sizes(first)[1]
    assert sizes(again)[0] < sizes(again)[1]


@pytest.mark.parametrize("peers", [2, 3])
@pytest.mark.parametrize(
    "choices",
    [
        {"rule": "pipedream", "workers": 2},
        {"rule": "1f1b", "workers": 1, "data_parallel": 2, "zero": 1},
        {"rule": "1f1b", "workers": 1, "tensor_parallel": 2},
        {"rule": "cdp-v2", "layout": "zero", "micro_batches": 2},
    ],
    ids=lambda choices: "-".join(map(str, choices.values())),
)
def test_a_run_of_any_form_keeps_its_rule_and_goes_on_with_a_stage_on_each_machine(
    choices: dict[str, Any], peers: int, tmp_path: Path
) -> None:
    (tmp_path / "plan.toml").write_text(roundelay.plan(wide(), **choices).text())
    again = plan_for((1.0,) * peers, PlanSource(resume=tmp_path))
    assert (again.rule, again.layout, again.num_workers, again.num_stages) == (
        choices["rule"],
        "pipeline",
        peers,
        peers,
    )
    assert (again.num_stages, again.replicas, again.mesh_size, again.zero, again.transport) == (peers, 1, 1, 0, "grpc")


def test_each_machine_has_its_own_threads_in_the_plan_or_those_that_are_asked_for() -> None:
    draft = drafted(wide(), Choices(), 2, 0, PlanSource(), quiet=True)
    offers = [Offer("a" * 16, "0" * 16, 4, 0.1, 0.03, 10**9), Offer("a" * 16, "1" * 16, 16, 0.1, 0.01, 10**9)]
    assert [worker.threads for worker in draft.for_machines(offers).plan.workers] == [4, 16]
    assert [worker.threads for worker in draft.for_machines(offers[::-1]).plan.workers] == [16, 4]
    few = drafted(wide(), Choices(threads=2), 2, 0, PlanSource(), quiet=True)
    assert [worker.threads for worker in few.for_machines(offers).plan.workers] == [2, 2]
