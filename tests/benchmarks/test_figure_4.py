"""Figure 4 of Cyclic Data Parallelism: what its benchmark counts is what tapes of a run hold, and halves are halves."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import nn

import roundelay
from benchmarks.cdp import figure_4
from benchmarks.cdp.figure_4 import Batch, Network, job, network, staged
from benchmarks.cdp.figure_4_memory import Memory, in_time, kept_by_tapes, measured, simulated, staggered
from benchmarks.cdp.figure_4_picture import picture
from benchmarks.networks.resnet import Bottleneck, residual
from benchmarks.networks.vit import vit
from roundelay.frontend import Captured
from roundelay.frontend.stages.stage_function import StageFunction, StageTape
from roundelay.ir.graph import Profile
from roundelay.planner.choose_cuts import FLOPS, MEMORY_TIME
from roundelay.planner.kept_bytes import kept_bytes
from roundelay.planning import profiling
from roundelay.planning.profiling import saved_storages
from roundelay.session.training import Length, Session

CLASSES, SIDE, ROWS = 10, 32, 2
NETWORKS = {
    "residual": partial(residual, Bottleneck, (1, 2, 1, 1), CLASSES, width=8),
    "vision transformer": partial(vit, CLASSES, side=SIDE, width=32, layers=2, heads=2),
}

INEXACT = {"residual": 0, "vision transformer": 4 * ROWS * ((SIDE // 16) ** 2 + 1) * 32}
"""Bytes by which a stage may keep more than planned: the tokens once more, where a cut goes through an attention."""


@pytest.fixture(autouse=True)
def times_of_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations take as long as their FLOPs say; nothing is kept for other tests."""
    monkeypatch.setenv("ROUNDELAY_CACHE", "none")

    def measure(captured: Captured, micro_batch: Any) -> Profile:
        seconds = (*(op.flops / 1e9 for op in captured.graph.ops), 0.0)
        return Profile(seconds, seconds, (0.0,) * len(seconds))

    monkeypatch.setattr(profiling, "measure_operations", measure)


def images(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 3, SIDE, SIDE, generator=generator), torch.arange(rows) % CLASSES


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS[name]()


class Held:
    """What the tapes of a run hold at any time, all together, and of which stages they are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tapes: dict[int, tuple[int, StageTape]] = {}
        self.stages: dict[int, int] = {}
        self.found: list[tuple[list[int], int]] = []
        self.forward, self.backward = StageFunction.forward, StageFunction.backward
        monkeypatch.setattr(StageFunction, "forward", lambda *args, **options: self.run(*args, **options))
        monkeypatch.setattr(StageFunction, "backward", lambda *args: self.release(*args))

    def run(
        self, function: StageFunction, weights: Any, buffers: Any, inputs: Mapping[str, Any], *args: Any, **options: Any
    ) -> Any:
        """With micro-batches in memory of their own: they are views of the batch, which the reader holds anyway."""
        own = {name: value.clone() if is_view(value) else value for name, value in inputs.items()}
        outputs, tape = self.forward(function, weights, buffers, own, *args, **options | {"measure": True})
        stage = self.stages.setdefault(id(function), len(self.stages))
        self.tapes[id(tape)] = stage, tape
        storages = {
            at: size for _, held in self.tapes.values() for part in held.tapes for at, size in part.storages.items()
        }
        self.found.append((sorted(stage for stage, _ in self.tapes.values()), sum(storages.values())))
        return outputs, tape

    def release(self, function: StageFunction, tape: StageTape, *args: Any) -> Any:
        gradients = self.backward(function, tape, *args)
        del self.tapes[id(tape)]
        return gradients


def is_view(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.nbytes


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("way", [FLOPS, MEMORY_TIME])
def test_tapes_of_a_run_hold_as_many_bytes_as_were_counted(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with 4 staggered micro-batches, over 3 updates; at every forward of any stage."""
    size, train = 4, job(made(name), images(4 * ROWS))
    captured = roundelay.capture(train)
    plan = roundelay.plan(
        train, captured=captured, layout="single", rule="cdp-v1", micro_batches=size, stages=size, cuts=way
    )
    by_stage = kept_by_tapes(captured, [stage.segments for stage in plan.stages], images(ROWS))
    held = Held(monkeypatch)
    Session(train, captured, plan, 0, Length(steps=3)).run(notify=lambda event: None)
    counted = [sum(by_stage[stage] for stage in stages) for stages, _ in held.found]
    assert len(counted) == 3 * size * size
    assert max(counted) > sum(by_stage) * size * 0.3
    assert counted == [num_bytes for _, num_bytes in held.found]
    kept = kept_bytes(captured.graph, saved_storages(captured, images(ROWS)), shared=True)
    ends = [captured.graph.index(stage.segments[-1]) + 1 for stage in plan.stages[:-1]]
    planned = [kept.of_stage(*places) for places in pairwise((0, *ends, len(captured.graph.ops) + 1))]
    assert planned == pytest.approx(by_stage, abs=INEXACT[name])


def own_chain(size: int) -> Network:
    """Eight equal layers for each stage, whose input is small."""
    torch.manual_seed(0)
    layers = [part for _ in range(8 * size) for part in (nn.Linear(32, 32), nn.Tanh())]
    return network(nn.Sequential(nn.Linear(1, 32), *layers), (torch.randn(ROWS, 1), torch.arange(ROWS)))


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("way", [FLOPS, MEMORY_TIME])
def test_of_equal_layers_the_reduction_is_the_ideal_one(size: int, way: str) -> None:
    """Within 2 % of (N - 1) / 2N; in a run in which stages take almost equal times within 5 %."""
    found = staged(own_chain(size), size, way)
    assert found.planned == found.kept
    ideal = (size - 1) / (2 * size)
    assert found.counted == pytest.approx(ideal, rel=0.02)
    assert found.dp.saved_of(found.together) == pytest.approx(ideal, rel=0.05)


def test_of_a_residual_network_less_is_held_than_with_equal_flops_at_about_the_same_speed() -> None:
    own = network(made("residual"), images(ROWS))
    by_flops, chosen = (staged(own, 4, way) for way in (FLOPS, MEMORY_TIME))
    assert chosen.counted > by_flops.counted + 0.01
    assert chosen.slowest <= 1.1


def test_a_curve_with_equal_stages_is_reduced_to_the_ideal_by_the_paper_s_method() -> None:
    for size in (2, 3, 8):
        levels = [*range(1, size + 1), *range(size, 0, -1)]
        curve = Memory(2.0 * size, [(float(step), float(level)) for step, level in enumerate(levels)])
        assert staggered(curve, size).saved_of(curve) == pytest.approx((size - 1) / (2 * size))
        assert staggered(curve, 1).points[0] == curve.points[0]
        assert staggered(curve, 1).peak == curve.peak


def test_staggered_curves_add_up_at_every_time() -> None:
    curve = Memory(10.0, [(0.0, 0.0), (1.0, 5.0), (2.5, 2.0), (7.0, 9.0), (9.5, 1.0)])

    def at(memory: Memory, time: float) -> float:
        return [held for start, held in memory.points if start <= time % 10.0][-1]

    found = staggered(curve, 4)
    for time in (0.1, 0.7, 1.3, 3.3, 5.9, 8.1, 9.9):
        assert at(found, time) == pytest.approx(sum(at(curve, time + 2.5 * i) for i in range(4)) / 4)


def test_memory_is_measured_as_it_is_given_out() -> None:
    def step() -> None:
        first = torch.empty(1 << 20, dtype=torch.uint8)
        second = torch.empty(3 << 20, dtype=torch.uint8)
        del first
        del second

    found = measured(step, 3)
    assert [held for _, held in found.points] == [0, 1 << 20, 4 << 20, 3 << 20, 0]
    assert [time for time, _ in found.points] == sorted(time for time, _ in found.points)


def test_a_run_is_slower_where_the_first_stage_is_and_holds_its_bytes_longer() -> None:
    """Two stages of which one keeps much; in steps of equal length the totals are the same at all times."""
    even = Profile((1.0, 1.0), (1.0, 1.0), (0.0, 0.0))
    found = simulated(in_time("dp", "cdp-v1", (0, 1, 2), [30, 10], even))
    assert {held for _, held in found.points} == {35.0, 30.0, 20.0} | {held for _, held in found.points} & {25.0, 15.0}
    assert found.peak == (2 * 30 + 10) / 2
    assert found.period_s == 4.0


def test_the_picture_shows_every_curve() -> None:
    curve = Memory(1.0, [(share / 10, held) for share, held in enumerate(accumulate([1e6] * 9))])
    panels = [(f"panel {i}", {"together": curve, "N = 2": staggered(curve, 2)}) for i in range(3)]
    root = ET.fromstring(picture(panels))
    paths = [element for element in root.iter() if element.get("data-name") in {"together", "N = 2", "half"}]
    assert len(paths) == 3 * 3
    assert [title for i in range(3) if (title := f"panel {i}") not in "".join(root.itertext())] == []


def test_the_table_has_a_row_for_each_number_and_way(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Any
) -> None:
    monkeypatch.setattr(figure_4, "NETWORKS", {"ResNet-50": NETWORKS["residual"]})
    monkeypatch.setattr(figure_4, "SIDE", SIDE)
    monkeypatch.setattr(figure_4, "CLASSES", CLASSES)
    monkeypatch.setattr(
        "sys.argv", ["figure_4", "--sizes", "2", "4", "--repeats", "1", "--picture", str(tmp_path / "p.svg")]
    )
    figure_4.main()
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ResNet-50")]
    assert [(row[1], row[2], row[5]) for row in rows] == [
        ("2", "25.0%", FLOPS),
        ("2", "25.0%", MEMORY_TIME),
        ("4", "37.5%", FLOPS),
        ("4", "37.5%", MEMORY_TIME),
    ]
    assert (tmp_path / "p.svg").read_text().count("staggered, N = 4") >= 2
