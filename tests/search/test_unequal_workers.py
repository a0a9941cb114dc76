"""Plans for unequal workers: cuts by speed and within memory, links by node, groups by speed, bounds that hold."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from roundelay.errors import PlanError
from roundelay.ir.graph import Profile
from roundelay.ir.plan import Plan
from roundelay.planner.cluster import Cluster, ClusterLink, ClusterLinks, ClusterWorker
from roundelay.planner.memory_model import estimate_memory
from roundelay.planner.model_facts import ModelFacts
from roundelay.planner.plan_options import Choices
from roundelay.planner.price import priced
from roundelay.planner.source import Hardware
from roundelay.search import shifted_cuts
from roundelay.search.bounds import Bounds
from roundelay.search.search import Task, Tried, search, tried
from roundelay.search.space import space, transports_of
from tests.planner.test_priced import Perceptron, Transformer, facts_of
from tests.search.test_search import all_tried

PIPELINE = Choices(workers=2, rule="1f1b", micro_batches=4, transport="shm", threads=1)


def hardware(*workers: tuple[float, float, str], links: ClusterLinks | None = None) -> Hardware:
    """A machine with workers of these speeds, memories and nodes."""
    own = tuple([ClusterWorker(f"w{k}", k, *each) for k, each in enumerate(workers)])
    return Hardware(8, 8, cluster=Cluster(workers=own, links=links))


def speeds(*own: float) -> Hardware:
    return hardware(*[(speed, float("inf"), "") for speed in own])


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    """Of eight operations with the same seconds, and others with next to none."""
    found = facts_of(Perceptron, "fp32")
    own = tuple([1e-3 if op.flops or "tanh" in op.name else 1e-6 for op in found.graph.ops])
    profile = Profile((*own, 0.0), (*[2 * s for s in own], 0.0), (0.0,) * (len(own) + 1))
    return replace(found, measured=tuple([replace(one, profile=profile) for one in found.measured]))


@pytest.fixture(scope="module")
def transformer() -> ModelFacts:
    return facts_of(Transformer, "fp32")


def shares(plan: Plan) -> dict[str, float]:
    """Seconds of a forward that each worker computes, by the machine that was measured."""
    return {name: stage.forward_s for stage in plan.stages for name in stage.workers}


def test_shares_follow_the_speeds_and_the_plan_has_the_workers_of_the_file(facts: ModelFacts) -> None:
    own = shares(priced(facts, PIPELINE, speeds(0.5, 1.0)).plan)
    assert own["w1"] / own["w0"] == pytest.approx(2.0, rel=0.3)
    plan = priced(facts, PIPELINE, speeds(0.25, 1.0, 0.5)).plan
    assert [(worker.name, worker.speed) for worker in plan.workers] == [("w1", 1.0), ("w2", 0.5)]
    assert Plan.parse(plan.text()) == plan
    even = shares(priced(facts, PIPELINE, Hardware(8, 8)).plan)
    assert even["w1"] / even["w0"] == pytest.approx(1.0, rel=0.3)


def test_the_search_takes_unequal_cuts_and_none_of_its_plans_undercuts_the_bound(facts: ModelFacts) -> None:
    machine = speeds(1.0, 0.5)
    task, points = Task(facts, machine, 2), space(Choices(rule="1f1b", transport="shm"), facts, machine, 2)
    best = search(task, [one for one in points if one.workers == 2]).best[0]
    own = shares(best.priced.plan)
    assert own["w0"] / own["w1"] == pytest.approx(2.0, rel=0.3)
    bounds = Bounds(facts, machine)
    for one in all_tried(task, tuple(random.Random(1).sample(points, 25))):
        assert bounds.least_s(one.choices) <= one.batch_s, one.choices
    alone = tried(task, replace(PIPELINE, workers=1))
    assert bounds.least_s(alone.choices) == pytest.approx(alone.batch_s, rel=0.1), "one worker is the faster one"
    assert alone.priced.plan.workers[0].name == "w0"


def held(one: Tried) -> dict[str, int]:
    plan, states = one.priced.plan, one.priced.state_bytes
    assert states is not None
    return {w.name: own.total for w, own in zip(plan.workers, estimate_memory(plan, states), strict=True)}


def test_less_memory_forces_a_smaller_stage_and_none_that_fits_is_told(transformer: ModelFacts) -> None:
    free = tried(Task(transformer, speeds(1.0, 1.0), 2, 1 << 40), PIPELINE)
    limit = 0.9 * min(held(free).values())
    machine = hardware((1.0, limit, ""), (1.0, float("inf"), ""))
    tight = tried(Task(transformer, machine, 2), PIPELINE)
    assert held(tight)["w0"] <= limit < held(tight)["w1"]
    assert tight.lacking == 0
    small = hardware((1.0, 2000.0, ""), (1.0, 1000.0, ""))
    with pytest.raises(
        PlanError, match=r"at most 2.0 KiB or 1000 B on each, by the cluster file.*Smallest fix: "
    ) as no:
        search(Task(transformer, small, 2), [PIPELINE])
    assert no.value.exit_code == 2


def test_memory_of_the_cluster_needs_an_optimizer_that_tells(transformer: ModelFacts) -> None:
    task = Task(replace(transformer, state_bytes=None), hardware((1.0, 1e6, "")), 1)
    with pytest.raises(PlanError, match="an optimizer whose state is not known"):
        search(task, [replace(PIPELINE, workers=1)])


def test_holders_of_a_stage_are_alike_as_far_as_can_be_and_the_slowest_sets_the_time(facts: ModelFacts) -> None:
    two = replace(PIPELINE, data_parallel=2, micro_batches=2)
    plan = priced(facts, two, speeds(1.0, 0.5, 1.0, 0.5)).plan
    assert {tuple(stage.workers) for stage in plan.stages} == {("w0", "w2"), ("w1", "w3")}
    mixed, slow = (priced(facts, replace(two, workers=1), speeds(1.0, other)) for other in (0.5, 1.0))
    assert mixed.batch_s > 1.5 * slow.batch_s
    assert priced(facts, replace(two, workers=1), speeds(0.5, 0.5)).batch_s == pytest.approx(mixed.batch_s, rel=0.05)


def test_where_workers_alternate_stages_the_fastest_come_first(facts: ModelFacts) -> None:
    plan = priced(facts, replace(PIPELINE, rule="zb-v"), speeds(0.5, 1.0)).plan
    assert [stage.workers for stage in plan.stages] == [("w1",), ("w0",), ("w0",), ("w1",)]


def test_cuts_that_are_given_leave_the_workers_in_the_order_of_the_file(facts: ModelFacts) -> None:
    for machine in (speeds(1.0, 0.5), speeds(0.5, 1.0)):
        plan = priced(facts, replace(PIPELINE, cuts="equal"), machine).plan
        assert [stage.workers for stage in plan.stages] == [("w0",), ("w1",)]
    turned = machine.cluster and machine.cluster.as_in(replace(plan, stages=plan.stages[::-1]))
    again = priced(facts, replace(PIPELINE, cuts="equal"), replace(machine, cluster=turned)).plan
    assert [stage.workers for stage in again.stages] == [("w1",), ("w0",)]
    assert [worker.name for worker in again.workers] == ["w0", "w1"]


def test_cuts_that_are_moved_keep_their_workers(facts: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = speeds(0.5, 1.0)
    task = Task(facts, machine, 2)
    best = tried(task, PIPELINE)
    assert [stage.workers for stage in best.priced.plan.stages] == [("w1",), ("w0",)]
    seen: list[Tried] = []

    def noted(task: Task, choices: Choices) -> Tried:
        seen.append(tried(task, choices))
        return seen[-1]

    monkeypatch.setattr(shifted_cuts, "tried", noted)
    shifted_cuts._shifted(task, best)
    assert {tuple(stage.workers for stage in one.priced.plan.stages) for one in seen} == {(("w1",), ("w0",))}


def test_more_workers_than_there_are_are_refused(facts: ModelFacts) -> None:
    with pytest.raises(PlanError, match="workers of the plan: got 3; expected at most 2, as the cluster file has"):
        priced(facts, replace(PIPELINE, workers=3), speeds(1.0, 1.0))


LINKS = ClusterLinks(
    within=ClusterLink(latency_s=1e-6, bytes_per_s=1e10), between=ClusterLink(latency_s=0.5, bytes_per_s=1e6)
)


def nodes(*names: str) -> Hardware:
    return hardware(*[(1.0, float("inf"), name) for name in names], links=LINKS)


def latencies(plan: Plan) -> Sequence[float]:
    return [edge.latency_s for edge in plan.edges if edge.target == edge.source + 1]


def test_links_stand_in_the_plan_and_stages_cross_the_slow_one_once(facts: ModelFacts) -> None:
    own = replace(PIPELINE, workers=4, transport="gloo")
    speeds_on = zip((1.0, 0.9, 0.8, 0.7), "aabb", strict=True)
    pairs = hardware(*[(speed, float("inf"), name) for speed, name in speeds_on], links=LINKS)
    plan = priced(facts, own, pairs).plan
    assert sorted(latencies(plan)) == [1e-6, 1e-6, 0.5]
    assert (plan.latency_s, plan.bytes_per_s) == (0.5, 1e6)
    given = priced(facts, replace(own, cuts="equal"), nodes("a", "b", "a", "b")).plan
    assert latencies(given) == [0.5, 0.5, 0.5]
    near = hardware(*[(speed, float("inf"), name) for speed, name in ((1.0, "a"), (0.5, "a"), (1.0, "b"))], links=LINKS)
    assert latencies(priced(facts, PIPELINE, near).plan) == [1e-6], "a slower worker is nearer"


def test_an_exchange_takes_what_its_slowest_link_takes(facts: ModelFacts) -> None:
    replicas = replace(PIPELINE, workers=1, data_parallel=2)
    within, between = (priced(facts, replicas, nodes("a", other)).plan for other in "ab")
    assert within.exchanges[0].seconds < 1e-3
    assert between.exchanges[0].seconds > 2 * 0.5, "a latency for each phase"


def test_several_nodes_need_a_transport_between_hosts() -> None:
    assert transports_of(Choices(), nodes("a", "b")) == ("gloo",)
    assert transports_of(Choices(), nodes("a", "a")) == ("memory", "shm")
    assert nodes("a", "a", "b").threads_each(("cpu",) * 3) == Hardware(8, 8).threads_each(("cpu",) * 2)
