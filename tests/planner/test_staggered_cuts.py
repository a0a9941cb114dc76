"""Cuts for staggered micro-batches: bytes as stages keep them, none better, and the paper's halves of equal layers."""

from __future__ import annotations

import dataclasses
import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roundelay.errors import CaptureError
from roundelay.ir.graph import WEIGHT, Graph
from roundelay.planner.cost_model import Cuts, boundaries_of
from roundelay.planner.cut_reasons import most_at_one_time
from roundelay.planner.kept_bytes import SavedStorages, kept_bytes, staggered_bytes
from roundelay.planner.partition_dp import SLOWER, equal_cuts, flops_cuts, names_of, staggered_cuts
from tests.lower.graphs import IDS, Step, graph_of
from tests.planner.test_partition_dp import Setting, chain, every_cut, judged, settings, stages_of


@st.composite
def storages_of(draw: st.DrawFn, graph: Graph) -> SavedStorages:
    """What a graph's operations may save: their results, what they read, and something of their own.

    Some results lie in the storage of what they are made from, if a gradient flows from one to the other.
    """
    names = [op.name for op in graph.ops] + [WEIGHT + name for name in graph.parameters]
    values = {name: i for i, name in enumerate([*graph.inputs, *graph.batch, *names])}
    sizes, views = draw(st.lists(st.integers(0, 20), min_size=32, max_size=32)), draw(st.integers(0, 255))
    saved: list[list[int]] = []
    for i, op in enumerate(graph.ops):
        seen = [name for name in op.reads if graph.values[name].requires_grad and name not in graph.inputs]
        if views >> i & 1 and seen and graph.values[op.name].requires_grad:
            values[op.name] = values[seen[0]]
        known = [values[op.name], 20 + i, *(values[name] for name in op.reads)]
        bits = draw(st.integers(0, 2 ** len(known) - 1))
        saved.append([storage for place, storage in enumerate(known) if bits >> place & 1])
    return SavedStorages(tuple(sizes), (*map(tuple, saved), (30, 31)), values, {})


def kept_by_edges(graph: Graph, storages: SavedStorages, cuts: Cuts, shared: bool) -> list[int]:
    """Bytes of each stage, from the edges of the lowered graph."""
    before: set[int] = set()
    found = []
    for stage, (start, stop) in zip(stages_of(graph, cuts).stages, itertools.pairwise(cuts), strict=True):
        held = {s for own in storages.saved[start:stop] for s in own}
        names = [name for edge in (*stage.receives, *stage.sends) for name in edge.gradients]
        made = {op.name for op in graph.ops}
        names += [name for name in stage.loss_reads if name in made and graph.values[name].requires_grad]
        held |= {storages.values[name] for name in names}
        found.append(sum(storages.num_bytes[s] for s in (held - before if shared else held)))
        before |= held
    return found


@given(st.data(), settings(), st.booleans())
def test_a_stage_keeps_what_its_operations_save_and_what_it_hands_on(
    data: st.DataObject, setting: Setting, shared: bool
) -> None:
    graph = setting.graph
    storages = data.draw(storages_of(graph))
    kept = kept_bytes(graph, storages, shared=shared)
    inner = kept.boundaries[1:-1]
    chosen = sorted(data.draw(st.sets(st.sampled_from(inner)))) if inner else []
    cuts = (0, *chosen, len(graph.ops) + 1)
    found = [kept.of_stage(start, stop) for start, stop in itertools.pairwise(cuts)]
    assert found == kept_by_edges(graph, storages, cuts, shared)


def test_of_a_view_that_is_no_copy_in_the_whole_model_stages_keep_the_copy() -> None:
    graph = graph_of([Step("a0", [IDS]), Step("a1", ["a0"]), Step("a2", ["a1"])], cuts=[0, 1])
    storages = SavedStorages((100, 10, 5), ((), (), (0,), ()), {"a0": 0, "a1": 1, "a2": 2}, {"a1": 0})
    kept = kept_bytes(graph, storages, shared=False)
    assert kept.of_stage(0, 4) == 100 + 5
    assert kept.of_stage(0, 2) == 10
    assert kept.of_stage(2, 4) == 10 + 5


def test_operations_that_run_again_keep_what_they_read_from_outside() -> None:
    graph = graph_of([Step(f"a{i}", [f"a{i - 1}" if i else IDS]) for i in range(4)])
    storages = SavedStorages((1, 10, 100, 1000), ((0,), (0, 1), (1, 2), (2, 3), ()), {f"a{i}": i for i in range(4)}, {})
    assert kept_bytes(graph, storages, shared=True).whole == 1111
    assert kept_bytes(graph, storages, shared=True, again=[range(1, 3)]).whole == 1101


@given(st.data(), settings(), st.integers(1, 4), st.sampled_from([1, 2, 4, 8]))
def test_no_cuts_keep_less_at_one_time(
    data: st.DataObject, setting: Setting, num_stages: int, micro_batches: int
) -> None:
    """Of those whose slowest stage is within the margin; the micro-batches of a stage are counted one by one."""
    storages = data.draw(storages_of(setting.graph))
    kept, known = kept_bytes(setting.graph, storages, shared=True), every_cut(setting, num_stages)
    if not known:
        with pytest.raises(CaptureError, match="pieces"):
            staggered_cuts(setting.prices, kept, num_stages, micro_batches)
        return

    def most(cuts: Cuts) -> int:
        bytes_of = [kept.of_stage(start, stop) for start, stop in itertools.pairwise(cuts)]
        steps = [Fraction(2 * num_stages * i, micro_batches) for i in range(micro_batches)]
        held = [
            max(
                sum(k <= (now - start) % (2 * num_stages) < 2 * num_stages - k for start in steps)
                for now in steps_of(steps)
            )
            for k in range(num_stages)
        ]
        return sum(count * num_bytes for count, num_bytes in zip(held, bytes_of, strict=True))

    def steps_of(starts: list[Fraction]) -> list[Fraction]:
        return [start + k for start in starts for k in range(num_stages)]

    limit = min(judged(setting, cuts)[0] for cuts in known) * (1 + SLOWER)
    chosen = staggered_cuts(setting.prices, kept, num_stages, micro_batches)
    assert judged(setting, chosen)[0] <= limit * (1 + 1e-9)
    assert most(chosen) == min(
        most(cuts) for cuts in known if judged(setting, cuts)[0] <= limit * (1 - 1e-9) or cuts == chosen
    )


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 7))
def test_totals_over_time_are_those_of_micro_batches_counted_one_by_one(kept: list[int], micro_batches: int) -> None:
    """Two periods behind the start of the last micro-batch of the first batch."""
    end, starts = 2 * len(kept), range(0, 5 * 2 * len(kept) * micro_batches, 2 * len(kept))  # in N-ths of a step
    totals = staggered_bytes(kept, micro_batches)
    for now in range(2 * end * micro_batches, 3 * end * micro_batches):
        held = [(now - start) // micro_batches for start in starts if now >= start]
        total = sum(num_bytes for step in held for k, num_bytes in enumerate(kept) if k <= step < end - k)
        assert total == totals[now % end]


def test_as_many_equal_stages_as_micro_batches_keep_n_plus_1_halves_at_any_time() -> None:
    """Cyclic Data Parallelism, Sect. 4.1."""
    for size in range(1, 9):
        assert staggered_bytes([10] * size, size) == (10 * size * (size + 1) // 2,) * (2 * size)


def layers(sizes: list[int], seconds: list[float]) -> tuple[Setting, SavedStorages]:
    """A chain of operations, each of which saves its result; all have the same FLOPs."""
    setting = chain(seconds, sizes)
    saved = tuple((i,) for i in range(len(sizes)))
    return setting, SavedStorages((*sizes, 0), (*saved, ()), {f"a{i}": i for i in range(len(sizes))}, {})


@pytest.mark.parametrize("size", [4, 8])
def test_of_a_chain_of_equal_layers_about_half_is_kept_at_one_time(size: int) -> None:
    """Within 2 % of (N + 1) / 2N of N micro-batches in the whole model."""
    setting, storages = layers([100] * 8 * size, [1.0] * 8 * size)
    kept = kept_bytes(setting.graph, storages, shared=True)
    wanted = (size + 1) / (2 * size) * size * kept.whole
    for cuts in (staggered_cuts(setting.prices, kept, size, size), flops_cuts(setting.graph, size)):
        assert most_at_one_time(kept, cuts, size) == pytest.approx(wanted, rel=0.02)


def test_of_an_uneven_model_less_is_kept_than_with_cuts_by_operations_or_flops() -> None:
    """Early layers keep much, as those of a convolutional network; times are not those of FLOPs."""
    setting, storages = layers([2000 // (i + 2) for i in range(64)], [1.0 + i % 3 for i in range(64)])
    kept = kept_bytes(setting.graph, storages, shared=True)
    for size in (4, 8):
        chosen = staggered_cuts(setting.prices, kept, size, size)
        others = equal_cuts(setting.graph, size), flops_cuts(setting.graph, size)
        peaks = [most_at_one_time(kept, cuts, size) for cuts in (chosen, *others)]
        assert peaks[0] < 0.97 * min(peaks[1:])
        best = min(setting.prices.slowest_s(cuts) for cuts in (chosen, *others))
        assert setting.prices.slowest_s(chosen) <= best * (1 + SLOWER)


def with_flops(setting: Setting, flops: list[int], modules: list[str] | None = None) -> Graph:
    """The graph with FLOPs, and modules of its operations."""
    paths = modules or [""] * len(flops)
    ops = [
        dataclasses.replace(op, flops=own, module=path)
        for op, own, path in zip(setting.graph.ops, flops, paths, strict=True)
    ]
    return dataclasses.replace(setting.graph, ops=tuple(ops))


def test_equal_flops_are_not_equal_numbers_of_operations() -> None:
    graph = with_flops(chain([1.0] * 16), [1] * 8 + [3] * 8)
    assert names_of(graph, flops_cuts(graph, 2)) == ("a10", "a15")
    assert names_of(graph, flops_cuts(graph, 4)) == ("a7", "a10", "a12", "a15")


def test_an_operation_without_flops_counts_with_its_layer() -> None:
    """A norm with the layer behind it in whose block it is; what is of neither, or of both, with the one before."""
    modules = ["stem", "stem.bias", "", "block.norm", "block.in", "block", "block.out", "block.drop", "head"]
    graph = with_flops(chain([1.0] * 9), [9, 0, 0, 0, 5, 0, 5, 0, 9], modules)
    assert names_of(graph, flops_cuts(graph, 4)) == ("a2", "a5", "a7", "a8")
    fewer = dataclasses.replace(graph, cuts=(0, 3, 4, 6))  # the nearest place where it may be cut
    assert names_of(fewer, flops_cuts(fewer, 4)) == ("a3", "a4", "a6", "a8")


def test_more_stages_than_layers_are_cut_between_any_operations() -> None:
    graph = with_flops(chain([1.0] * 6), [9, 0, 0, 9, 0, 0])
    assert len(set(flops_cuts(graph, 4))) == 5
    none = with_flops(chain([1.0] * 6), [0] * 6)
    assert set(flops_cuts(none, 3)) <= set(boundaries_of(none))
    with pytest.raises(CaptureError, match="pieces"):
        flops_cuts(graph, 7)
