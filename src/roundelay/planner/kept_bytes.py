"""Bytes of activations that stages keep from their forward to their backward, wherever the graph is cut.

They come from one run of the whole model, in which each operation's saved tensors are noted by storage. A stage keeps
the storages that its operations save, and those of the values that it receives or sends and to which a gradient comes
back, each once. What stages of one worker both keep is held once, by the first of them: its forward comes first, and
its backward last.

Not counted are messages on their way, among them values that skip stages. A view that is not contiguous is copied where
it goes to another stage. If operations behind the cut then make other strides than in the run, and so copies or none,
what they keep may differ from this count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from roundelay.ir.graph import Graph, Op
from roundelay.ir.stage import StageSpec
from roundelay.lower.dataflow import hops
from roundelay.planner.cost_model import Cuts, boundaries_of


@dataclass(frozen=True, slots=True)
class SavedStorages:
    """What the operations of a graph save for their backwards on one micro-batch.

    Args:
        num_bytes: bytes of each storage; storages are known by their place here.
        saved: for each operation, the loss last, the storages that its backward reads, parameters not counted.
        values: the storage of each value that may go from stage to stage, by name, inputs included.
        views: by name of a value that another stage gets as a copy, the storage of which it is a view here.
    """

    num_bytes: tuple[int, ...]
    saved: tuple[tuple[int, ...], ...]
    values: dict[str, int] = field(hash=False)
    views: dict[str, int] = field(hash=False)


_Crossing = list[tuple[int, int, int]]
"""For each hop with a gradient, the operation that it comes from, the storage, and that of which it is a view."""


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """The bytes of activations of every stage between two boundaries.

    Args:
        boundaries: where stages may begin and end, from 0 to n + 1.
        shared: whether the stages are on one worker, and bytes that an earlier one holds are not counted again.
        storages: what the operations save.
        _into: the hops into each operation, the loss last.
        _across: the hops across each boundary.
        _rows: the bytes of stages, by where they begin and end, as far as they were asked for.
    """

    boundaries: Cuts
    shared: bool
    storages: SavedStorages
    _into: tuple[_Crossing, ...]
    _across: dict[int, _Crossing]
    _rows: dict[int, dict[int, int]] = field(default_factory=dict)

    def of_stage(self, start: int, stop: int) -> int:
        """Bytes that a stage keeps of one micro-batch; without those that an earlier stage holds, if shared."""
        if start not in self._rows:
            self._rows[start] = self._row(start)
        return self._rows[start][stop]

    @property
    def whole(self) -> int:
        """Bytes that the uncut model keeps of one micro-batch."""
        return self.of_stage(self.boundaries[0], self.boundaries[-1])

    def _row(self, start: int) -> dict[int, int]:
        kept, row, total, place = self._free(start), {}, 0, start
        for stop in self.boundaries[bisect_right(self.boundaries, start) :]:
            for i in range(place, stop):
                entering = (storage for source, storage, _ in self._into[i] if source < start)
                new = {*self.storages.saved[i], *entering} - kept
                kept |= new
                total += self._bytes(new)
            row[stop] = total + self._bytes({s for source, s, _ in self._across[stop] if source >= start} - kept)
            place = stop
        return row

    def _free(self, start: int) -> set[int]:
        """The storages that a stage does not have since it has copies, or that earlier stages hold, if shared."""
        entering = {storage for _, storage, _ in self._across[start]}
        copied = {base for _, _, base in self._across[start]} - entering
        return copied | entering.union(*self.storages.saved[:start]) if self.shared else copied

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self.storages.num_bytes[s] for s in storages)


def kept_bytes(graph: Graph, storages: SavedStorages, *, shared: bool, again: Sequence[range] = ()) -> KeptBytes:
    """Return the bytes of every stage of a graph.

    Args:
        graph: the logical graph.
        storages: what its operations save.
        shared: whether the stages are on one worker.
        again: numbers of the operations that backwards recompute.
    """
    boundaries, storages, end = boundaries_of(graph), _recomputed(graph, storages, again), len(graph.ops)
    into: tuple[_Crossing, ...] = tuple([[] for _ in storages.saved])
    across: dict[int, _Crossing] = {boundary: [] for boundary in boundaries}
    for hop in hops(graph):
        if not hop.gradient:
            continue
        runs_again, storage = any(hop.source in part for part in again), storages.values[hop.name]
        crossing = hop.source, storage, storages.views.get(hop.name, storage)
        apart = hop.target == end and not runs_again  # the loss, which reads it as if it were another stage
        into[hop.target].append((-1, *crossing[1:]) if apart else crossing)
        for boundary in boundaries[bisect_right(boundaries, hop.source) : bisect_right(boundaries, hop.target)]:
            across[boundary] += [] if runs_again else [crossing]  # nor does its stage keep it then
    return KeptBytes(boundaries, shared, storages, into, across)


def staggered_bytes(kept: Sequence[int], micro_batches: int) -> tuple[int, ...]:
    """Return the bytes that staggered micro-batches keep together, over the time between the starts of two of them.

    Each of N starts 2S/N time steps after the one before, of which a batch takes 2S (Cyclic Data Parallelism, 2024,
    Sect. 3.2); stage k, from 0, keeps its bytes from step k to step 2S - 1 - k. Entries are those of N-ths of a step.

    Args:
        kept: bytes of one micro-batch in each stage.
        micro_batches: N.
    """
    size, end = micro_batches, 2 * len(kept)
    spans = [range(k * size, (end - k) * size) for k in range(len(kept))]  # in N-ths of a step since its start
    totals = []
    for now in range(end):
        ages = range(now, now + end * size, end)
        totals.append(
            sum(num_bytes * sum(age in span for age in ages) for num_bytes, span in zip(kept, spans, strict=True))
        )
    return tuple(totals)


def on_a_worker(storages: SavedStorages, whole: Graph, local: Graph) -> SavedStorages:
    """Return the storages of the first worker of a mesh, which has parts of some values.

    Args:
        storages: of a worker alone.
        whole: its graph.
        local: the same on the mesh.
    """
    sizes = list(storages.num_bytes)
    for name, place in (*storages.values.items(), *storages.views.items()):
        if name in local.values and (size := whole.values[name].num_bytes):
            part = storages.num_bytes[place] * local.values[name].num_bytes // size
            sizes[place] = min(sizes[place], part)
    return replace(storages, num_bytes=tuple(sizes))


def made_again(graph: Graph, storages: SavedStorages, parts: Iterable[Sequence[Op]]) -> int:
    """Return the most bytes that a backward keeps of what it computes again: one part after another, the last first.

    Args:
        graph: the logical graph.
        storages: what its operations save.
        parts: each with its operations; boxings keep nothing.
    """
    places = {op.name: i for i, op in enumerate(graph.ops)}
    kept = [{s for op in part if op.name in places for s in storages.saved[places[op.name]]} for part in parts]
    return max((sum(storages.num_bytes[s] for s in own) for own in kept), default=0)


def again_in(laid: Graph, spec: StageSpec, backward: str) -> list[tuple[Op, ...]]:
    """Return the parts of a stage that a backward computes again; with the mode ``recompute`` the whole stage."""
    ops = [laid.ops[segment.start : segment.stop] for segment in spec.segments]
    return [tuple(chain(*ops))] if backward == "recompute" else [ops[number] for number in spec.recomputed]


def _recomputed(graph: Graph, storages: SavedStorages, again: Sequence[range]) -> SavedStorages:
    """What is saved if the operations of each range keep only what the range reads, and others what they read of it."""
    places, saved = {op.name: i for i, op in enumerate(graph.ops)}, list(storages.saved)
    readers = [*(op.reads for op in graph.ops), (*graph.outputs, *graph.batch)]
    for part in again:
        for i, reads in enumerate(readers):
            crossing = [n for n in reads if (places.get(n, -1) in part) != (i in part) and n in storages.values]
            saved[i] = (*(() if i in part else saved[i]), *(storages.values[n] for n in crossing))
    return replace(storages, saved=tuple(saved))
