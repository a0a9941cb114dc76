"""The search against brute force, against what an expert would try, and its bounds against the simulator."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from roundelay.errors import PlanError, RoundelayError
from roundelay.finals.search_plan import busy_notices
from roundelay.ir.graph import Profile
from roundelay.planner.model_facts import AtRows, ModelFacts
from roundelay.planner.plan_options import Choices
from roundelay.planner.source import Hardware
from roundelay.search.baselines import baselines
from roundelay.search.bounds import Bounds
from roundelay.search.search import Task, Tried, search, tried
from roundelay.search.space import family, space
from tests.planner.test_priced import Images, Perceptron, Transformer, facts_of
from tests.search.small_models import DrawnModel


@pytest.fixture(scope="module")
def models() -> list[ModelFacts]:
    return [facts_of(kind, "fp32") for kind in (Perceptron, Transformer, Images)]


def drawn(models: list[ModelFacts], seed: int) -> tuple[ModelFacts, Hardware, int]:
    """A model whose operations take other seconds, a machine, and a number of workers."""
    chance = random.Random(seed)
    facts, scale = chance.choice(models), 10 ** chance.uniform(-5, -1)

    def seconds(count: int, of_rows: float) -> tuple[float, ...]:
        return tuple([scale * of_rows * chance.random() ** 3 for _ in range(count)])

    measured = [
        replace(one, profile=Profile(*(seconds(len(part), one.rows**0.7) for part in columns(one.profile))))
        for one in facts.measured
    ]
    return replace(facts, measured=tuple(measured)), Hardware(8, 8), chance.choice((2, 2, 3, 4))


def columns(profile: Profile) -> list[Any]:
    return [profile.forward_s, profile.backward_s, profile.update_s]


def all_tried(task: Task, points: tuple[Choices, ...]) -> list[Tried]:
    """Brute force."""
    found = []
    for point in points:
        try:
            found.append(tried(task, point))
        except RoundelayError:
            continue
    return found


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_what_brute_force_finds(models: list[ModelFacts], seed: int) -> None:
    facts, machine, _ = drawn(models, seed)
    task, points = Task(facts, machine, 2), space(Choices(), facts, machine, 2)
    every = all_tried(task, points)
    found = search(task, points, kept=3)
    assert [one.batch_s for one in found.best] == sorted(one.batch_s for one in every)[:3]
    for name, one in found.families.items():
        assert one.batch_s == min(other.batch_s for other in every if family(other.choices) == name)
    assert set(found.families) == {family(one.choices) for one in every}
    assert found.simulated <= found.points == len(points)
    assert found.bound_s <= min(one.batch_s for one in every if one.choices.layout is None)
    assert found.gap == pytest.approx((found.best[0].batch_s - found.bound_s) / found.best[0].batch_s)


@pytest.mark.parametrize("seed", range(20, 26))
def test_no_plan_undercuts_its_bound(models: list[ModelFacts], seed: int) -> None:
    facts, machine, workers = drawn(models, seed)
    bounds, points = Bounds(facts, machine), space(Choices(), facts, machine, workers)
    for one in all_tried(
        Task(facts, machine, workers), tuple(random.Random(seed).sample(points, min(25, len(points))))
    ):
        assert bounds.least_s(one.choices) <= one.batch_s, one.choices


@pytest.mark.parametrize("seed", range(40, 44))
def test_the_search_is_never_worse_than_an_expert(models: list[ModelFacts], seed: int) -> None:
    facts, machine, workers = drawn(models, seed)
    task = Task(facts, machine, workers)
    found = search(task, space(Choices(), facts, machine, workers))
    names = baselines(Choices(), machine, workers)
    assert {"one process", "data parallel", "ZeRO-3", "Megatron", "pipeline"} <= set(names)
    alike = all(one.kind == "mean" for one in facts.divisible.values())
    for name, choices in names.items():
        for one in all_tried(task, (choices,)) if alike or choices.data_parallel is None else ():
            assert found.best[0].batch_s <= one.batch_s, name


def test_what_is_given_is_kept(models: list[ModelFacts]) -> None:
    given = Choices(rule="pipedream", data_parallel=2, transport="shm", threads=3)
    points = space(given, models[0], Hardware(8, 8), 4)
    assert points
    for one in points:
        assert (one.rule, one.data_parallel, one.transport, one.threads) == ("pipedream", 2, "shm", 3)
        assert one.micro_batches is None, "another number would train otherwise"


def test_a_loss_that_is_no_mean_keeps_whole_batches(models: list[ModelFacts]) -> None:
    facts = models[0]
    other = {n: replace(one, kind="other") for n, one in facts.divisible.items()}
    assert {one.micro_batches for one in space(Choices(), facts, Hardware(4, 4), 2)} > {1, 2}
    points = space(Choices(), replace(facts, divisible=other), Hardware(4, 4), 2)
    assert {one.micro_batches for one in points} == {1}
    assert {(one.data_parallel, one.layout) for one in points} == {(None, None)}, "replicas would train otherwise"
    asked = space(Choices(data_parallel=2), replace(facts, divisible=other), Hardware(4, 4), 2)
    assert {one.data_parallel for one in asked} == {2}


def test_the_same_twice(models: list[ModelFacts]) -> None:
    facts, machine, workers = drawn(models, 7)
    first, second = (search(Task(facts, machine, workers), space(Choices(), facts, machine, workers)) for _ in range(2))
    assert first == second


def test_memory_is_a_limit(models: list[ModelFacts]) -> None:
    facts, machine, _ = drawn([models[1]], 3)
    points = tuple(random.Random(1).sample(space(Choices(), facts, machine, 2), 30))
    every = all_tried(Task(facts, machine, 2, 1 << 40), points)
    sizes = sorted({one.memory or 0 for one in every})
    limit = sizes[1]
    tight = search(Task(facts, machine, 2, limit), points)
    fit = [one.batch_s for one in every if (one.memory or 0) <= limit]
    assert [one.batch_s for one in tight.best] == sorted(fit)[:10]
    assert len(fit) < len(every)
    with pytest.raises(PlanError, match="Smallest fix: 100 B more on each worker; then --") as refused:
        search(Task(facts, machine, 2, sizes[0] - 100), points)
    assert refused.value.exit_code == 2


def test_what_a_backward_computes_again_needs_memory_too(models: list[ModelFacts]) -> None:
    """Everything at once needs as much as if it had been kept, but for the loss; where several are in flight, less."""
    task = Task(models[1], Hardware(4, 4), 2, 1 << 40)
    own = Choices(workers=1, rule="1f1b", micro_batches=2)
    kept, again = (tried(task, replace(own, recompute=how)) for how in ((), ("all",)))
    assert kept.priced.again_bytes == (0,)
    assert again.priced.again_bytes[0] > 0.8 * kept.priced.plan.stages[0].tape_bytes
    assert (again.memory or 0) > 0.95 * (kept.memory or 0)
    deep = [
        tried(task, replace(own, workers=2, rule="gpipe", micro_batches=8, recompute=how)) for how in ((), ("all",))
    ]
    assert (deep[1].memory or 0) < 0.9 * (deep[0].memory or 0)


def test_a_worker_of_a_mesh_keeps_its_parts(models: list[ModelFacts]) -> None:
    """Half of the columns of five values that products with split rows read, or make the next ones of."""
    own = Choices(workers=1, rule="1f1b", micro_batches=1)
    alone, two = (
        tried(Task(models[1], Hardware(4, 4), 2), replace(own, tensor_parallel=parts)).priced.plan.stages[0].tape_bytes
        for parts in (None, 2)
    )
    assert alone - two == 5 * (8 * 6 * 16 * 4) // 2


@pytest.mark.parametrize(("longer", "told"), [(0.6, 0), (1.4, 0), (2.0, 1)])
def test_measurements_that_others_have_disturbed_are_told_of(longer: float, told: int) -> None:
    facts = DrawnModel(random.Random(5)).facts((1,))

    def took(threads: int, seconds: float) -> AtRows:
        own = Profile(*[tuple([seconds] * len(part)) for part in columns(facts.measured[-1].profile)])
        return replace(facts.measured[-1], threads=threads, profile=own)

    found = busy_notices(replace(facts, measured=(took(1, 0.1), took(2, 0.1 * longer))))
    assert len(found) == told
    assert all("2 threads took 2 times as long as 1; delete " in text for text in found)
    assert busy_notices(replace(facts, measured=(took(1, 1e-5), took(2, 1e-4)))) == (), (
        "threads cost more than they gain"
    )


def test_nothing_that_fits_what_is_given_is_told(models: list[ModelFacts]) -> None:
    with pytest.raises(PlanError, match="workers of the plan: 5"):
        search(Task(models[0], Hardware(4, 4), 2), space(Choices(data_parallel=5), models[0], Hardware(4, 4), 2))


def test_stages_that_do_not_wait_for_each_other_are_bounded_too(models: list[ModelFacts]) -> None:
    """A bound is the work of a batch over all workers, whatever waits for what; none where a rule chooses M."""
    facts, machine, _ = drawn(models, 2)
    bounds = Bounds(facts, machine)
    profile = facts.profile_at(facts.rows_of(4), 4)
    work_s = sum(profile.forward_s) + sum(profile.backward_s)
    own = Choices(workers=2, rule="1f1b", micro_batches=4, threads=4)
    assert bounds.least_s(own) == pytest.approx(work_s * 4 / 2, rel=2e-3)
    assert bounds.least_s(replace(own, rule="pipedream-2bw", micro_batches=None)) == 0.0


def test_choices_without_a_bound_widen_no_gap(models: list[ModelFacts]) -> None:
    facts, machine, _ = drawn(models, 2)
    own = Choices(workers=2, rule="1f1b", micro_batches=4, threads=4)
    without = [
        replace(own, rule="pipedream-2bw", micro_batches=None),
        Choices(data_parallel=2, rule="1f1b", layout="dp", threads=4),
    ]
    assert [Bounds(facts, machine).least_s(one) for one in without] == [0.0, 0.0]
    alone, beside = (search(Task(facts, machine, 2), points) for points in ([own], [own, *without]))
    assert beside.simulated == 3
    assert beside.bound_s == alone.bound_s > 0.0
    assert beside.gap < 1.0


def test_a_pair_of_products_is_divided_whole(models: list[ModelFacts]) -> None:
    """Columns of the first, rows of the second: neither is computed by every worker."""
    facts = models[1]
    seconds = (0.0,) * len(facts.graph.ops)
    of_products = tuple([0.01 if op.flops and op.parameters else 0.0 for op in facts.graph.ops])
    own = Profile((*of_products, 0.0), (*seconds, 0.0), (*seconds, 0.0))
    facts = replace(facts, measured=tuple([replace(one, profile=own) for one in facts.measured]))
    made = [
        tried(Task(facts, Hardware(8, 8), 8), Choices(workers=1, rule="1f1b", micro_batches=1, tensor_parallel=parts))
        for parts in (None, 2, 4)
    ]
    alone, two, four = (sum(stage.forward_s for stage in one.priced.plan.stages) for one in made)
    whole = alone - 8 * 0.01  # eight products in the blocks; the vocabulary may be left whole
    assert two == pytest.approx(whole + 0.04, abs=0.011)
    assert four == pytest.approx(whole + 0.02, abs=0.011)


def test_memory_is_no_limit_where_an_optimizer_does_not_tell_its_state(models: list[ModelFacts]) -> None:
    facts = replace(models[0], state_bytes=None)
    with pytest.raises(PlanError, match="--memory-limit: got an optimizer whose state is not known"):
        search(Task(facts, Hardware(4, 4), 2, 1 << 40), space(Choices(), facts, Hardware(4, 4), 2))
