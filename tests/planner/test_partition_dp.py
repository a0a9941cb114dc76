"""Cuts are exact: no other cut of the graph is better, priced by the edges that lowering really makes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import CaptureError
from roundelay.ir.graph import WEIGHT, Graph, Profile, Value
from roundelay.ir.stage import Edge, Partition
from roundelay.lower.dataflow import message_bytes
from roundelay.lower.partition import partition
from roundelay.planner.cost_model import CostParameters, Cuts, StageCosts, stage_costs
from roundelay.planner.partition_dp import TIE, best_cuts, equal_cuts, names_of, nearest_cuts
from tests.lower.graphs import IDS, LABELS, Step, graph_of, graphs

FREE = CostParameters(micro_batches=1, latency_s=0.0, bytes_per_s=1e30)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A graph with values of all sizes, legal cuts, seconds and terms."""

    graph: Graph
    profile: Profile
    terms: CostParameters

    @property
    def prices(self) -> StageCosts:
        return stage_costs(self.graph, self.profile, self.terms)


@st.composite
def settings(draw: st.DrawFn) -> Setting:
    """Any small graph with skips, parameters used by several operations, and places where it may not be cut."""
    graph = draw(graphs())
    sizes = draw(st.lists(st.integers(0, 9), min_size=10, max_size=10))
    values = {
        name: dataclasses.replace(value, num_bytes=100 * sizes[i])
        for i, (name, value) in enumerate(graph.values.items())
    }
    cuts = tuple(cut for cut in graph.cuts if draw(st.integers(0, 3)) and cut < len(graph.ops) - 1)
    seconds = st.lists(st.integers(0, 20), min_size=len(graph.ops) + 1, max_size=len(graph.ops) + 1)
    profile = Profile(*(tuple(map(float, draw(seconds))) for _ in range(3)))
    terms = CostParameters(
        micro_batches=draw(st.sampled_from([1, 2, 9])),
        latency_s=draw(st.sampled_from([0.0, 3.0])),
        bytes_per_s=draw(st.sampled_from([20.0, 400.0])),
        again=draw(st.sampled_from([(), (range(99),), (range(1, 3), range(5, 6))])),
    )
    return Setting(dataclasses.replace(graph, cuts=cuts, values=values), profile, terms)


def stages_of(graph: Graph, cuts: Cuts) -> Partition:
    return partition(graph, [[name] for name in names_of(graph, cuts)])


def bytes_of(graph: Graph, edge: Edge, parts: int) -> int:
    """Forward and back, for all of ``parts`` micro-batches together; weights go with each of them."""

    def size(name: str) -> int:
        weight = name.removeprefix(WEIGHT)
        return graph.parameters[weight].num_bytes * parts if weight != name else graph.values[name].num_bytes

    return sum(map(size, edge.values)) + sum(map(size, edge.gradients))


def judged(setting: Setting, cuts: Cuts) -> tuple[float, int]:
    """(slowest stage, bytes over all edges), from the stages and edges of the lowered graph."""
    graph, profile, terms = setting.graph, setting.profile, setting.terms
    parts = max(1, min(terms.micro_batches, graph.sample_rows))
    times = []
    made = stages_of(graph, cuts)
    for spec in made.stages:
        ops = [i for part in spec.segments for i in range(part.start, part.stop)] + [len(graph.ops)] * bool(
            spec.loss_reads
        )
        again = {i for part in terms.again for i in part}
        compute = sum(
            (1 + (i in again)) * profile.forward_s[i] + profile.backward_s[i] + profile.update_s[i] / parts for i in ops
        )
        sides = [side for side in (spec.receives, spec.sends) if side]
        latencies = len(sides) + sum(any(edge.gradients for edge in side) for side in sides)
        num_bytes = sum(bytes_of(graph, edge, parts) for side in sides for edge in side)
        times.append(compute + latencies * terms.latency_s + num_bytes / parts / terms.bytes_per_s)
    return max(times), sum(bytes_of(graph, edge, parts) for edge in made.edges)


def every_cut(setting: Setting, num_stages: int) -> list[Cuts]:
    inner = setting.prices.boundaries[1:-1]
    return [(0, *some, len(setting.graph.ops) + 1) for some in itertools.combinations(inner, num_stages - 1)]


@given(settings(), st.integers(1, 5))
def test_no_cut_is_better_than_the_chosen_one(setting: Setting, num_stages: int) -> None:
    """Within the tie's margin of the fastest, and of the cuts that are, the one with the fewest bytes."""
    known = [judged(setting, cuts) for cuts in every_cut(setting, num_stages)]
    if not known:
        with pytest.raises(CaptureError, match="pieces"):
            best_cuts(setting.prices, num_stages)
        return
    limit = min(slowest for slowest, _ in known) * (1 + TIE)
    slowest, num_bytes = judged(setting, best_cuts(setting.prices, num_stages)[0])
    assert slowest <= limit * (1 + 1e-9)
    assert num_bytes <= min(size for time, size in known if time <= limit * (1 - 1e-9) or time == slowest)


@given(settings(), st.data())
def test_a_stage_costs_what_the_edges_of_its_partition_cost_wherever_its_neighbours_are_cut(
    setting: Setting, data: st.DataObject
) -> None:
    prices = setting.prices
    inner = prices.boundaries[1:-1]
    chosen = sorted(data.draw(st.sets(st.sampled_from(inner)))) if inner else []
    cuts = (0, *chosen, len(setting.graph.ops) + 1)
    made = stages_of(setting.graph, cuts)
    for spec, (start, stop) in zip(made.stages, itertools.pairwise(cuts), strict=True):
        into = sum(bytes_of(setting.graph, edge, prices.sample_micro_batches) for edge in spec.receives)
        out = sum(bytes_of(setting.graph, edge, prices.sample_micro_batches) for edge in spec.sends)
        assert (prices.bytes_in(start, stop), prices.bytes_out(start, stop)) == (into, out)
    assert prices.slowest_s(cuts) == pytest.approx(judged(setting, cuts)[0])


@given(settings(), st.integers(1, 5))
def test_equal_cuts_and_nearest_cuts_are_legal_and_leave_no_stage_empty(setting: Setting, num_stages: int) -> None:
    try:
        found = [
            equal_cuts(setting.graph, num_stages),
            nearest_cuts(setting.prices.boundaries, setting.prices.work, num_stages),
        ]
    except CaptureError:
        assert len(setting.prices.boundaries) - 1 < num_stages
        return
    for cuts in found:
        assert len(cuts) == num_stages + 1
        assert all(a < b for a, b in itertools.pairwise(cuts))
        assert set(cuts) <= set(setting.prices.boundaries)


def chain(seconds: list[float], sizes: list[int] | None = None) -> Setting:
    """One operation after the other, with its seconds and the bytes that it makes."""
    steps = [Step(f"a{i}", [f"a{i - 1}" if i else IDS]) for i in range(len(seconds))]
    graph = graph_of(steps, cuts=range(len(steps) - 1))
    sized = {f"a{i}": Value(f"a{i}", "tensor", (), "float32", size, True) for i, size in enumerate(sizes or [])}
    nothing = (0.0,) * (len(seconds) + 1)
    return Setting(
        dataclasses.replace(graph, values=graph.values | sized), Profile((*seconds, 0.0), nothing, nothing), FREE
    )


def ends(setting: Setting, num_stages: int) -> tuple[str, ...]:
    return names_of(setting.graph, best_cuts(setting.prices, num_stages)[0])


def test_a_half_that_is_three_times_as_heavy_gets_fewer_operations() -> None:
    heavy_last = chain([1.0] * 8 + [3.0] * 8)
    assert ends(heavy_last, 2) == ("a10", "a15")  # 8 + 3 x 3 against 5 x 3
    cuts = equal_cuts(heavy_last.graph, 2)
    assert names_of(heavy_last.graph, cuts) == ("a7", "a15")
    assert heavy_last.prices.slowest_s(cuts) == 24


def test_a_dear_message_moves_the_cut_to_where_less_crosses() -> None:
    setting = chain([1.0] * 4, [100, 1000, 10, 100])
    assert ends(setting, 2) == ("a1", "a3")
    slow = dataclasses.replace(FREE, bytes_per_s=100.0)
    assert ends(dataclasses.replace(setting, terms=slow), 2) == ("a2", "a3")


def test_among_equally_good_cuts_the_fewest_bytes_win() -> None:
    assert ends(chain([1.0, 0.01, 1.0], [500, 100, 100]), 2) == ("a1", "a2")
    assert ends(chain([1.0, 0.01, 1.0], [100, 500, 100]), 2) == ("a0", "a2")
    assert ends(chain([1.0, 0.1, 0.0, 1.0], [500, 100, 100, 100]), 2) == ("a1", "a3")


def test_a_skip_is_paid_for_by_the_stages_that_read_it_and_by_no_stage_between() -> None:
    steps = [Step("a0", [IDS]), Step("a1", ["a0"]), Step("a2", ["a1"]), Step("a3", ["a2", "a0"])]
    graph = graph_of(steps, cuts=[0, 1, 2])
    prices = stage_costs(graph, Profile(*[(0.0,) * 5] * 3), dataclasses.replace(FREE, bytes_per_s=1.0))
    assert [prices.bytes_in(i, i + 1) for i in (1, 2)] == [32, 32]  # 16 bytes there, 16 back
    assert prices.bytes_in(3, 5) == 64 + 16  # also the labels, for which nothing comes back
    assert prices.bytes_out(0, 1) == 32 + 16
    assert prices.bytes_out(1, 2) == 64  # it has read a0, so it is the one that hands it on


def test_a_parameter_used_again_travels_whole_with_every_micro_batch() -> None:
    steps = [Step("a0", [IDS], ["w"]), Step("a1", ["a0"], ["w"])]
    graph = graph_of(steps, cuts=[0])
    terms = dataclasses.replace(FREE, micro_batches=4)
    prices = stage_costs(graph, Profile(*[(0.0,) * 3] * 3), terms)
    assert prices.bytes_in(1, 3) / prices.sample_micro_batches == 2 * 16 + (2 * 16 + 16) / 4
    edge = partition(graph, [["a0"], ["a1"]]).edges[0]
    assert edge.values == ("a0", LABELS, WEIGHT + "w")
    assert message_bytes(graph, edge.values, 4) == 4 + 4 + 16


def test_hundreds_of_pieces_are_cut_at_once() -> None:
    """A programme that tried every cut would not end."""
    setting = chain([1.0 + i % 7 for i in range(400)], [100 + i % 13 for i in range(400)])
    work = sum(setting.profile.forward_s)
    assert setting.prices.slowest_s(best_cuts(setting.prices, 8)[0]) <= (work / 8 + 7) * (1 + TIE)
