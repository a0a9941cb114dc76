"""The search over signatures against brute force, against what experts do, and against sums made by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from roundelay.errors import PlanError
from roundelay.ir.graph import Profile
from roundelay.ir.layout import signature_on
from roundelay.ir.op_form import OpForm
from roundelay.ir.sbp import B, Signature, Split
from roundelay.planner.cost_model import roofline
from roundelay.planner.mesh_signatures import MeshFacts
from roundelay.search.signatures.boxing_prices import Link
from roundelay.search.signatures.clusters import Cluster, Clusters
from roundelay.search.signatures.local_forms import LocalOp
from roundelay.search.signatures.problem import Machine, Problem, problem
from roundelay.search.signatures.searched import signatures_on, table
from roundelay.search.signatures.spaces import Axes
from roundelay.search.signatures.tables import Priced, Solution, Tables, solve
from roundelay.search.signatures.ways import State, letters, splits, state, ways
from tests.planner.test_priced import Transformer, facts_of
from tests.search.small_graphs import Drawn, brute_force

MESHES = {"a": 2}, {"a": 2, "b": 2}, {"a": 4}


def agrees(seed: int, more: int, most: int) -> bool:
    """Whether a random model has at most so many choices; then the search finds what brute force finds."""
    mesh = MESHES[seed % 3]
    drawn = Drawn(seed, 2 + seed % (more if len(mesh) == 1 else 2))
    facts, profile = drawn.facts(), drawn.profile()
    least = brute_force(facts, profile, mesh, most)
    if least is None:
        return False
    found = signatures_on(facts, mesh, dict.fromkeys(mesh, Link(0.0, 1.0)), profile)
    assert found.seconds == pytest.approx(least, rel=1e-9), seed
    assert sum(found.terms.values()) == pytest.approx(found.seconds)
    assert found.gap == 0
    return True


def test_small_models_are_solved_as_by_brute_force() -> None:
    assert sum(agrees(seed, 4, 20_000) for seed in range(75)) >= 60


@pytest.mark.parametrize("first", range(100, 400, 30))
def test_larger_models_are_solved_as_by_brute_force(first: int) -> None:
    assert sum(agrees(seed, 5, 40_000) for seed in range(first, first + 30)) >= 20


@pytest.fixture(scope="module")
def transformer() -> MeshFacts:
    return facts_of(Transformer, "fp32").mesh


MESH = {"tensor": 2, "data": 2}
LINKS = {"tensor": Link(5e-6, 5e9), "data": Link(2e-5, 1e9)}
HEADS, WIDTH = Split(0, 3, 4), Split(0)
MEGATRON: Mapping[str, Signature] = {
    f"p_model_blocks_{i}_{name}": own
    for i in (0, 1)
    for name, own in {
        "qkv_weight": HEADS,
        "qkv_bias": HEADS,
        "out_weight": Split(1, 1, 4),
        "up_weight": WIDTH,
        "up_bias": WIDTH,
        "down_weight": Split(1),
    }.items()
}


def lie_so(cluster: Cluster, way: int, axis: str, places: Mapping[str, Signature]) -> bool:
    """Whether the parameters of a cluster have these signatures over an axis, and all others are whole."""
    return all(
        signature_on(splits(dims, own, MESH, together=True), axis) == places.get(name, B)
        for op, own in zip(cluster.ops, cluster.ways[way], strict=True)
        for name, dims in op.form.args.items()
        if name.startswith("p_")
    )


def of_family(cluster: Cluster, axis: str, places: Mapping[str, Signature] | None) -> list[bool]:
    """The ways with these parameters; with None those by rows, as replicas compute, or alike where there are none."""
    every = range(len(cluster.ways))
    lie = [lie_so(cluster, i, axis, places or {}) for i in every]
    if places is not None:
        return lie
    by_rows = [lie[i] and any(signature_on(own[i].value, axis) == Split(0) for own in cluster.results) for i in every]
    alike = [lie[i] and all(own.letters[axis].label is None for own in cluster.ways[i]) for i in every]
    return by_rows if any(by_rows) else alike


def priced(made: Problem, family: Mapping[str, Mapping[str, Signature] | None], level: int = 0) -> float:
    """Seconds of the best choice of a family."""
    return best_of(made, family, level).seconds


def best_of(made: Problem, family: Mapping[str, Mapping[str, Signature] | None], level: int = 0) -> Solution:
    """The best choice of a family: for each axis signatures of parameters, or None: data parallel."""
    tables = []
    for variable, own in zip(made.variables, made.tables.own, strict=True):
        seconds = own.seconds.copy()
        for axis, places in family.items():
            for cluster in variable.clusters:
                seconds[np.logical_not(of_family(cluster, axis, places))] = np.inf
            if variable.weight:
                wanted = (places or {}).get(variable.weight, B)
                seconds[[signature_on(one.value, axis) != wanted for one in variable.states]] = np.inf
        if len(variable.variants) > 1:
            seconds[:, [own_level != level for own_level, _ in variable.variants]] = np.inf
        tables.append(Priced(seconds, own.memory))
    return solve(Tables(tuple(tables), made.tables.pairs))


@pytest.mark.parametrize("link", [None, Link(0.0, 1e7), Link(1e-3, 1e9)])
def test_no_family_of_experts_is_faster(transformer: MeshFacts, link: Link | None) -> None:
    links = dict.fromkeys(MESH, link) if link else LINKS
    made = problem(transformer, Machine(MESH, links, roofline(transformer.graph)), variants=True)
    found = {
        "all whole": priced(made, {"tensor": {}, "data": {}}),
        "data parallel": priced(made, {"tensor": None, "data": None}),
        "ZeRO-3": priced(made, {"tensor": None, "data": None}, level=3),
        "Megatron": priced(made, {"tensor": MEGATRON, "data": {}}),
        "Megatron and data parallel": priced(made, {"tensor": MEGATRON, "data": None}),
    }
    assert all(map(math.isfinite, found.values()))
    assert len({round(seconds, 9) for seconds in found.values()}) > 3
    for memory in (None, 1 << 40):
        assert signatures_on(transformer, MESH, links, memory=memory).seconds <= min(found.values()) * (1 + 1e-12)


def test_data_parallel_is_computation_in_parts_and_the_sum_of_all_gradients(transformer: MeshFacts) -> None:
    profile = roofline(transformer.graph)
    made = problem(transformer, Machine({"data": 4}, {"data": Link(1e-5, 1e8)}, profile, 3))
    weights = [own for own in transformer.graph.parameters.values() if own.trainable]
    sums = sum(2 * (1e-5 + 3 / 4 * own.num_bytes / 1e8) for own in weights)
    compute = sum(profile.forward_s) + sum(profile.backward_s)
    assert priced(made, {"data": None}) == pytest.approx(3 * compute / 4 + sums)


def test_zero_3_gathers_twice_and_scatters_once_in_each_micro_batch(transformer: MeshFacts) -> None:
    links = {"tensor": Link(0.0, 1e9), "data": Link(1e-5, 1e8)}
    nothing = Profile(*[(0.0,) * (len(transformer.graph.ops) + 1)] * 3)
    made = problem(transformer, Machine(MESH, links, nothing, 5), variants=True)
    sizes = [own.num_bytes for own in transformer.graph.parameters.values()]
    once = sum(size / 2 / 1e9 + 1e-5 + size / 4 / 1e8 for size in sizes)  # half over the fast axis, then over the slow
    assert priced(made, dict.fromkeys(MESH, None), level=3) == pytest.approx(5 * 3 * once)
    assert priced(made, dict.fromkeys(MESH, None), level=1) == pytest.approx(2 * once)


def test_levels_of_zero_leave_a_worker_its_part_of_states_and_of_all(transformer: MeshFacts) -> None:
    mesh, links = {"data": 4}, {"data": Link(1e-5, 1e8)}
    made = problem(transformer, Machine(mesh, links, roofline(transformer.graph)), variants=True)
    held = [best_of(made, {"data": None}, level).memory for level in (0, 1, 3)]
    weights = sum(own.num_bytes for own in transformer.graph.parameters.values())
    views = ("getitem", "transpose", "unflatten", "flatten", "reshape", "view")
    kept = sum(
        own.num_bytes
        for name, own in transformer.graph.values.items()
        if not name.startswith((*views, "input", "batch"))
    )
    assert held[0] == 4 * weights + kept / 4
    assert held[0] - held[1] == pytest.approx(2 * weights * 3 / 4)
    assert held[0] - held[2] == pytest.approx(4 * weights * 3 / 4)


def test_what_is_boxed_is_held_too(transformer: MeshFacts) -> None:
    made = problem(transformer, Machine(MESH, LINKS, roofline(transformer.graph)))
    edge = next(edge for edge in made.edges if edge.reader == "transpose_3")
    sources, targets = edge.states
    table_of = made.tables.pairs[min(edge.ends), max(edge.ends)].memory
    memory = table_of if edge.ends[0] < edge.ends[1] else table_of.T
    whole, rows = State((), ()), State((("data", Split(0)),), (("data", Split(0)),))
    num_bytes = len(made.variables[edge.ends[0]].clusters) * transformer.graph.values[edge.value].num_bytes
    assert memory[sources.index(whole), targets.index(whole)] == 0
    assert memory[sources.index(whole), targets.index(rows)] == num_bytes / 2
    assert memory[sources.index(rows), targets.index(whole)] == num_bytes


def test_a_weight_that_two_operations_read_is_stored_once(transformer: MeshFacts) -> None:
    made = problem(transformer, Machine(MESH, LINKS, roofline(transformer.graph)))
    (number,) = [i for i, variable in enumerate(made.variables) if variable.weight]
    assert len([edge for edge in made.edges if edge.ends[0] == number]) == 2
    assert made.variables[number].terms["gradient sums"].any()


def test_a_value_that_a_cluster_reads_twice_lies_one_way() -> None:
    plain, turned, product = ((((a, 4),), ((b, 4),)) for a, b in ((0, 1), (1, 0), (0, 2)))
    scaled = LocalOp("x", OpForm({"input": plain}, (plain,), (frozenset(["input"]),)), ("x",), True)
    transposed = LocalOp("y", OpForm({"x": plain}, (turned,), (frozenset("x"),)), ("y",), True)
    together = OpForm({"x": plain, "y": ((((1, 4),), ((2, 4),)))}, (product,), (frozenset("x"), frozenset("y")))
    ops = (scaled, transposed, LocalOp("z", together, ("z",), True))
    clusters = Clusters(ops, Axes({"a": 2}), {}, ["z"])
    (members,) = clusters.of(ops)
    own = clusters.cluster(members)
    assert own.ways
    for one, two, three in own.ways:
        lies = clusters.state(scaled, one, 1)
        assert lies == clusters.state(transposed, two, 0) == clusters.state(ops[2], three, 0)


@pytest.mark.parametrize(("axes", "count"), [(2, 28), (3, 176)])
def test_all_orders_of_axes_that_split_one_dimension_are_tried(axes: int, count: int) -> None:
    """28 lays of three dimensions over two axes where 25 have no order, and 176 over three where 125 have none."""
    dims = tuple([((label, 8),) for label in range(3)])
    op = LocalOp("sum", OpForm({"x": dims}, (dims,), (frozenset("x"),)), ("sum",), True)
    mesh = dict.fromkeys("abc"[:axes], 2)
    every = ways(op, letters(op, frozenset()), mesh)
    assert len({state(op, way, 1, mesh).value for way in every}) == count


def test_megatron_sums_twice_forward_and_twice_backward_in_each_block(transformer: MeshFacts) -> None:
    """But for the last of these sums, as the embedding's gradient is smaller than that of its result."""
    nothing = Profile(*[(0.0,) * (len(transformer.graph.ops) + 1)] * 3)
    made = problem(transformer, Machine({"tensor": 2}, {"tensor": Link(0.0, 1.0)}, nothing))
    assert priced(made, {"tensor": MEGATRON}) == 7 * (8 * 6 * 16 * 4) + 20 * 16 * 4


def test_repeated_modules_are_computed_alike_and_cost_no_less(transformer: MeshFacts) -> None:
    tied, untied = (signatures_on(transformer, MESH, LINKS, tied=own) for own in (True, False))
    assert untied.seconds <= tied.seconds * (1 + 1e-12)
    assert untied.space > tied.space**1.5
    for name in ("qkv.weight", "out.weight", "up.bias", "down.weight"):
        assert tied.parameters[f"blocks.0.{name}"] == tied.parameters[f"blocks.1.{name}"]
    assert {*tied.parameters} == {*transformer.graph.parameters}
    assert {*tied.values} >= {name for name, value in transformer.graph.values.items() if value.requires_grad}


def test_less_memory_takes_weights_in_parts_and_more_seconds(transformer: MeshFacts) -> None:
    free = signatures_on(transformer, MESH, LINKS)
    fits = signatures_on(transformer, MESH, LINKS, memory=int(0.5 * free.memory))
    assert fits.memory <= 0.5 * free.memory
    assert {*fits.again} <= {
        "gelu",
        "gelu_1",
        "scaled_dot_product_attention",
        "scaled_dot_product_attention_1",
        "add_3",
    }
    assert fits.again
    assert fits.seconds > free.seconds
    assert fits.gap == 0
    assert {*fits.levels.values()} & {1, 3}
    assert sum(fits.terms.values()) == pytest.approx(fits.seconds)


def test_the_table_tells_the_choice_and_what_cannot_run(transformer: MeshFacts) -> None:
    one = signatures_on(transformer, {"data": 2}, LINKS)
    assert one.not_runnable == ""
    assert "runtime" not in table(one, transformer.graph)
    assert "blocks.*.qkv.weight" in table(one, transformer.graph)
    assert "the best found of 10^11 choices; gap 0.00%" in table(one, transformer.graph)
    idle = signatures_on(transformer, MESH, dict.fromkeys(MESH, Link(1.0, 1.0)))
    assert (idle.not_runnable, idle.boxings) == ("", ())
    drawn, mesh = Drawn(1, 3), {"a": 4, "b": 2, "c": 2}
    three = signatures_on(drawn.facts(), mesh, dict.fromkeys(mesh, Link(0.0, 1e9)), drawn.profile())
    assert "over b, c, and" in three.not_runnable
    assert three.not_runnable in table(three, drawn.facts().graph)


@pytest.mark.parametrize("mesh", [{"tensor": 1}, {"other": 2}])
def test_a_mesh_that_is_none_is_refused(transformer: MeshFacts, mesh: Mapping[str, int]) -> None:
    with pytest.raises(PlanError, match=r"axis '(tensor|other)' of the mesh"):
        signatures_on(transformer, mesh, LINKS)


def test_micro_batches_are_boxed_each_in_its_turn_as_a_whole_batch_is(transformer: MeshFacts) -> None:
    """Without a latency, what computes and boxes rows takes as long however they are divided."""
    links = dict.fromkeys(("a", "b"), Link(0.0, 1e9))
    length = len(transformer.graph.ops) + 1
    nothing = Profile((0.0,) * length, (0.0,) * length, (0.0,) * length)
    whole, parts = (signatures_on(transformer, {"a": 2, "b": 2}, links, nothing, micro_batches=m) for m in (1, 2))
    rest = [sum(value for name, value in own.terms.items() if name != "boxing") for own in (whole, parts)]
    assert rest == pytest.approx([rest[0]] * 2)
    assert parts.terms["boxing"] == pytest.approx(whole.terms["boxing"])
