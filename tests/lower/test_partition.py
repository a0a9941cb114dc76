"""Partition: who makes, hands on, reads and owns what, for any graph and any cuts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import PlanError
from roundelay.ir.graph import WEIGHT, Graph
from roundelay.ir.stage import Edge, Partition
from roundelay.lower.partition import partition
from tests.lower.graphs import IDS, LABELS, Step, chain_of, cuts_for, graph_of, graphs
from tests.lower.plans import FEW

JOBS = graphs().flatmap(lambda graph: st.tuples(st.just(graph), cuts_for(graph)))
Job = tuple[Graph, list[list[str]]]


def edges(parts: Partition) -> dict[tuple[int, int], tuple[str, ...]]:
    """What travels forward, by source and target."""
    return {(edge.source, edge.target): edge.values for edge in parts.edges}


def gradients(parts: Partition) -> dict[tuple[int, int], tuple[str, ...]]:
    """What comes back."""
    return {(edge.source, edge.target): edge.gradients for edge in parts.edges}


# --- by hand


def test_a_chain_hands_each_value_to_the_next_stage_and_labels_to_the_last() -> None:
    parts = partition(chain_of(3), [["a0"], ["a1"], ["a2"]])
    assert edges(parts) == {(0, 1): ("a0",), (0, 2): (LABELS,), (1, 2): ("a1",)}
    assert gradients(parts) == {(0, 1): ("a0",), (0, 2): (), (1, 2): ("a1",)}
    assert [stage.parameters for stage in parts.stages] == [("w0",), ("w1",), ("w2",)]
    assert [stage.loss_reads for stage in parts.stages] == [(), (), ("a2", LABELS)]
    assert [stage.stage for stage in parts.stages] == [0, 1, 2]


def test_a_segment_knows_its_operations_inputs_and_outputs() -> None:
    first, second = partition(chain_of(4), [["a1"], ["a2", "a3"]]).stages[1].segments
    assert (first.start, first.stop, first.inputs, first.outputs, first.parameters) == (2, 3, ("a1",), ("a2",), ("w2",))
    assert (second.start, second.stop, second.inputs, second.outputs) == (3, 4, ("a2",), ("a3",))


def test_segments_of_one_stage_hand_values_on_without_an_edge() -> None:
    parts = partition(chain_of(4), [["a0", "a1", "a2", "a3"]])
    assert parts.edges == ()
    assert [segment.inputs for segment in parts.stages[0].segments] == [(IDS,), ("a0",), ("a1",), ("a2",)]


def test_a_skip_goes_from_its_maker_from_reader_to_reader() -> None:
    """Not from the maker to each: gradients are then added where autograd adds them."""
    graph = graph_of(
        [
            Step("a", [IDS]),
            Step("b", ["a"]),
            Step("c", ["b"]),
            Step("d", ["c", "a"]),
            Step("e", ["d"]),
            Step("f", ["e", "a"]),
        ]
    )
    parts = partition(graph, [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]])
    travels = [(edge.source, edge.target) for edge in parts.edges if "a" in edge.values]
    assert travels == [(0, 1), (1, 3), (3, 5)]
    assert [(edge.source, edge.target) for edge in parts.edges if "a" in edge.gradients] == travels
    assert parts.stages[3].segments[0].outputs == ("a", "d")


def test_a_skip_over_all_stages_goes_straight_to_its_only_reader() -> None:
    graph = graph_of([Step("a", [IDS]), Step("b", [IDS]), Step("c", ["b"]), Step("d", ["c", "a"])])
    parts = partition(graph, [["a"], ["b"], ["c"], ["d"]])
    assert edges(parts) == {(0, 1): (IDS,), (0, 3): ("a", LABELS), (1, 2): ("b",), (2, 3): ("c",)}


def test_a_tied_weight_is_lent_by_its_first_user_along_its_users() -> None:
    graph = graph_of(
        [Step("a", [IDS], ["tied"]), Step("b", ["a"], ["w"]), Step("c", ["b"], ["tied"]), Step("d", ["c"], ["tied"])]
    )
    parts = partition(graph, [["a"], ["b"], ["c"], ["d"]])
    lent = WEIGHT + "tied"
    assert edges(parts) == {(0, 1): ("a",), (0, 2): (lent,), (0, 3): (LABELS,), (1, 2): ("b",), (2, 3): ("c", lent)}
    assert gradients(parts) == {(0, 1): ("a",), (0, 2): (lent,), (0, 3): (), (1, 2): ("b",), (2, 3): ("c", lent)}
    assert [stage.parameters for stage in parts.stages] == [("tied",), ("w",), (), ()]
    assert parts.stages[0].segments[0].outputs == ("a", lent)
    assert parts.stages[2].segments[0].inputs == ("b", lent)


def test_a_tied_weight_is_lent_between_segments_of_one_stage() -> None:
    graph = graph_of([Step("a", [IDS], ["tied"]), Step("b", ["a"], ["tied"])])
    first, second = partition(graph, [["a", "b"]]).stages[0].segments
    assert (first.parameters, second.parameters, second.inputs) == (("tied",), (), ("a", WEIGHT + "tied"))


def test_a_weight_used_twice_in_one_segment_is_not_lent() -> None:
    graph = graph_of([Step("a", [IDS], ["tied"]), Step("b", ["a"], ["tied"])])
    (only,) = partition(graph, [["b"]]).stages[0].segments
    assert (only.parameters, only.inputs, only.outputs) == (("tied",), (IDS,), ("b",))


def test_nothing_comes_back_for_inputs_labels_frozen_weights_and_values_without_a_gradient() -> None:
    graph = graph_of(
        [Step("a", [IDS], ["tied"]), Step("mask", [IDS]), Step("b", ["a", "mask", IDS], ["tied"])],
        frozen=["tied"],
        without_grad=["mask"],
    )
    (edge,) = partition(graph, [["mask"], ["b"]]).edges
    assert edge.values == ("a", "mask", IDS, LABELS, WEIGHT + "tied")
    assert edge.gradients == ("a",)


def test_neighbours_that_share_nothing_are_joined_by_an_empty_edge() -> None:
    graph = graph_of([Step("a", [IDS]), Step("b", [IDS]), Step("c", ["a"])], outputs=["c"])
    parts = partition(graph, [["a"], ["b"], ["c"]])
    assert parts.edges[2] == Edge(1, 2, (), ())
    assert parts.stages[2].receives == (Edge(0, 2, ("a", LABELS), ("a",)), Edge(1, 2, (), ()))


def test_the_loss_may_read_an_input_and_a_value_of_an_early_stage() -> None:
    graph = graph_of([Step("a", [IDS]), Step("b", ["a"])], outputs=["a", "b", IDS])
    parts = partition(graph, [["a"], ["b"]])
    assert edges(parts) == {(0, 1): ("a", IDS, LABELS)}
    assert parts.stages[1].segments[0].outputs == ("a", "b")
    assert parts.stages[1].loss_reads == ("a", "b", IDS, LABELS)


def test_buffers_stay_where_they_are_read() -> None:
    graph = graph_of([Step("a", [IDS], buffers=["mean"]), Step("b", ["a"], buffers=["mean", "count"])])
    assert partition(graph, [["a", "b"]]).stages[0].buffers == ("mean", "count")


# --- refusals


@pytest.mark.parametrize(
    ("stages", "stage", "why"),
    [
        ([["a0"], ["nobody"], ["a3"]], 1, "an end at 'nobody', which is unknown"),
        ([["a2"], ["a0"], ["a3"]], 1, "an end at 'a0', which is out of order"),
        ([["a0"], ["a0"], ["a3"]], 1, "an end at 'a0', which is out of order"),
        ([["a0", "a2"], ["a2", "a3"]], 1, "an end at 'a2', which is out of order"),
        ([["a3", "a2"]], 0, "an end at 'a2', which is out of order"),
        ([["a1"], ["a2"], ["a3"]], 0, "an end at 'a1', which is not a legal cut"),
        ([["a0"], ["a2"]], 1, "an end at 'a2', which is not the last operation"),
        ([["a0"], [], ["a3"]], 1, "no segment"),
        ([["a3"], ["a3"]], 1, "an end at 'a3', which is out of order"),
    ],
)
def test_cuts_that_do_not_fit_are_refused_with_their_stage(stages: list[list[str]], stage: int, why: str) -> None:
    steps = [Step(f"a{i}", [f"a{i - 1}" if i else IDS]) for i in range(4)]
    with pytest.raises(PlanError) as refusal:
        partition(graph_of(steps, cuts=[0, 2]), stages)
    assert (refusal.value.subject, refusal.value.got) == (f"segments of stage {stage}", why)
    assert "ending at 'a3'" in refusal.value.expected


def test_no_stages_at_all_are_refused() -> None:
    with pytest.raises(PlanError):
        partition(chain_of(2), [])


@FEW
@given(st.lists(st.lists(st.sampled_from(["a0", "a1", "a2", "a3", "nobody", ""]), max_size=3), min_size=1, max_size=4))
def test_any_list_of_names_is_a_partition_or_refused(stages: list[list[str]]) -> None:
    flat = [name for names in stages for name in names]
    fits = all(stages) and flat == sorted(set(flat)) and flat[-1:] == ["a3"] and not {"", "nobody"} & set(flat)
    if fits:
        assert len(partition(chain_of(4), stages).stages) == len(stages)
    else:
        with pytest.raises(PlanError):
            partition(chain_of(4), stages)


# --- for every graph and every cut


def paths(parts: Partition) -> dict[str, list[tuple[int, int]]]:
    """For every value that travels, the edges that it takes."""
    found: dict[str, list[tuple[int, int]]] = {}
    for edge in parts.edges:
        for name in edge.values:
            found.setdefault(name, []).append((edge.source, edge.target))
    return found


def readers(graph: Graph, spans: Sequence[tuple[int, int, int]], name: str) -> list[int]:
    """Stages that read a value, by literal search."""
    found = []
    for stage, start, stop in spans:
        reads = [r for op in graph.ops[start:stop] for r in (*op.reads, *(WEIGHT + p for p in op.parameters))]
        found += [stage] if name in reads else []
    if name in (*graph.outputs, *graph.batch):
        found.append(spans[-1][0])
    return sorted(set(found))


@FEW
@given(JOBS)
def test_segments_cover_the_graph_in_order(job: Job) -> None:
    graph, stages = job
    parts = partition(graph, stages)
    spans = [(segment.start, segment.stop) for stage in parts.stages for segment in stage.segments]
    assert spans[0][0] == 0
    assert spans[-1][1] == len(graph.ops)
    assert all(before[1] == after[0] for before, after in pairwise(spans))
    assert [[graph.ops[s.stop - 1].name for s in stage.segments] for stage in parts.stages] == stages


@FEW
@given(JOBS)
def test_whatever_a_segment_reads_is_its_own_or_its_input_or_its_parameter(job: Job) -> None:
    graph, stages = job
    for stage in partition(graph, stages).stages:
        for segment in stage.segments:
            ops = graph.ops[segment.start : segment.stop]
            own = {op.name for op in ops}
            reads = {name for op in ops for name in op.reads}
            used = {name for op in ops for name in op.parameters}
            lent = {name.removeprefix(WEIGHT) for name in segment.inputs if name.startswith(WEIGHT)}
            assert set(segment.inputs) - {WEIGHT + name for name in lent} == reads - own
            assert used == {*segment.parameters, *lent}
            assert not {*segment.parameters} & lent


@FEW
@given(JOBS)
def test_every_parameter_has_one_owner_the_first_that_uses_it(job: Job) -> None:
    graph, stages = job
    segments = [segment for stage in partition(graph, stages).stages for segment in stage.segments]
    owned = [name for segment in segments for name in segment.parameters]
    assert sorted(owned) == sorted(graph.parameters)
    for segment in segments:
        for name in segment.parameters:
            first = next(i for i, op in enumerate(graph.ops) if name in op.parameters)
            assert segment.start <= first < segment.stop


@FEW
@given(JOBS)
def test_a_value_passes_its_readers_once_each_in_order_from_its_maker(job: Job) -> None:
    graph, stages = job
    parts = partition(graph, stages)
    spans = [(stage.stage, s.start, s.stop) for stage in parts.stages for s in stage.segments]
    makers = {op.name: stage for stage, start, stop in spans for op in graph.ops[start:stop]}
    makers |= {IDS: 0, LABELS: 0}
    makers |= {WEIGHT + name: stage.stage for stage in parts.stages for name in stage.parameters}
    travelled = paths(parts)
    for name, maker in makers.items():
        stops = [maker, *(k for k in readers(graph, spans, name) if k != maker)]
        assert travelled.get(name, []) == list(pairwise(stops))


@FEW
@given(JOBS)
def test_what_a_stage_sends_it_has_and_what_it_needs_it_has(job: Job) -> None:
    """Executed by names alone: each segment finds its inputs, the loss too, and makes its outputs or hands them on."""
    graph, stages = job
    for stage in partition(graph, stages).stages:
        have = {IDS, LABELS} if stage.stage == 0 else set()
        have |= {name for edge in stage.receives for name in edge.values}
        for segment in stage.segments:
            assert set(segment.inputs) <= have
            made = {op.name for op in graph.ops[segment.start : segment.stop]}
            made |= {WEIGHT + name for name in segment.parameters}
            assert set(segment.outputs) <= made | set(segment.inputs)
            have |= set(segment.outputs)
        assert set(stage.loss_reads) <= have
        assert {name for edge in stage.sends for name in edge.values} <= have


@FEW
@given(JOBS)
def test_edges_lead_onwards_join_all_neighbours_and_are_known_at_both_ends(job: Job) -> None:
    graph, stages = job
    parts = partition(graph, stages)
    pairs = [(edge.source, edge.target) for edge in parts.edges]
    assert pairs == sorted(set(pairs))
    assert all(source < target for source, target in pairs)
    assert {(k, k + 1) for k in range(len(stages) - 1)} <= set(pairs)
    assert sorted(parts.edges, key=lambda e: (e.target, e.source)) == [e for s in parts.stages for e in s.receives]
    assert all(edge.values for edge in parts.edges if edge.target > edge.source + 1)
    assert all(len(set(edge.values)) == len(edge.values) for edge in parts.edges)


@FEW
@given(JOBS)
def test_a_gradient_comes_back_wherever_one_flows(job: Job) -> None:
    graph, stages = job
    trained = {WEIGHT + name for name, parameter in graph.parameters.items() if parameter.trainable}
    flowing = trained | {name for name, value in graph.values.items() if value.requires_grad} - {IDS, LABELS}
    for edge in partition(graph, stages).edges:
        assert edge.gradients == tuple(name for name in edge.values if name in flowing)


@FEW
@given(graphs(), st.data())
def test_cutting_one_stage_into_segments_adds_no_edges(graph: Graph, data: st.DataObject) -> None:
    """Where a stage is cut inside is nobody else's business."""
    stages = data.draw(cuts_for(graph))
    whole = partition(graph, [names[-1:] for names in stages])
    cut = partition(graph, stages)
    assert cut.edges == whole.edges
    assert [set(s.parameters) for s in cut.stages] == [set(s.parameters) for s in whole.stages]
