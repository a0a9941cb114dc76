"""What "PipeOptim: Ensuring Effective 1F1B Schedule with Optimizer-Dependent Weight Prediction" says of its schedule.

The paper counts from 1 and updates after every micro-batch (M = 1): its 5th is our g = 4, and its W_1, the initial
weights, are our version 0. Its GPU of a stage is our worker.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from roundelay.ir.micro_batch import stream
from roundelay.ir.program import Instruction
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.simulator import Interval, Simulation, simulate
from tests.lower.plans import plan_of

D = 4
FIFTH = 4


def run_of(rule: str, micro_batches: int = 1, batches: int = 12, predictor: str = "paper") -> Simulation:
    """A run on four workers; PipeDream and GPipe predict nothing."""
    changes: dict[str, Any] = {"predictor": predictor} if rule == "pipeoptim" else {}
    plan = plan_of(rule, D, micro_batches, backward="stash" if rule != "pipeoptim" else "recompute", **changes)
    return simulate(plan, emit(read(plan)), stream([micro_batches] * batches))


def the(run: Simulation, worker: int, opcode: str, g: int) -> Interval:
    """One forward or backward."""
    (found,) = [i for i in run.intervals_of(worker) if (i.opcode, i.g) == (opcode, g)]
    return found


def paper_version(interval: Interval) -> int:
    """The paper's index of the weights that are live when it runs."""
    return interval.version + 1


def backwards(rule: str) -> list[Instruction]:
    """Each worker's backward instruction."""
    changes: dict[str, Any] = {"predictor": "paper", "backward": "recompute"} if rule == "pipeoptim" else {}
    return [program.body[-2] for program in emit(read(plan_of(rule, D, 1, **changes)))]


def test_figure_1d_the_fifth_goes_forward_on_the_second_to_fifth_weights() -> None:
    """Sect. II-C2: W_2 on GPU 0, W_3 on GPU 1, W_4 on GPU 2 and W_5 on GPU 3."""
    run = run_of("pipedream")
    assert [paper_version(the(run, k, "forward", FIFTH)) for k in range(D)] == [2, 3, 4, 5]


def test_figure_1d_gpu_0_updates_three_times_before_the_fifth_comes_back() -> None:
    """Sect. II-C2: after the backward propagations of 2, 3 and 4 the stage's weights are W_5."""
    run = run_of("pipedream")
    forward, backward = the(run, 0, "forward", FIFTH), the(run, 0, "backward", FIFTH)
    assert paper_version(backward) == 5
    between = [i for i in run.intervals_of(0) if forward.end_s <= i.start_s <= backward.start_s]
    assert [i.g + 1 for i in between if i.opcode == "update"] == [2, 3, 4]


def test_figure_1d_pipedream_stashes_and_figure_1e_pipeoptim_does_not() -> None:
    """PipeDream uses W_2 on GPU 0 for both passes of the 5th; PipeOptim's backward uses the available weights."""
    assert {instruction.weights for instruction in backwards("pipedream")} == {"forward"}
    assert {instruction.weights for instruction in backwards("pipeoptim")} == {"live"}


def test_figure_1e_the_fifth_is_predicted_by_three_two_one_and_not_at_all() -> None:
    """Sect. III: predicted weights 2+3 on GPU 0, 3+2 on GPU 1, 4+1 on GPU 2; backward on W_5 everywhere."""
    run = run_of("pipeoptim")
    forwards = [the(run, k, "forward", FIFTH) for k in range(D)]
    assert [(paper_version(i), i.distance) for i in forwards] == [(2, 3), (3, 2), (4, 1), (5, 0)]
    assert {paper_version(the(run, k, "backward", FIFTH)) for k in range(D)} == {5}


@pytest.mark.parametrize("depth", range(1, 9))
def test_equation_4_the_version_difference_is_depth_minus_rank_minus_one(depth: int) -> None:
    programs = emit(read(plan_of("pipeoptim", depth, 1, predictor="paper")))
    assert [program.body[-3].distance for program in programs] == [str(depth - k - 1) for k in range(depth)]


def test_equation_4_counts_the_updates_that_really_come_between_once_the_pipeline_is_full() -> None:
    """Exact from micro-batch D on, and an over-prediction before: the improved setting counts instead."""
    paper, improved = run_of("pipeoptim"), run_of("pipeoptim", predictor="improved")
    for k in range(D):
        for g in range(12):
            crossed = the(paper, k, "backward", g).version - the(paper, k, "forward", g).version
            assert crossed == min(g, D - 1 - k)
            assert the(improved, k, "forward", g).distance == crossed
            assert (the(paper, k, "forward", g).distance == crossed) == (g >= D - 1 - k)


def test_algorithm_1_predicts_once_per_micro_batch_before_its_forward() -> None:
    """Sect. III-B2: only one prediction, in the forward pass."""
    run = run_of("pipeoptim")
    assert {i.opcode for i in run.intervals if i.distance} == {"forward"}
    for k in range(D - 1):
        assert [i.g for i in run.intervals_of(k) if i.distance] == list(range(12))


@pytest.mark.parametrize(
    ("rule", "versions"), [("pipedream", [4, 3, 2, 1]), ("pipeoptim", [2, 2, 2, 1]), ("gpipe", [1, 1, 1, 1])]
)
def test_table_2_weights_memory(rule: str, versions: list[int]) -> None:
    """PipeDream keeps one to D versions, PipeOptim one to two; GPipe, with no second version, one."""
    assert [report.versions_held_peak for report in run_of(rule).workers] == versions


def test_figure_1b_gpipe_splits_a_batch_in_four_and_idles_at_every_flush() -> None:
    run = run_of("gpipe", micro_batches=4, batches=3)
    assert run.bubble == pytest.approx(3 / 7)


def test_figure_1c_gpipe_with_one_micro_batch_is_the_naive_approach() -> None:
    """Sect. II-C1: one worker works at a time."""
    run = run_of("gpipe", micro_batches=1, batches=3)
    assert run.bubble == pytest.approx(3 / 4)
    busy = sorted((i.start_s, i.end_s) for i in run.intervals if i.end_s > i.start_s)
    assert all(before[1] <= after[0] for before, after in pairwise(busy))


def test_figure_1d_the_bubble_of_1f1b_vanishes_as_the_run_goes_on() -> None:
    """Sect. II-C2: a bubble ratio of about 0 %."""
    bubbles = [run_of("pipedream", batches=batches).bubble for batches in (4, 40, 400)]
    assert bubbles == [pytest.approx((D - 1) / (batches + D - 1)) for batches in (4, 40, 400)]
    assert bubbles[-1] < 0.01


def test_pipeoptim_keeps_pipedream_s_timeline() -> None:
    """Both adopt the 1F1B schedule; without repeated forwards they take the same time to the end."""
    plans = [plan_of(rule, D, 1, backward=mode) for rule, mode in (("pipedream", "stash"), ("pipeoptim", "mixed"))]
    first, second = (simulate(plan, emit(read(plan)), stream([1] * 12)) for plan in plans)
    places = [[(i.worker, i.opcode, i.g, i.start_s, i.end_s) for i in run.intervals] for run in (first, second)]
    assert places[0] == places[1]
