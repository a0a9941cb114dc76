"""Meshes: holders by replica and place, and the groups that exchange along an axis."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from roundelay.ir.mesh import REPLICAS, Mesh

SIZES = st.integers(1, 4)


@given(SIZES, st.lists(SIZES, max_size=2))
def test_holders_count_through_the_axes_the_last_one_fastest(replicas: int, sizes: list[int]) -> None:
    names = [f"axis {i}" for i in range(len(sizes))]
    mesh = Mesh.of(replicas, dict(zip(names, sizes, strict=True)))
    at = list(product(range(replicas), *map(range, sizes)))
    assert mesh.size == len(at)
    assert (mesh.replicas, mesh.places) == (replicas, len(at) // replicas)
    for holder, coordinates in enumerate(at):
        replica, place = mesh.where(holder)
        assert replica == coordinates[0]
        assert mesh.holder(replica, place) == holder
    for i, name in enumerate([REPLICAS, *names]):
        groups = mesh.groups(name)
        assert sorted(holder for group in groups for holder in group) == list(range(mesh.size))
        for group in groups:
            assert [at[holder][i] for holder in group] == list(range(len(group)))
            assert len({(*at[holder][:i], *at[holder][i + 1 :]) for holder in group}) == 1
