"""Where a job is cut: measured once and kept, or as it is said."""

from __future__ import annotations

import itertools
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import roundelay
from roundelay import env
from roundelay.errors import CaptureError, PlanError, UserCodeError
from roundelay.frontend import Captured
from roundelay.ir.graph import Profile
from roundelay.ir.plan import Plan
from roundelay.planner import choose_cuts
from roundelay.planner.cost_model import boundaries_of, forward_seconds
from roundelay.planner.plan_options import Choices
from roundelay.planning import profiling
from roundelay.planning.piece_profiler import measure_pieces
from roundelay.planning.planning import plan_with_reasons
from tests.api.jobs import Tied, loss, make, tokens

JOB = make()


@pytest.fixture(scope="module")
def captured() -> Captured:
    return roundelay.capture(JOB)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("ROUNDELAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "profiles"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Profile]:
    """What is measured, one after the other: other operations are heavy every time."""
    made: list[Profile] = []

    def measure(captured: Captured, micro_batch: Any) -> Profile:
        n = len(captured.graph.ops) + 1
        heavy = len(made) % n
        seconds = tuple(1.0 if i == heavy else 1e-3 for i in range(n))
        made.append(Profile(seconds, seconds, (0.0,) * n, (0.0,) * n))
        return made[-1]

    monkeypatch.setattr(profiling, "measure_operations", measure)
    return made


def ends(plan: Plan) -> list[str]:
    return [stage.segments[-1] for stage in plan.stages]


def told(reasons: tuple[str, ...]) -> str:
    return " ".join(reasons)


def test_a_job_is_measured_once_and_then_cut_in_the_same_way(
    captured: Captured, cache: Path, measured: list[Profile]
) -> None:
    first, again = (plan_with_reasons(JOB, Choices(workers=3), captured=captured) for _ in range(2))
    assert len(measured) == 1
    assert ends(first.plan) == ends(again.plan)
    assert "measured on this machine now, and kept" in told(first.reasons)
    assert "at an earlier plan" in told(again.reasons)
    assert "the slowest" in told(first.reasons)
    assert "times the slowest" in told(first.reasons)
    assert "--cuts" in told(first.reasons)
    assert str(next(cache.iterdir())) in told(again.reasons)


def test_another_size_of_micro_batch_is_measured_for_itself_and_another_mode_is_not(
    captured: Captured, cache: Path, measured: list[Profile]
) -> None:
    for backward in ("stash", "recompute"):
        roundelay.plan(JOB, captured=captured, workers=2, backward=backward)
    assert len(measured) == 1
    roundelay.plan(JOB, captured=captured, workers=2, micro_batches=4)
    assert len(measured) == len(list(cache.iterdir())) == 2


def test_a_damaged_file_is_measured_anew(captured: Captured, cache: Path, measured: list[Profile]) -> None:
    roundelay.plan(JOB, captured=captured, workers=2)
    (path,) = cache.iterdir()
    path.write_text("{")
    made = plan_with_reasons(JOB, Choices(workers=2), captured=captured)
    assert len(measured) == 2
    assert "and kept" in told(made.reasons)


@pytest.mark.parametrize("cache_in", ["none", "file"])
def test_where_nothing_can_be_kept_that_is_said(
    captured: Captured, measured: list[Profile], cache_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROUNDELAY_CACHE", "none" if cache_in == "none" else str(tmp_path / "file"))
    for _ in range(2):
        made = plan_with_reasons(JOB, Choices(workers=2), captured=captured)
        assert "the next plan may be cut elsewhere" in told(made.reasons)
    assert len(measured) == 2


def test_only_measured_cuts_measure(captured: Captured, cache: Path, measured: list[Profile]) -> None:
    stages = [ends(roundelay.plan(JOB, captured=captured, workers=2, cuts=how)) for how in ("roofline", "equal")]
    roundelay.plan(JOB, captured=captured, workers=1)
    assert all(len(names) == 2 for names in stages)
    assert measured == []


def test_equal_cuts_have_equal_numbers_of_operations(captured: Captured) -> None:
    plan = roundelay.plan(JOB, captured=captured, workers=3, cuts="equal")
    places = [-1, *(captured.graph.index(name) for name in ends(plan))]
    sizes = [after - before for before, after in itertools.pairwise(places)]
    assert sum(sizes) == len(captured.graph.ops)
    assert max(sizes) - min(sizes) <= 1


def test_names_cut_behind_their_operations_and_the_last_one_may_be_left_out(captured: Captured) -> None:
    names = [captured.graph.ops[cut].name for cut in captured.graph.cuts[1:6:4]]
    last = captured.graph.ops[-1].name
    for text in (", ".join(names), ",".join([*names, last])):
        made = plan_with_reasons(JOB, Choices(cuts=text, micro_batches=1), captured=captured)
        assert ends(made.plan) == [*names, last]
        assert made.reasons == ("cuts: as given",)
    listed = roundelay.plan(JOB, captured=captured, cuts=[[names[0]], [names[1], last]], workers=2)
    assert [stage.segments for stage in listed.stages] == [(names[0],), (names[1], last)]


WRONG: dict[str, tuple[Any, int | None, str]] = {
    "a name misspelt": ("linea_1", None, "linear_1"),
    "a way misspelt": ("mesured", None, "measured"),
    "no name": ("linear,,linear_2", None, "no operation"),
    "nothing": ("", None, "no operation"),
    "too many": ("linear,linear_1", 2, "3 stages"),
    "out of order": ("linear_1,linear", None, "out of order"),
    "the same twice": ("linear,linear", None, "out of order"),
    "a flat list": (["linear", "linear_1"], None, "for every stage"),
    "an empty list": ([], None, "no segment"),
}


@pytest.mark.parametrize("what", WRONG)
def test_cuts_that_cannot_be_had_are_refused(captured: Captured, what: str) -> None:
    asked, workers, word = WRONG[what]
    with pytest.raises(PlanError, match=word):
        roundelay.plan(JOB, captured=captured, cuts=asked, workers=workers)


@pytest.mark.parametrize("how", choose_cuts.WAYS)
def test_too_many_workers_are_refused_before_anything_is_measured(
    captured: Captured, measured: list[Profile], how: str
) -> None:
    with pytest.raises(CaptureError, match="at most"):
        roundelay.plan(JOB, captured=captured, workers=99, cuts=how)
    assert measured == []


def test_a_loss_that_cannot_be_measured_is_told_as_the_person_s_own(cache: Path) -> None:
    captured_before: list[bool] = []

    def once(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        if captured_before:
            raise RuntimeError("no more")
        return loss(outputs, batch)

    job = make(loss=once)
    captured = roundelay.capture(job)
    captured_before.append(True)
    with pytest.raises(UserCodeError, match="no more"):
        roundelay.plan(job, captured=captured, workers=2)


def test_a_parameter_used_twice_is_measured_and_cut(cache: Path) -> None:
    job = make(Tied(), batches=tokens)
    plan = roundelay.plan(job, workers=3)
    assert len(plan.stages) == 3
    assert any(edge.backward_bytes >= 7 * 8 * 4 for edge in plan.edges if edge.target == 2)


HOMES: dict[str, tuple[dict[str, str], Path | None]] = {
    "home": ({"HOME": "/h"}, Path("/h/.cache/roundelay")),
    "the standard's variable": ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, Path("/x/roundelay")),
    "a relative one, which the standard ignores": ({"HOME": "/h", "XDG_CACHE_HOME": "x"}, Path("/h/.cache/roundelay")),
    "our own": ({"HOME": "/h", "XDG_CACHE_HOME": "/x", "ROUNDELAY_CACHE": "here"}, Path("here")),
    "none": ({"HOME": "/h", "ROUNDELAY_CACHE": "none"}, None),
    "no home": ({}, None),
}


@pytest.mark.parametrize("where", HOMES)
def test_the_cache_lies_where_it_was_said(where: str) -> None:
    environment, folder = HOMES[where]
    assert env.cache_folder(environment) == folder


def test_the_settings_of_malloc_belong_to_a_profile() -> None:
    name = next(iter(env.MALLOC))
    assert env.malloc_settings({name: "1", "OTHER": "2"}) == {name: "1"}


def test_pieces_are_measured_whole_and_divided_among_their_operations(captured: Captured) -> None:
    graph, bounds = captured.graph, boundaries_of(captured.graph)
    profile = measure_pieces(captured, next(iter(JOB.batches(0))), torch.device("cpu"))
    for part in (profile.forward_s, profile.backward_s, profile.update_s):
        assert len(part) == len(graph.ops) + 1
    for start, stop in pairwise(bounds):
        known = [forward_seconds(graph, op) for op in graph.ops[start:stop]]
        own = profile.forward_s[start : start + len(known)]
        assert min(own) > 0
        assert [a / own[0] for a in own] == pytest.approx([a / known[0] for a in known])
