"""Better cuts for the best pipelines of a search, by the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundelay.errors import RoundelayError
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_options import Choices
from roundelay.search.search import Task, Tried, search, tried
from roundelay.search.shifted_cuts import LESS, with_shifted_cuts
from roundelay.search.space import space
from tests.planner.test_priced import Perceptron, Transformer, facts_of
from tests.search.test_search import drawn


@pytest.fixture(scope="module")
def models() -> list[ModelFacts]:
    return [facts_of(kind, "fp32") for kind in (Perceptron, Transformer)]


def elsewhere(task: Task, one: Tried, given: Choices) -> list[float]:
    """Seconds of a batch of a plan of two stages, with the cut at each place."""
    found = []
    for place in task.facts.graph.cuts:
        try:
            found.append(tried(task, replace(given, cuts=task.facts.graph.ops[place].name)).batch_s)
        except RoundelayError:
            continue
    return found


def test_two_stages_are_cut_where_no_other_cut_is_better(models: list[ModelFacts]) -> None:
    improved = 0
    for seed in range(6):
        facts, machine, _ = drawn(models, seed)
        task, pins = (
            Task(facts, machine, 2),
            Choices(rule="1f1b", micro_batches=4, transport="memory", recompute="none"),
        )
        points = [one for one in space(pins, facts, machine, 2) if one.workers == 2]
        before = search(task, points)
        after = with_shifted_cuts(task, before)
        best, was = after.best[0], before.best[0]
        assert best.batch_s <= was.batch_s
        assert list(after.best) == sorted(after.best, key=lambda one: one.batch_s)
        assert after.families["pipeline"] == best
        assert LESS * best.batch_s <= min(elsewhere(task, best, was.choices))
        assert (best.choices.cuts is None) == (best.batch_s == was.batch_s)
        improved += best.batch_s < was.batch_s
    assert improved


def test_cuts_that_are_given_stay_and_memory_is_kept(models: list[ModelFacts]) -> None:
    facts, machine, _ = drawn(models, 1)
    name = facts.graph.ops[facts.graph.cuts[0]].name
    given = search(Task(facts, machine, 2), [Choices(rule="1f1b", workers=2, micro_batches=4, cuts=name)])
    assert with_shifted_cuts(Task(facts, machine, 2), given) == given
    free = search(Task(facts, machine, 2, memory=1 << 40), [Choices(rule="1f1b", workers=2, micro_batches=4)])
    held = free.best[0].memory
    after = with_shifted_cuts(Task(facts, machine, 2, memory=held), free)
    assert held is not None
    assert after.best[0].memory is not None
    assert after.best[0].memory <= held


def test_a_pipeline_that_was_only_the_best_of_its_kind_is_among_the_best_once_it_is_faster(
    models: list[ModelFacts],
) -> None:
    for seed in range(6):
        facts, machine, _ = drawn(models, seed)
        task = Task(facts, machine, 2)
        found = search(task, [Choices(rule="1f1b", workers=2, micro_batches=4, transport="memory", recompute="none")])
        alone = replace(found.best[0], choices=replace(found.best[0].choices, cuts="as given"))
        after = with_shifted_cuts(task, replace(found, best=(alone,)))
        assert after.best[0].batch_s == with_shifted_cuts(task, found).best[0].batch_s, seed
