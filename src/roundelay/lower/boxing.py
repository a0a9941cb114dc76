"""The way from one lay of a tensor to another: the price is the execution.

A route is a list of steps, each along one axis: a worker makes it alone, or the holders along the axis exchange
(OneFlow, Table 2; Sect. 3.3 for several axes). The cheapest is found by Dijkstra's algorithm over lays. A split can be
undone, or exchanged for one of another dimension, where no later split reads what it has left. What is partial and
becomes broadcast may be split flat in between: partial over two axes of two, all is reduced and scattered along both
and gathered again, 3/2 of the tensor from each worker in place of 2. Holders that have the same may share the sending:
each takes a part, and they gather it afterwards.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial

from roundelay.errors import InternalError
from roundelay.ir.boxing import exchanged_shape, phases_of
from roundelay.ir.exchange import Phase, elements_sent
from roundelay.ir.layout import FLAT, Lay, Layout, canonical, local_shape_at, signature_on
from roundelay.ir.mesh import Mesh
from roundelay.ir.sbp import P_MAX, B, P, Partial, Signature, Split

Sizes = tuple[tuple[str, int], ...]
"""Holders along each axis, by its name."""


def is_local(source: Signature, target: Signature) -> bool:
    """Whether a worker makes the one from the other alone: a slice, a mask, zeros around a part."""
    return source in (target, B) or (target == P and source != P_MAX)


@dataclass(frozen=True, slots=True)
class Step:
    """One step, along one axis.

    Args:
        axis: its name.
        source: the signature before.
        target: the signature after it.
    """

    axis: str
    source: Signature
    target: Signature

    @property
    def phases(self) -> tuple[Phase, ...]:
        """How the holders along the axis exchange; none where each makes it alone."""
        return () if is_local(self.source, self.target) else phases_of(_as_row(self.source), _as_row(self.target))

    def __str__(self) -> str:
        return f"{self.axis}: {self.source} > {self.target}"


@dataclass(frozen=True, slots=True)
class Route:
    """How one lay becomes another.

    Args:
        lays: before the first step, and after each.
        steps: in order.
        share: of the tensor's bytes, what a worker sends where all parts are even.
    """

    lays: tuple[Lay, ...]
    steps: tuple[Step, ...]
    share: Fraction


def elements(route: Route, shape: tuple[int, ...], mesh: Mesh, holder: int) -> list[int]:
    """How many elements a holder sends in each step.

    Args:
        route: over axes of the mesh.
        shape: of the whole tensor.
        mesh: the holders.
        holder: its number.
    """
    at, sent = mesh.coordinates(holder), []
    for before, step in zip(route.lays, route.steps, strict=False):
        whole = local_shape_at(shape, tuple([p for p in before if p[0] != step.axis]), mesh.sizes, at)
        source, target = _as_row(step.source), _as_row(step.target)
        if FLAT in {getattr(step.source, "dim", None), getattr(step.target, "dim", None)}:
            whole = (math.prod(whole),)
        exchanged = exchanged_shape(whole, source, target)
        size, position = mesh.sizes[step.axis], at[step.axis]
        sent.append(sum(elements_sent(step.phases, exchanged, size, position)) if step.phases else 0)
    return sent


def _as_row(signature: Signature) -> Signature:
    """A flat split as the one of the row that is split."""
    return Split(0) if isinstance(signature, Split) and signature.dim == FLAT else signature


@cache
def route(source: Lay, target: Lay, sizes: Sizes, dims: int = 0) -> Route:
    """The cheapest way from one lay to another.

    Args:
        source: what there is.
        target: what is wanted; nothing of it is flat.
        sizes: of the axes.
        dims: of the tensor that may be split in between, where that makes less to send.

    Raises:
        InternalError: there is none: the largest numbers are no part of a sum.
    """
    begin, end, size_of = canonical(source), canonical(target), dict(sizes)
    best: dict[Lay, tuple[Fraction, int]] = {begin: (Fraction(0), 0)}
    came: dict[Lay, tuple[Lay, Step]] = {}
    open_lays = [(Fraction(0), 0, str(begin), begin)]
    while open_lays:
        cost, count, _, own = heapq.heappop(open_lays)
        if own == end:
            return _route(begin, end, came, cost)
        if (cost, count) > best[own]:
            continue
        for step, after, share in moves(own, size_of, partial(_towards, end, dims)):
            reached = cost + share, count + 1
            if after not in best or reached < best[after]:
                best[after], came[after] = reached, (own, step)
                heapq.heappush(open_lays, (*reached, str(after), after))
    raise InternalError(
        f"a boxing over {', '.join(f'{axis} {size}' for axis, size in sizes)}",
        got=f"{source}, which cannot become {target}",
        expected="a lay that can be made of the other",
        remedy="Report this as a bug.",
    )


def route_between(source: Layout, target: Layout) -> Route:
    """The same for two lays of a tensor on one mesh."""
    return route(source.lay, target.lay, tuple((axis.name, axis.size) for axis in source.mesh.axes), len(source.shape))


def _route(begin: Lay, end: Lay, came: Mapping[Lay, tuple[Lay, Step]], cost: Fraction) -> Route:
    lays, steps, own = [end], [], end
    while own != begin:
        own, step = came[own]
        lays.append(own)
        steps.append(step)
    return Route(tuple(reversed(lays)), tuple(reversed(steps)), cost)


Choice = Callable[[str, Lay], tuple[Iterable[Split], bool]]
"""From an axis and the lay over the others: splits that it may get, and whether it may become partial."""


def moves(own: Lay, sizes: Mapping[str, int], choice: Choice) -> Iterator[tuple[Step, Lay, Fraction]]:
    """Steps from a lay, what it is afterwards, and the share of the tensor that a worker sends.

    Args:
        own: the lay.
        sizes: of the axes.
        choice: what each of them may become beside broadcast and, where it is partial, split flat.
    """
    held = math.prod([Fraction(1, sizes[axis]) for axis, one in own if isinstance(one, Split)], start=Fraction(1))
    for axis, size in sizes.items():
        has = signature_on(own, axis)
        if isinstance(has, Split) and not _is_last(own, axis, has.dim):
            continue
        rest = tuple([pair for pair in own if pair[0] != axis])
        for wanted in _wanted(has, rest, *choice(axis, rest)):
            after = canonical(rest if wanted == B else (*rest, (axis, wanted)))
            yield Step(axis, has, wanted), after, held * _sent(has, wanted, size)


def _is_last(own: Lay, axis: str, dim: int) -> bool:
    """Whether no later split reads what an axis's has left."""
    if dim != FLAT and any(isinstance(one, Split) and one.dim == FLAT for _, one in own):
        return False
    return [name for name, one in own if isinstance(one, Split) and one.dim == dim][-1] == axis


def _wanted(has: Signature, rest: Lay, splits: Iterable[Split], to_partial: bool) -> Iterator[Signature]:
    """What an axis's signature may become."""
    is_flat = any(isinstance(one, Split) and one.dim == FLAT for _, one in rest)
    if isinstance(has, Split) and has.dim == FLAT:
        yield B
        return
    if not is_flat:  # there is no exchange between two splits of one dimension
        yield from (one for one in splits if not _in(has, one.dim))
    if has != B:
        yield B
    if to_partial and has not in (P, P_MAX) and not is_flat:
        yield P
    if isinstance(has, Partial):
        yield Split(FLAT)


def _towards(end: Lay, dims: int, axis: str, rest: Lay) -> tuple[list[Split], bool]:
    """What an axis may become on the way to a lay."""
    goal = signature_on(end, axis)
    ways = [goal] if isinstance(goal, Split) and _is_prefix((*rest, (axis, goal)), end, goal.dim) else []
    return ways + [one for one in map(Split, range(dims)) if one not in ways], goal == P


def _in(own: Signature, dim: int) -> bool:
    return isinstance(own, Split) and own.dim == dim


def _is_prefix(own: Lay, end: Lay, dim: int) -> bool:
    """Whether the target splits a dimension first as a lay does."""
    mine, goal = ([pair for pair in lay if isinstance(pair[1], Split) and pair[1].dim == dim] for lay in (own, end))
    return mine == goal[: len(mine)]


def _sent(source: Signature, target: Signature, size: int) -> Fraction:
    """Of what a worker has, what it sends along an axis of this size."""
    if is_local(source, target):
        return Fraction(0)
    if isinstance(source, Partial):
        return Fraction(size - 1, size) * (1 if isinstance(target, Split) else 2)
    return Fraction(size - 1, size) if isinstance(target, Split) else Fraction(size - 1)
