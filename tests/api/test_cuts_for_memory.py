"""Cuts by FLOPs, and for few activations at one time: what is counted is what tapes hold, and plans are cut by it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import roundelay
from roundelay.frontend import Captured
from roundelay.frontend.batch import split
from roundelay.frontend.stages.keyed_rng import RngKey
from roundelay.frontend.stages.stage_function import StageTape
from roundelay.ir.graph import Profile
from roundelay.ir.plan import Plan
from roundelay.job import Job
from roundelay.lower.partition import partition
from roundelay.planner.cut_reasons import most_at_one_time
from roundelay.planner.kept_bytes import KeptBytes, kept_bytes
from roundelay.planner.partition_dp import names_of
from roundelay.planner.plan_options import Choices
from roundelay.planning import profiling
from roundelay.planning.planning import plan_with_reasons
from roundelay.planning.profiling import saved_storages
from roundelay.planning.stage_profiler import profile
from tests.api.jobs import Tied, make, tokens

SEED = 0


class Images(nn.Module):
    """Convolutions and norms beside a way past them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, 1, 1), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 4, 3, 1, 1), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows x 6 to rows x 3."""
        x = self.first(x.view(-1, 1, 2, 3))
        x = x + torch.relu(self.second(torch.relu(self.norm(x))))
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


JOBS: dict[str, Job] = {
    "linear": make(),
    "tied": make(Tied(), batches=tokens),
    "images": make(Images()),
}


def chain(layers: int) -> Job:
    """Equal layers, whose input is small."""
    torch.manual_seed(SEED)
    middle = [part for _ in range(layers) for part in (nn.Linear(64, 64), nn.Tanh())]
    return make(nn.Sequential(nn.Linear(6, 64), *middle, nn.Linear(64, 3)))


class Narrowing(nn.Module):
    """Four stretches of convolutions with the same FLOPs, of which each keeps half as much as the one before."""

    def __init__(self) -> None:
        super().__init__()
        widths = [1, *(width for width in (4, 8, 16, 32) for _ in range(12))]
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, 1, 1) for a, b in itertools.pairwise(widths))
        self.head = nn.Linear(widths[-1], 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows x 1 x 16 x 16 to rows x 3."""
        for place, layer in enumerate(self.layers):
            x = torch.relu(layer(nn.functional.avg_pool2d(x, 2) if place in (12, 24, 36) else x))
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


def images(epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One batch of eight."""
    yield torch.randn(8, 1, 16, 16, generator=torch.Generator().manual_seed(epoch)), torch.arange(8) % 3


@pytest.fixture
def times_of_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations take as long as their FLOPs say; nothing is kept for other tests."""
    monkeypatch.setenv("ROUNDELAY_CACHE", "none")

    def measure(captured: Captured, micro_batch: Any) -> Profile:
        seconds = (*(op.flops / 1e9 for op in captured.graph.ops), 0.0)
        return Profile(seconds, seconds, (0.0,) * len(seconds))

    monkeypatch.setattr(profiling, "measure_operations", measure)


def some_cuts(kept: KeptBytes, count: int) -> list[tuple[int, ...]]:
    chosen, inner = random.Random(SEED), kept.boundaries[1:-1]
    picked = [sorted(chosen.sample(inner, chosen.randint(0, min(4, len(inner))))) for _ in range(count)]
    return [(0, *places, kept.boundaries[-1]) for places in picked]


@pytest.mark.parametrize("name", JOBS)
def test_stages_are_counted_to_keep_what_their_tapes_hold(name: str) -> None:
    """Wherever the cuts are, and whatever the later stages share with earlier ones of the same worker."""
    captured, micro_batch = roundelay.capture(JOBS[name]), next(iter(JOBS[name].batches(0)))
    graph, storages = captured.graph, saved_storages(captured, micro_batch)
    apart, shared = (kept_bytes(graph, storages, shared=one) for one in (False, True))
    for places in some_cuts(apart, 12):
        stages = partition(graph, [[end] for end in names_of(graph, places)])
        tapes = [found.tape_bytes for found in profile(captured, stages, micro_batch, "stash", repeats=1)]
        assert [apart.of_stage(*ends) for ends in itertools.pairwise(places)] == tapes
        held = held_on_one_worker(captured, [[end] for end in names_of(graph, places)], micro_batch)
        assert [shared.of_stage(*ends) for ends in itertools.pairwise(places)] == held


def held_on_one_worker(captured: Captured, ends: Sequence[Sequence[str]], micro_batch: Any) -> list[int]:
    """Run the forwards of all stages, one after the other, and return what each holds that no earlier one does."""
    values: dict[str, Any] = dict(captured.values(micro_batch))
    buffers, seen, found = {n: b.clone() for n, b in captured.buffers().items()}, set[int](), []
    weights, tapes = {n: p.detach() for n, p in captured.parameters().items()}, list[StageTape]()
    for stage in partition(captured.graph, ends).stages:
        function = captured.stage(stage)
        own = {n: weights[n] for n in stage.parameters}
        inputs = {n: values[n] for n in function.inputs}
        outputs, tape = function.forward(own, buffers, inputs, RngKey(0, 0), mode="stash", measure=True)
        values.update(outputs)
        tapes.append(tape)  # alive, as in a run, so that no address is used twice
        held = {address: size for part in tape.tapes for address, size in part.storages.items()}
        found.append(sum(size for address, size in held.items() if address not in seen))
        seen |= held.keys()
    return found


def test_what_runs_again_is_not_kept() -> None:
    job = chain(4)
    captured, micro_batch = roundelay.capture(job), next(iter(job.batches(0)))
    graph, storages = captured.graph, saved_storages(captured, micro_batch)
    everything = kept_bytes(graph, storages, shared=False, again=[range(len(graph.ops) + 1)])
    for places in some_cuts(everything, 6):
        stages = partition(graph, [[end] for end in names_of(graph, places)])
        tapes = [found.tape_bytes for found in profile(captured, stages, micro_batch, "recompute", repeats=1)]
        counted = [everything.of_stage(*ends) for ends in itertools.pairwise(places)]
        assert counted == tapes


def ends(plan: Plan) -> list[str]:
    return [stage.segments[-1] for stage in plan.stages]


def peak(captured: Captured, micro_batch: Any, plan: Plan, size: int) -> float:
    """Of staggered micro-batches, as a share of what they keep together in the whole model."""
    kept = kept_bytes(captured.graph, saved_storages(captured, micro_batch), shared=True)
    places = (0, *(captured.graph.index(name) + 1 for name in ends(plan)[:-1]), len(captured.graph.ops) + 1)
    return most_at_one_time(kept, places, size) / (size * kept.whole)


@pytest.mark.usefixtures("times_of_flops")
def test_less_is_kept_at_one_time_than_with_other_cuts() -> None:
    """Of 4 micro-batches of 2 rows."""
    job = make(Narrowing(), batches=images)
    captured, two_rows = roundelay.capture(job), split(next(iter(job.batches(0))), 4)[0]
    choices: dict[str, Any] = {"layout": "single", "rule": "cdp-v1", "micro_batches": 4, "stages": 4}
    plans = {
        way: plan_with_reasons(job, Choices(cuts=way, **choices), captured=captured)
        for way in ("memory-time", "equal", "flops", "measured")
    }
    shares = {way: peak(captured, two_rows, made.plan, 4) for way, made in plans.items()}
    assert shares["memory-time"] < 0.97 * min(shares[way] for way in ("equal", "flops", "measured"))
    told = " ".join(plans["memory-time"].reasons)
    assert f"{shares['memory-time']:.1%} of what they keep together" in told
    assert "10% slower" in told
    assert "with equal" in told
    assert "with flops" in told


@pytest.mark.usefixtures("times_of_flops")
@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("way", ["memory-time", "flops"])
def test_of_equal_layers_about_half_is_kept_at_one_time(size: int, way: str) -> None:
    """Within 2 % of (N + 1) / 2N (Cyclic Data Parallelism, Sect. 4.1)."""
    job = chain(8 * size)
    captured = roundelay.capture(job)
    plan = roundelay.plan(
        job, captured=captured, cuts=way, layout="single", rule="cdp-v1", micro_batches=size, stages=size
    )
    one_row = split(next(iter(job.batches(0))), size)[0]
    assert peak(captured, one_row, plan, size) == pytest.approx((size + 1) / (2 * size), rel=0.02)


@pytest.mark.usefixtures("times_of_flops")
def test_workers_of_their_own_keep_what_they_hand_on_twice() -> None:
    job = chain(8)
    captured = roundelay.capture(job)
    told = {
        layout: plan_with_reasons(job, Choices(cuts="memory-time", rule="cdp-v1", **choices), captured=captured).reasons
        for layout, choices in {
            "pipeline": {"workers": 4, "micro_batches": 4},
            "mp": {"layout": "mp", "micro_batches": 4},
            "single": {"layout": "single", "micro_batches": 4},
        }.items()
    }
    assert told["pipeline"] == told["mp"]
    assert told["pipeline"] != told["single"]


@pytest.mark.usefixtures("times_of_flops")
def test_where_steps_are_not_equal_or_nothing_is_staggered_that_is_said() -> None:
    job = chain(8)
    captured = roundelay.capture(job)
    for choices, word in (
        ({"layout": "dp", "rule": "cdp-v2"}, "own pace"),
        ({"layout": "single", "rule": "gpipe"}, "not staggered"),
    ):
        made = plan_with_reasons(job, Choices(cuts="memory-time", micro_batches=2, **choices), captured=captured)
        assert word in made.reasons[-1]


def test_equal_flops_are_cut_behind_layers_and_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(profiling, "measure_operations")
    torch.manual_seed(SEED)
    widths = [6, *(480 // (i + 1) for i in range(12)), 3]
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    job = make(nn.Sequential(*layers[:-1]))
    captured = roundelay.capture(job)
    made = plan_with_reasons(job, Choices(cuts="flops", workers=3), captured=captured)
    assert all(name.startswith("tanh") for name in ends(made.plan)[:-1])
    places = [0, *(captured.graph.index(name) + 1 for name in ends(made.plan))]
    flops = [sum(op.flops for op in captured.graph.ops[a:b]) for a, b in itertools.pairwise(places)]
    assert max(flops) < 0.6 * sum(flops)
    assert f"{flops[0] / sum(flops):.1%} of a forward" in " ".join(made.reasons)
    assert ends(made.plan) != ends(roundelay.plan(job, captured=captured, cuts="equal", workers=3))
