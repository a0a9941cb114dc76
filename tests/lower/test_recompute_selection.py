"""Names of modules as ranges of the graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roundelay.errors import PlanError
from roundelay.ir.graph import Graph
from roundelay.lower.partition import partition
from roundelay.lower.recompute_selection import RecomputeRange, recompute_ranges
from tests.lower.graphs import chain_of

MODULES = ("in", "net.0.a", "net.0", "net.1.a", "net.10.a", "net.0.a", "")


def graph(modules: tuple[str, ...] = MODULES) -> Graph:
    """A chain whose operations belong to modules."""
    made = chain_of(len(modules))
    ops = tuple(replace(op, module=module) for op, module in zip(made.ops, modules, strict=True))
    return replace(made, ops=ops)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ((), []),
        (("all",), [(0, 7)]),
        (("in",), [(0, 1)]),
        (("net",), [(1, 6)]),
        (("net.1",), [(3, 4)]),
        (("net.?",), [(1, 3), (3, 4), (5, 6)]),
        (("net.*",), [(1, 3), (3, 4), (4, 5), (5, 6)]),
        (("net.*.a",), [(1, 2), (3, 4), (4, 5), (5, 6)]),
        (("net.[01]", "in"), [(0, 1), (1, 3), (3, 4), (5, 6)]),
    ],
)
def test_names_and_patterns_stand_for_ranges_one_for_every_call(
    names: tuple[str, ...], found: list[tuple[int, int]]
) -> None:
    assert [(part.start, part.stop) for part in recompute_ranges(graph(), names)] == found


def test_a_part_bears_the_name_that_it_was_given_by() -> None:
    assert recompute_ranges(graph(), ("net.1*", "in")) == (
        RecomputeRange("in", 0, 1),
        RecomputeRange("net.1*", 3, 4),
        RecomputeRange("net.1*", 4, 5),
    )


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("nett",), "'nett', which matches no module"),
        (("",), "'', which matches no module"),
        (("*.*.*.*",), "which matches no module"),
        (("all", "in"), "all, in"),
        (("net.0", "net.0"), "'net.0' (by 'net.0') and 'net.0'"),
        (("net.0.a", "net"), "'net' (by 'net') and 'net.0.a'"),
        (("net", "*.1"), "'net.1' (by '*.1') and 'net' (by 'net')"),
    ],
)
def test_a_name_of_nothing_and_one_within_another_are_refused(names: tuple[str, ...], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        recompute_ranges(graph(), names)
    assert words in str(caught.value)
    assert "recompute of the plan" in str(caught.value)


def test_a_module_is_a_segment_of_its_own_on_every_stage_that_has_some_of_it() -> None:
    made = graph(("a", "b", "b", "b", "b", "c"))
    stages = partition(made, [["a2"], ["a5"]], ("b",)).stages
    assert [[(part.start, part.stop) for part in stage.segments] for stage in stages] == [
        [(0, 1), (1, 3)],
        [(3, 5), (5, 6)],
    ]
    assert [stage.recomputed for stage in stages] == [(1,), (0,)]
    plain = partition(made, [["a2"], ["a5"]]).stages
    assert [(s.sends, s.receives, s.inputs, s.outputs, s.parameters) for s in stages] == [
        (s.sends, s.receives, s.inputs, s.outputs, s.parameters) for s in plain
    ]


def test_where_the_graph_cannot_be_cut_a_part_is_smaller_and_one_with_nothing_left_is_refused() -> None:
    made = replace(graph(("a", "b", "b", "b", "b", "c")), cuts=(1, 3))
    stage = partition(made, [["a5"]], ("b",)).stages[0]
    assert [(part.start, part.stop) for part in stage.segments] == [(0, 2), (2, 4), (4, 6)]
    assert stage.recomputed == (1,)
    with pytest.raises(PlanError, match="'c', which cannot be cut out of the graph"):
        partition(made, [["a5"]], ("c",))
    still = {name: replace(value, requires_grad=False) for name, value in made.values.items()}
    with pytest.raises(PlanError, match="'b', which no gradient flows through"):
        partition(replace(made, values=still), [["a5"]], ("b",))
