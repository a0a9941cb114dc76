"""Routes between lays on meshes of several axes: all holders simulated, every element that is sent counted."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import pytest
import torch

from roundelay.frontend.mesh.local_graph import as_part, put_part, take_part
from roundelay.ir.boxing import exchanged_shape
from roundelay.ir.layout import FLAT, Lay, Layout, canonical, local_shape_at
from roundelay.ir.mesh import Axis, Mesh
from roundelay.ir.sbp import B, P, Signature, Split
from roundelay.lower.boxing import Route, Sizes, Step, elements, route, route_between
from roundelay.runtime.collectives import Exchange

MESHES = [(2,), (3,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (2, 3, 2)]
PAIRS = 1000
S0, S1 = Split(0), Split(1)


def mesh_of(sizes: tuple[int, ...]) -> Mesh:
    return Mesh(tuple(Axis("abc"[i], size) for i, size in enumerate(sizes)))


def sizes_of(mesh: Mesh) -> Sizes:
    return tuple((axis.name, axis.size) for axis in mesh.axes)


def drawn_lay(draws: random.Random, mesh: Mesh, shape: tuple[int, ...]) -> Lay:
    """In any order; blocks and units only where every part has the same size."""
    lay: list[tuple[str, Signature]] = []
    axes = list(mesh.axes)
    draws.shuffle(axes)
    for axis in axes:
        kind = draws.choice("BPSS")
        if kind == "P":
            lay.append((axis.name, P))
        elif kind == "S":
            dim = draws.randrange(len(shape))
            split = Split(dim)
            taken = any(isinstance(own, Split) and own.dim == dim for _, own in lay)
            if not taken and shape[dim] % 6 == 0 and draws.random() < 0.5:
                split = draws.choice([Split(dim, 2), Split(dim, 3), Split(dim, 1, 2), Split(dim, 1, 3)])
            lay.append((axis.name, split))
    return tuple(lay)


def held(layout: Layout, whole: torch.Tensor, draws: torch.Generator) -> list[torch.Tensor]:
    """What every holder has; addends of what is partial are drawn, and add up to the whole."""
    partial = {axis for axis, own in layout.lay if own == P}
    parts = [cut(layout, whole, holder) for holder in range(layout.mesh.size)]
    groups = defaultdict(list)
    for holder in range(layout.mesh.size):
        at = layout.mesh.coordinates(holder)
        groups[tuple(at[axis] for axis in at if axis not in partial)].append(holder)
    for group in groups.values():
        rest = parts[group[0]]
        for holder in group[1:]:
            parts[holder] = torch.randint(-5, 6, rest.shape, generator=draws).double()
            rest = rest - parts[holder]
        parts[group[0]] = rest
    return parts


def cut(layout: Layout, whole: torch.Tensor, holder: int) -> torch.Tensor:
    for dim, ranges in enumerate(layout.pieces(holder)):
        whole = whole.index_select(dim, torch.tensor([i for start, end in ranges for i in range(start, end)]).long())
    return whole.clone()


def fields(split: Split) -> tuple[int, int, int]:
    return split.dim, split.outer, split.unit


def carried_out(
    way: Route, shape: tuple[int, ...], mesh: Mesh, parts: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[int]]:
    """What every holder has in the end, and how many elements it has sent."""
    sent = [0] * mesh.size
    for step, before, after in zip(way.steps, way.lays[:-1], way.lays[1:], strict=True):
        for group in mesh.groups(step.axis):
            own = [parts[holder] for holder in group]
            for position, made in enumerate(stepped(step, own, before, shape, mesh, group, sent)):
                holder = group[position]
                parts[holder] = made.reshape(local_shape_at(shape, after, mesh.sizes, mesh.coordinates(holder)))
    return parts, sent


def stepped(
    step: Step,
    own: list[torch.Tensor],
    before: Lay,
    shape: tuple[int, ...],
    mesh: Mesh,
    group: list[int],
    sent: list[int],
) -> list[torch.Tensor]:
    source, target = step.source, step.target
    if not step.phases:
        at = [(len(group), position) for position in range(len(group))]
        if isinstance(target, Split):
            return [take_part(x, split=fields(target), at=one) for x, one in zip(own, at, strict=True)]
        if isinstance(source, Split):
            rest = tuple(pair for pair in before if pair[0] != step.axis)
            whole = local_shape_at(shape, rest, mesh.sizes, mesh.coordinates(group[0]))[source.dim]
            return [put_part(x, split=fields(source), at=one, size=whole) for x, one in zip(own, at, strict=True)]
        return [as_part(x, first=position == 0) for _, position in at for x in [own[position]]]
    row = [Split(0) if isinstance(s, Split) and s.dim == FLAT else s for s in (source, target)]
    is_row = row != [source, target]
    given = [x.reshape(-1) if is_row else x for x in own]
    given = [x.reshape(exchanged_shape(x.shape, row[0], row[1])).contiguous() for x in given]
    machines = [Exchange(step.phases, position, len(group)) for position in range(len(group))]
    waiting = [(p, piece) for p, machine in enumerate(machines) for piece in machine.start(0, (given[p],))]
    while waiting:
        source_of, piece = waiting.pop(0)
        sent[group[source_of]] += sum(part.numel() for part in piece.parts)
        more = machines[piece.target].take(source_of, 0, piece.phase, piece.parts)
        waiting += [(piece.target, one) for one in more]
    return [machine.result(0)[0] for machine in machines]


@pytest.mark.parametrize("number", range(PAIRS))
def test_a_route_ends_where_it_should_and_costs_what_it_says(number: int) -> None:
    draws = random.Random(number)
    mesh = mesh_of(draws.choice(MESHES))
    shape = tuple(draws.choice([1, 2, 5, 6, 7, 12]) for _ in range(draws.randint(1, 3)))
    source, target = (Layout(shape, mesh, drawn_lay(draws, mesh, shape)) for _ in range(2))
    whole = torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(number)).double()
    way = route_between(source, target)
    parts, sent = carried_out(way, shape, mesh, held(source, whole, torch.Generator().manual_seed(number)))
    assert sent == [sum(elements(way, shape, mesh, holder)) for holder in range(mesh.size)]
    wanted = Layout(shape, mesh, canonical(target.lay))
    assert [tuple(part.shape) for part in parts] == [wanted.local_shape(holder) for holder in range(mesh.size)]
    assert way.share <= route(source.lay, (), sizes_of(mesh)).share + route((), target.lay, sizes_of(mesh)).share
    partial = {axis for axis, own in target.lay if own == P}
    sums: dict[tuple[int, ...], torch.Tensor] = {}
    for holder, part in enumerate(parts):
        at = mesh.coordinates(holder)
        group = tuple(at[axis] for axis in at if axis not in partial)
        sums[group] = sums[group] + part if group in sums else part
    for holder in range(mesh.size):
        at = mesh.coordinates(holder)
        assert torch.equal(sums[tuple(at[axis] for axis in at if axis not in partial)], cut(wanted, whole, holder))


@pytest.mark.parametrize(
    ("source", "target", "share"),
    [
        ((("a", P),), (("a", S0),), "1/2"),
        ((("a", P), ("b", P)), (("a", S0), ("b", S0)), "3/4"),
        ((("a", P), ("b", P)), (), "3/2"),
        ((("a", S0), ("b", S0)), (), "3/4"),
        ((("a", S0),), (("a", S1),), "1/4"),
        ((("a", S0), ("b", P)), (("a", S0),), "1/2"),
    ],
)
def test_shares_on_two_by_two(source: Lay, target: Lay, share: str) -> None:
    assert str(route(source, target, (("a", 2), ("b", 2))).share) == share


def test_a_way_around_is_not_shorter_and_names_do_not_matter() -> None:
    draws = random.Random(0)
    mesh, shape = mesh_of((2, 3, 2)), (12, 12)
    lays = [canonical(tuple(p for p in drawn_lay(draws, mesh, shape) if plain(p[1]))) for _ in range(40)]
    sizes = sizes_of(mesh)
    shares = {(a, b): route(a, b, sizes, len(shape)).share for a in lays for b in lays}
    for a in lays[:20]:
        for b in lays[20:]:
            for c in lays:
                if not partial_on(c):  # zeros around parts, to be summed, are no way that is taken
                    assert shares[a, b] <= shares[a, c] + shares[c, b], (a, c, b)
    other = {"a": "z", "b": "y", "c": "x"}
    for (a, b), share in list(shares.items())[:400]:
        renamed = [tuple((other[axis], own) for axis, own in lay) for lay in (a, b)]
        assert route(*renamed, tuple((other[axis], size) for axis, size in sizes), len(shape)).share == share


def partial_on(lay: Lay) -> set[str]:
    return {axis for axis, own in lay if own == P}


def plain(own: Signature) -> bool:
    return not isinstance(own, Split) or own.outer * own.unit == 1


def test_pieces_are_nested() -> None:
    mesh = mesh_of((2, 3))
    own = Layout((12,), mesh, (("a", Split(0, 2)), ("b", S0)))
    expected = [((0, 2),), ((2, 3), (6, 7)), ((7, 9),), ((3, 5),), ((5, 6), (9, 10)), ((10, 12),)]
    assert [own.pieces(holder)[0] for holder in range(6)] == expected
    assert math.prod(own.local_shape(1)) == 2
    assert Layout((7,), mesh, (("b", S0), ("a", S0))).pieces(0) == (((0, 2),),)
    assert B not in dict(canonical((("a", B),))).values()
