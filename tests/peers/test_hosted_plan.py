"""The plan of a hosted run follows the machines that have come, and keeps what the run before it had chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundelay
from roundelay import Job
from roundelay.cli.hosted_plan import drafted
from roundelay.ir.plan import Plan
from roundelay.planner.plan_options import Choices
from roundelay.session.offer import Offer
from tests.cli.jobs import mlp

BLOCKS = 5


def wide() -> Job:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(BLOCKS)]
    model = nn.Sequential(nn.Linear(6, 1024), *blocks, nn.Linear(1024, 3))
    return mlp.make(model=model, batches=batches, optimizer=lambda named: torch.optim.SGD(named, lr=0.1))


def batches(epoch: int) -> Iterator[dict[str, torch.Tensor]]:
    """Large enough that times are of products."""
    yield from ({name: rows.repeat_interleave(16, 0) for name, rows in one.items()} for one in mlp.batches(epoch))


def plan_for(
    speeds: tuple[float, ...], source: Path | None, memory: tuple[int, ...] = (10**9, 10**9, 10**9), **choices: object
) -> Plan:
    """The plan for machines so many times as fast as one that needs 0.1 s for the probe."""
    pairs = enumerate(zip(speeds, memory, strict=False))
    offers = [Offer("a" * 16, f"{k}" * 16, 1, 1, 0.1 / speed, 0.1 / speed, held) for k, (speed, held) in pairs]
    draft = drafted(wide(), Choices(**choices), len(speeds), 0, source, quiet=True)  # type: ignore[arg-type]
    return draft.for_machines(offers).plan


def sizes(plan: Plan) -> list[int]:
    return [stage.parameter_bytes for stage in plan.stages]


def test_a_run_that_is_continued_is_cut_for_the_machines_that_it_has_now(tmp_path: Path) -> None:
    first = plan_for((1.0, 0.1), None, rule="pipedream", clip="stage:2.0")
    (tmp_path / "plan.toml").write_text(first.text())
    again = plan_for((0.1, 1.0), tmp_path)
    assert (again.rule, again.clip, again.micro_batches) == (first.rule, first.clip, first.micro_batches)
    assert sizes(first)[0] > sizes(first)[1]
    assert sizes(again)[0] < sizes(again)[1]


@pytest.mark.parametrize("peers", [2, 3])
@pytest.mark.parametrize(
    "choices",
    [
        {"rule": "pipedream", "workers": 2},
        {"rule": "1f1b", "workers": 1, "data_parallel": 2, "zero": 1},
        {"rule": "1f1b", "workers": 1, "hybrid": "2x2"},
        {"rule": "1f1b", "workers": 1, "tensor_parallel": 2, "micro_batches": 4},
        {"rule": "cdp-v2", "layout": "zero", "micro_batches": 2},
        {"rule": "cdp-v2", "layout": "dp", "micro_batches": 4, "recompute": "all"},
    ],
    ids=lambda choices: "-".join(map(str, choices.values())),
)
def test_a_run_of_any_form_keeps_its_rule_and_goes_on_with_a_stage_on_each_machine(
    choices: dict[str, Any], peers: int, tmp_path: Path
) -> None:
    first = replace(roundelay.plan(wide(), **choices), compile=True)
    (tmp_path / "plan.toml").write_text(first.text())
    again = plan_for((1.0,) * peers, tmp_path)
    kept = {"rule": first.rule, "micro_batches": first.batch_parts, "recompute": first.recompute}
    assert {name: getattr(again, name) for name in kept} == kept
    assert (again.layout, again.num_workers, again.num_stages, again.compile) == ("pipeline", peers, peers, False)
    assert (again.replicas, again.mesh_size, again.zero, again.shards, again.transport) == (1, 1, 0, 0, "grpc")


def test_what_the_run_before_it_had_cut_does_not_count_against_a_limit(tmp_path: Path) -> None:
    first = plan_for((1.0, 0.1), None, rule="pipedream")
    (tmp_path / "plan.toml").write_text(first.text())
    again = plan_for((1.0, 1.0), tmp_path, memory_limit="30MiB")
    assert sizes(again)[0] < sizes(first)[0]


def test_cuts_that_are_as_good_are_kept_so_that_what_is_in_flight_goes_on(tmp_path: Path) -> None:
    """A tanh, of nothing beside a product, is on the other side of the cut."""
    best = plan_for((1.0, 1.0), None, rule="pipedream")
    (end,) = best.stages[0].segments[-1:]
    names = [op.name for op in roundelay.capture(wide(), seed=0).graph.ops]
    other = names[names.index(end) + (1 if end.startswith("linear") else -1)]
    first = plan_for((1.0, 1.0), None, rule="pipedream", cuts=other)
    assert first.stages[0].segments[-1] == other
    (tmp_path / "plan.toml").write_text(first.text())
    assert plan_for((1.0, 1.0), tmp_path).stages[0].segments[-1] == other
    assert plan_for((1.0, 0.1), tmp_path).stages[0].segments[-1] != other


def test_cuts_that_a_machine_has_not_the_memory_for_are_not_kept(tmp_path: Path) -> None:
    first = plan_for((1.0, 1.0), None, rule="pipedream", memory=(10**9, 10**9), cuts="tanh_2")
    (tmp_path / "plan.toml").write_text(first.text())
    assert sizes(plan_for((1.0, 0.6), tmp_path))[0] == sizes(first)[0]
    assert sizes(plan_for((1.0, 0.6), tmp_path, memory=(33 * 2**20, 10**9)))[0] < sizes(first)[0]


def test_another_model_is_another_run_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = roundelay.plan(mlp.make(), workers=2, rule="pipedream")
    (tmp_path / "plan.toml").write_text(plan.text())
    again = plan_for((1.0, 1.0), tmp_path)
    assert again.rule == "ravnest"
    assert "is of another model: its choices are not kept (rule pipedream)" in " ".join(capsys.readouterr().err.split())


def test_each_machine_has_its_own_threads_in_the_plan_or_those_that_are_asked_for() -> None:
    draft = drafted(wide(), Choices(), 2, 0, None, quiet=True)
    offers = [Offer("a" * 16, "0" * 16, 4, 4, 0.1, 0.03, 10**9), Offer("a" * 16, "1" * 16, 16, 16, 0.1, 0.01, 10**9)]
    assert [worker.threads for worker in draft.for_machines(offers).plan.workers] == [4, 16]
    assert [worker.threads for worker in draft.for_machines(offers[::-1]).plan.workers] == [16, 4]
    few = drafted(wide(), Choices(threads=2), 2, 0, None, quiet=True)
    assert [worker.threads for worker in few.for_machines(offers).plan.workers] == [2, 2]
