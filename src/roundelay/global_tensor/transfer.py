"""Change the signature or the placement of what processes have of a tensor, by messages from process to process.

Within a placement the exchange is the one that a plan's boxings are: the same phases, and sums in the order of the
processes. Between placements every process gets exactly the part that it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from roundelay.frontend.mesh.local_graph import as_part, put_part, take_part
from roundelay.global_tensor.placement import Placement
from roundelay.ir.boxing import exchanged_shape
from roundelay.ir.exchange import Phase
from roundelay.ir.layout import Lay, local_shape_at
from roundelay.ir.sbp import B, P, Signature, Split, bounds, local_shape
from roundelay.lower.boxing import route
from roundelay.runtime.collectives import Exchange

Shape = Sequence[int]


def boxed(local: torch.Tensor, shape: Shape, source: Signature, target: Signature, on: Placement) -> torch.Tensor:
    """What this process has of a tensor of this shape with another signature on the same placement."""
    position = on.position
    if position is None or source == target:
        return local
    way = route(_lay(source), _lay(target), ((_AXIS, on.size),))
    for step, after in zip(way.steps, way.lays[1:], strict=True):
        sizes = local_shape_at(shape, after, {_AXIS: on.size}, {_AXIS: position})
        if not step.phases:
            local = _alone(local, shape, step.source, step.target, (on.size, position))
            continue
        whole = exchanged_shape(shape, step.source, step.target)
        given = local.reshape(exchanged_shape(local.shape, step.source, step.target)).contiguous()
        local = _exchanged(given, step.phases, whole, on.ranks, position).view(sizes)
    return local


_AXIS = "processes"


def _lay(signature: Signature) -> Lay:
    return () if signature == B else ((_AXIS, signature),)


def _alone(
    local: torch.Tensor, shape: Shape, source: Signature, target: Signature, at: tuple[int, int]
) -> torch.Tensor:
    if isinstance(target, Split):
        return take_part(local, split=_fields(target), at=at).contiguous()
    if isinstance(source, Split):
        return put_part(local, split=_fields(source), at=at, size=shape[source.dim])
    return as_part(local, first=at[1] == 0)


def _fields(split: Split) -> tuple[int, int, int]:
    return split.dim, split.outer, split.unit


def _exchanged(
    given: torch.Tensor, phases: Sequence[Phase], sizes: Shape, ranks: Sequence[int], position: int
) -> torch.Tensor:
    """The result of an exchange of a tensor of these sizes, of which ``given`` is what this process has."""
    exchange = Exchange(phases, position, len(ranks))
    pieces = exchange.start(0, (given,))
    split = phases[0].join  # what is joined was split before, else it is partial
    for number, phase in enumerate(phases):
        waiting = [_sent(piece.parts[0], ranks[piece.target]) for piece in pieces]
        pieces = []
        for source in range(len(ranks)):
            if source != position:
                came = given.new_empty(_piece_shape(sizes, ((split, source), (phase.put, position)), len(ranks)))
                dist.recv(came, ranks[source])
                pieces += exchange.take(source, 0, number, (came,))
        for work in waiting:
            work.wait()
        split = phase.put
    (result,) = exchange.result(0)
    return result


def _sent(part: torch.Tensor, rank: int) -> dist.Work:
    work = dist.isend(part, rank)
    assert work is not None, "this process is in the default group"
    return work


Cut = tuple[int | None, int]
"""A dimension that is cut, or None, and for which process."""


def _piece_shape(sizes: Shape, cuts: tuple[Cut, Cut], parts: int) -> tuple[int, ...]:
    """The shape of what a process gets: cut as its source has it, and for itself."""
    shape = list(sizes)
    for dim, position in cuts:
        if dim is not None:
            start, end = bounds(sizes[dim], parts)[position]
            shape[dim] = end - start
    return tuple(shape)


def moved_to(
    local: torch.Tensor, shape: Shape, has: tuple[Placement, Signature], wanted: tuple[Placement, Signature]
) -> torch.Tensor:
    """What this process has of a tensor on another placement; empty where it has no place there.

    Args:
        local: what it has of it; empty where it has no place.
        shape: of the tensor.
        has: where the tensor lies, and how.
        wanted: where it shall lie, and how.
    """
    (source, own), (target, signature) = has, wanted
    if source == target:
        return boxed(local, shape, own, signature, source)
    if own == P:
        local, own = boxed(local, shape, P, B, source), B
    parts = _regions(shape, own, source.size)
    held = B if signature == P else signature
    wholes = _regions(shape, held, target.size)
    result = _assembled(local, shape, (source, own, parts), (target, held, wholes))
    first = target.position == 0
    return as_part(result, first=first) if signature == P and target.position is not None else result


Region = tuple[int | None, torch.Tensor]
"""A dimension, and the places in it; None and nothing for all of a tensor."""

_ALL: Region = (None, torch.empty(0, dtype=torch.int64))


def _regions(shape: Shape, signature: Signature, parts: int) -> list[Region]:
    """What each process has of a tensor."""
    if not isinstance(signature, Split):
        return [_ALL] * parts
    ranges = [signature.ranges(shape[signature.dim], parts, part) for part in range(parts)]
    return [(signature.dim, torch.cat([torch.arange(start, end) for start, end in own])) for own in ranges]


def _assembled(
    local: torch.Tensor,
    shape: Shape,
    source: tuple[Placement, Signature, list[Region]],
    target: tuple[Placement, Signature, list[Region]],
) -> torch.Tensor:
    """Send every process of the target what it lacks, and put together what has come for this one."""
    (givers, own, parts), (takers, held, wholes) = source, target
    pairs = [
        (giver, taker)
        for taker in range(takers.size)
        for giver in (range(givers.size) if isinstance(own, Split) else [taker % givers.size])
    ]
    waiting, kept = [], dict[int, torch.Tensor]()
    for giver, taker in pairs:
        if giver == givers.position:
            part = _cut(local, parts[giver], wholes[taker])
            if givers.ranks[giver] == takers.ranks[taker]:
                kept[giver] = part
            elif part.numel():
                waiting.append(_sent(part, takers.ranks[taker]))
    result = local.new_empty(0)
    if takers.position is not None:
        result = local.new_empty(local_shape(shape, held, takers.size, takers.position))
        for giver, taker in pairs:
            if taker == takers.position:
                regions = parts[giver], wholes[taker]
                own_part = kept.get(giver)
                part = _received(local, shape, regions, givers.ranks[giver]) if own_part is None else own_part
                _put(result, part, *regions)
    for work in waiting:
        work.wait()
    return result


def _common(given: Region, wanted: Region) -> Region:
    """Of one dimension: which places both have."""
    places = wanted[1][torch.isin(wanted[1], given[1])]
    return given[0], places


def _within(places: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """Where places stand in a list of them, which is in order."""
    return torch.searchsorted(of, places)


def _cut(local: torch.Tensor, given: Region, wanted: Region) -> torch.Tensor:
    """What one process has of what another wants."""
    if wanted[0] is None:
        return local.contiguous()
    if wanted[0] != given[0]:
        return local.index_select(wanted[0], wanted[1].to(local.device))
    dim, places = _common(given, wanted)
    assert dim is not None
    return local.index_select(dim, _within(places, given[1]).to(local.device))


def _received(like: torch.Tensor, shape: Shape, regions: tuple[Region, Region], rank: int) -> torch.Tensor:
    sizes = list(shape)
    given, wanted = regions
    if given[0] == wanted[0] and given[0] is not None:
        sizes[given[0]] = len(_common(given, wanted)[1])
    else:
        for dim, places in regions:
            if dim is not None:
                sizes[dim] = len(places)
    part = like.new_empty(sizes)
    if part.numel():
        dist.recv(part, rank)
    return part


def _put(result: torch.Tensor, part: torch.Tensor, given: Region, wanted: Region) -> None:
    if given[0] is None:
        result.copy_(part)
    elif given[0] == wanted[0]:
        places = _common(given, wanted)[1]
        result.index_copy_(given[0], _within(places, wanted[1]).to(part.device), part)
    else:
        result.index_copy_(given[0], given[1].to(part.device), part)
