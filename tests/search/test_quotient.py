"""The search over bits bounds that over axes, its plans have exact prices, and stages are found as by brute force."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner import stages_on_hosts as stages
from benchmarks.planner.declared_gpt import Gpt, declared, layered
from benchmarks.planner.stages_on_hosts import Hosts, pipeline
from roundelay.errors import PlanError
from roundelay.ir.deduction import ShardedOp
from roundelay.ir.graph import Graph, Op, Parameter, Profile, Value
from roundelay.ir.layout import canonical
from roundelay.ir.op_form import Dims, OpForm
from roundelay.ir.sbp import B, parse
from roundelay.planner.cost_model import roofline
from roundelay.planner.mesh_signatures import MeshFacts
from roundelay.search.signatures.bit_prices import BitPrices
from roundelay.search.signatures.boxing_prices import BoxingPrices, Link
from roundelay.search.signatures.lifted import lifted
from roundelay.search.signatures.problem import Machine, problem
from roundelay.search.signatures.quotient import Bits, bits_of
from roundelay.search.signatures.searched import over_bits, signatures_on, table
from roundelay.search.signatures.tables import solve
from tests.search.small_graphs import Drawn

ALIKE = {"a": Link(0.0, 1.0), "b": Link(0.0, 1.0)}
APART = {"a": Link(3.0, 1.0), "b": Link(4.0, 0.25)}


Links = Mapping[str, Link]


def on_axes(facts: MeshFacts, profile: Profile, mesh: Mapping[str, int], links: Links) -> float:
    """Seconds of the best over whole axes; of equal ones together, too."""
    shapes = [mesh]
    if len({*links.values()}) == 1:
        shapes += [{"a": 2, "b": math.prod(mesh.values()) // 2}, {"a": math.prod(mesh.values())}]
    every = [Machine(own, links if own is mesh else dict.fromkeys(own, links["a"]), profile) for own in shapes]
    return min(solve(problem(facts, machine).tables).seconds for machine in every)


def bound(facts: MeshFacts, profile: Profile, mesh: Mapping[str, int], links: Links, *, full: bool) -> float:
    """Seconds of the best over bits."""
    bits, of_classes = bits_of(mesh, links)
    bits = Bits(bits.classes, full=full)
    machine = Machine(bits.mesh, {axis: of_classes[name] for axis, (name, _) in bits.axes.items()}, profile)
    return solve(problem(facts, machine, bits).tables).seconds


def chain(seed: int, count: int) -> tuple[MeshFacts, Profile]:
    """Products one after another, of 64 rows."""
    chance = np.random.default_rng(seed)
    widths = [2 ** int(chance.integers(2, 7)) for _ in range(count + 1)]
    rows: Dims = (((0, 64),),)
    ops, graph_ops, values, parameters, last = [], [], {}, {}, "input"
    for i, (inside, outside) in enumerate(itertools.pairwise(widths)):
        name, weight = f"op{i}", f"p{i}"
        args: dict[str, Dims] = {last: (*rows, ((2, inside),)), weight: (((1, outside),), ((2, inside),))}
        groups = frozenset([last]), frozenset([weight])
        ops.append(ShardedOp(name, OpForm(args, ((*rows, ((1, outside),)),), groups), 1.0))
        graph_ops.append(Op(name, "", "", (last,) if i else (), (weight,), (), 1, -1))
        values[name] = Value(name, "tensor", (64, outside), "float32", 256 * outside, True)
        parameters[weight] = Parameter(weight, (outside, inside), 4 * inside * outside, True)
        last = name
    graph = Graph(tuple(graph_ops), (), (), (last,), values, parameters, {}, (), False, "", 64)
    seconds = tuple((chance.random(count + 1) * 1e4).tolist())
    return MeshFacts(graph, tuple(ops), {name: name for name in parameters}), Profile(
        seconds, seconds, (0.0,) * (count + 1)
    )


@pytest.mark.parametrize("links", [ALIKE, APART])
def test_no_plan_over_axes_takes_less_than_the_best_over_bits(links: Links) -> None:
    below = 0
    for seed in range(12):
        drawn, mesh = Drawn(seed, 2 + seed % 3), {"a": 2, "b": 2}
        facts, profile = drawn.facts(), drawn.profile()
        over_axes = on_axes(facts, profile, mesh, links)
        least = bound(facts, profile, mesh, links, full=False)
        assert least <= over_axes * (1 + 1e-12), seed
        assert least >= 0.9 * over_axes, seed
        assert least <= bound(facts, profile, mesh, links, full=True) * (1 + 1e-12), seed
        below += least < over_axes * (1 - 1e-9)
    assert below < 6  # as bits have no order


@pytest.mark.parametrize("seed", range(6))
def test_of_chains_with_equal_links_bits_lose_nothing(seed: int) -> None:
    facts, profile = chain(seed, 2 + seed % 3)
    mesh = {"a": 2, "b": 2, "c": 2}
    links = dict.fromkeys(mesh, Link(0.0, 1.0))
    over_axes = on_axes(facts, profile, mesh, links)
    assert bound(facts, profile, mesh, links, full=False) == pytest.approx(over_axes, rel=1e-12)


@pytest.mark.parametrize("full", [False, True])
def test_what_is_found_over_bits_becomes_a_plan_over_axes_at_its_exact_price(full: bool) -> None:
    facts = declared(Gpt(width=512, layers=2, heads=8, symbols=1000, length=64, rows=32))
    profile, links = roofline(facts.graph), {"node": Link(1e-6, 2e9), "rack": Link(3e-6, 5e8)}
    bits = Bits({"node": 2, "rack": 1}, full=full)
    machine = Machine(bits.mesh, {axis: links[name] for axis, (name, _) in bits.axes.items()}, profile)
    made = problem(facts, machine, bits)
    found = solve(made.tables)
    space = lifted(bits, made, found)
    on_axes = replace(machine, mesh=space.mesh, links={axis: links[name] for axis, (name, _) in space.axes.items()})
    lifting = problem(facts, on_axes, space)
    plan = solve(lifting.tables)
    for variable, (value, _) in zip(lifting.variables, plan.choice, strict=True):
        for cluster in variable.clusters:
            for op, way in zip(cluster.ops, cluster.ways[value], strict=True):
                taken = Counter[tuple[object, str]]()
                for axis, letter in way.letters.items():
                    name, count = space.axes[axis]
                    taken[letter, name] += count
                wanted = {(letter, name): n for letter, own in dict(space.key(op)).items() for name, n in own}
                assert taken == wanted, op.name
    assert math.prod(space.mesh.values()) == 8
    assert found.seconds * (1 - 1e-12) <= plan.seconds <= 1.02 * found.seconds
    anyhow = signatures_on(facts, space.mesh, on_axes.links, profile) if len(space.mesh) < 4 else None
    assert anyhow is None or anyhow.seconds <= plan.seconds * (1 + 1e-12)


def test_a_large_mesh_is_searched_over_bits_and_over_its_axes_and_the_better_is_told() -> None:
    facts = declared(Gpt(width=256, layers=2, heads=4, symbols=500, length=32, rows=64))
    mesh, links = {"a": 8, "b": 4}, {"a": Link(1e-6, 5e9), "b": Link(4e-6, 1e9)}
    found = signatures_on(facts, mesh, links)
    own = over_bits(facts, Machine(mesh, links, roofline(facts.graph)))
    assert found.bound_s <= found.seconds <= own.seconds
    assert 0 <= own.gap < 0.03
    assert math.prod(own.mesh.values()) == 32
    assert sum(own.terms.values()) == pytest.approx(own.seconds)
    assert f"gap {found.gap:.2%}" in table(found, facts.graph)
    assert "cut as operations want it" in table(found, facts.graph)
    assert found.space > own.space
    whole = solve(problem(facts, Machine(mesh, links, roofline(facts.graph))).tables).seconds
    assert found.seconds == pytest.approx(min(whole, own.seconds))


def test_bits_of_one_operation_can_be_of_no_use_to_another() -> None:
    """Four heads and two rows are divided among eight workers at most: attention idles on the others."""
    facts = declared(Gpt(width=64, layers=1, heads=4, symbols=100, length=64, rows=2))
    links = {"a": Link(1e-6, 1e9)}
    found = over_bits(facts, Machine({"a": 32}, links, roofline(facts.graph)))
    assert 0 <= found.gap < 0.2


@pytest.mark.parametrize("links", [ALIKE, APART])
def test_boxings_over_bits_are_those_over_axes_in_the_best_order(links: Links) -> None:
    """But for those that change places in two dimensions: bits have no order."""
    mesh = {"a": 2, "b": 2}
    bits, of_classes = bits_of(mesh, links)
    signatures = itertools.product(map(parse, ("S(0)", "S(1)", "B", "P")), repeat=2)
    pairs = [[pair for pair in zip(mesh, own, strict=True) if pair[1] != B] for own in signatures]
    every = [*dict.fromkeys(canonical(tuple(own)) for each in pairs for own in itertools.permutations(each))]
    over_axes = BoxingPrices(every, mesh, links, 64.0).seconds(every, every)
    start = {axis: next(name for name in bits.axes if axis in name.partition("[")[0]) for axis in mesh}
    counted = [bits._canonical(tuple([(start[axis], own) for axis, own in lay])) for lay in every]
    own_links = {axis: of_classes[name] for axis, (name, _) in bits.axes.items()}
    own = BitPrices(bits.axes, tuple(bits.classes.items()), own_links, 64.0).seconds(counted, counted)
    assert (own <= over_axes * (1 + 1e-12)).all()
    same = []
    for i, k in itertools.product(range(len(every)), repeat=2):
        alike = [[j for j, lay in enumerate(counted) if lay == counted[end]] for end in (i, k)]
        same.append(bool(np.isclose(own[i, k], over_axes[np.ix_(*alike)].min())))
    assert np.mean(same) > 0.8
    assert own[0].max() > 0


def test_a_split_that_a_later_one_reads_is_not_undone_before_it() -> None:
    mesh = {"a": 2, "b": 2}
    source, target = ((("a", parse("S(0)")), ("b", parse("S(0/2)"))), (("b", parse("S(0/2)")),))
    over_axes = BoxingPrices([source, target, ()], mesh, APART, 64.0).seconds([source], [target])
    bits, _ = bits_of(mesh, APART)
    own = [tuple([(f"{axis}[0:1]", signature) for axis, signature in lay]) for lay in (source, target)]
    of_axes = {axis: APART[name] for axis, (name, _) in bits.axes.items()}
    found = BitPrices(bits.axes, tuple(bits.classes.items()), of_axes, 64.0).seconds(own[:1], own[1:])
    assert found == pytest.approx(over_axes)
    assert found > 64 / 2 / APART["a"].bytes_per_s + APART["a"].latency_s


HOSTS = Hosts(4, 2, Link(1e-6, 1e10), Link(1e-5, 1e9))
MODEL = layered(Gpt(width=64, layers=4, heads=4, symbols=200, length=32), 1e11)


def brute_force(hosts: Hosts, rows: int) -> float:
    """The fewest seconds of all stages of all layers, each solved."""
    least = math.inf
    for size in [1 << i for i in range(rows.bit_length()) if rows % (1 << i) == 0]:
        own = stages._OfRows(MODEL, hosts, size, rows // size)
        for count in range(1, MODEL.layers + 1):
            layers = [n for n in itertools.product(range(1, 5), repeat=count) if sum(n) == MODEL.layers]
            logs = [n for n in itertools.product(own.logs, repeat=count) if sum(2**k for k in n) <= hosts.count]
            for many, each in itertools.product(layers, logs):
                keys = [
                    (k, n, count - i, i == 0, i == count - 1) for i, (n, k) in enumerate(zip(many, each, strict=True))
                ]
                for key in keys:
                    if key not in own.solved:
                        own.solve(key)
                seconds = [own.solved[key].seconds for key in keys]
                least = min(least, (own.micro_batches - 1) * max(seconds) + sum(seconds))
    return least


@pytest.mark.parametrize(
    ("count", "slow", "memory"),
    [(4, 1.0, None), (4, 20.0, None), (3, 1.0, None), (4, 1.0, 400_000), (4, 20.0, 500_000)],
)
def test_stages_are_found_as_by_brute_force(
    monkeypatch: pytest.MonkeyPatch, count: int, slow: float, memory: int | None
) -> None:
    monkeypatch.setattr(stages, "SECONDS", 60.0)
    hosts = replace(HOSTS, count=count, memory=memory, between=Link(1e-5 * slow, 1e9 / slow))
    found = pipeline(MODEL, hosts, 6)
    assert found.seconds == pytest.approx(brute_force(hosts, 6), rel=1e-9)
    assert found.gap < 1e-9
    assert sum(stage.layers for stage in found.stages) == MODEL.layers
    assert sum(stage.hosts for stage in found.stages) <= hosts.count
    assert memory is None or all(stage.memory <= memory for stage in found.stages)
    assert found.rows * found.micro_batches == 6


def test_a_stage_keeps_results_of_as_many_micro_batches_as_stages_follow() -> None:
    stages_of = pipeline(MODEL, HOSTS, 6).stages
    assert len(stages_of) == 4
    assert [stage.layers for stage in stages_of] == [1, 1, 1, 1]
    assert stages_of[1].memory > stages_of[2].memory


def test_gradients_are_summed_over_axes_of_equal_links_at_once() -> None:
    nothing = Profile((), (), ())
    alike = Machine({"a": 2, "b": 2}, dict.fromkeys("ab", Link(1.0, 2.0)), nothing)
    assert alike.scatter_s(("a", "b"), 100.0) == pytest.approx(1 + 75 / 2)
    apart = replace(alike, links={"a": Link(1.0, 1.0), "b": Link(1.0, 100.0)})
    assert apart.scatter_s(("a", "b"), 100.0) == pytest.approx(2 + 50 / 100 + 25)


def test_a_model_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(PlanError, match="no stages that fit into the memory"):
        pipeline(MODEL, replace(HOSTS, memory=1000), 4)
