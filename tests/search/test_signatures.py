"""The search over signatures against brute force, against what experts do, and against sums made by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from roundelay.errors import PlanError
from roundelay.ir.graph import Profile
from roundelay.ir.layout import signature_on
from roundelay.ir.sbp import B, Signature, Split
from roundelay.planner.cost_model import roofline
from roundelay.planner.mesh_signatures import MeshFacts
from roundelay.search.signatures.boxing_prices import Link
from roundelay.search.signatures.clusters import Cluster
from roundelay.search.signatures.problem import Machine, Problem, problem
from roundelay.search.signatures.searched import signatures_on, table
from roundelay.search.signatures.tables import Priced, Tables, solve
from roundelay.search.signatures.ways import splits
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
    assert sum(agrees(seed, 5, 100_000) for seed in range(first, first + 30)) >= 20


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
        signature_on(splits(dims, own, {"tensor": 2, "data": 2}, together=True), axis) == places.get(name, B)
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
    """Seconds of the best choice of a family: for each axis signatures of parameters, or None: data parallel."""
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
    return solve(Tables(tuple(tables), made.tables.pairs)).seconds


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
    fits = signatures_on(transformer, MESH, LINKS, memory=int(0.6 * free.memory))
    assert fits.memory <= 0.6 * free.memory
    assert fits.seconds > free.seconds
    assert fits.gap == 0
    assert {*fits.levels.values()} & {1, 3}
    assert sum(fits.terms.values()) == pytest.approx(fits.seconds)


def test_the_table_tells_the_choice_and_what_cannot_run(transformer: MeshFacts) -> None:
    one = signatures_on(transformer, {"data": 2}, LINKS)
    assert one.not_runnable == ""
    assert "runtime" not in table(one, transformer.graph)
    assert "blocks.*.qkv.weight" in table(one, transformer.graph)
    assert "the best of 10^" in table(one, transformer.graph)
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
