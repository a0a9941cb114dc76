"""Cut a graph into stages and find what must travel between them.

Rules, each with its reason:

- A value goes to the segments that read it and to no other, one after the other in graph order: the maker hands it to
  the first reader, the first reader to the second. Its gradient comes back along the same chain, so that every
  contribution is added by autograd, in the order of the uncut model: the sum has the same bits wherever the cuts are.
- Inputs and batch tensors are made by stage 0, which reads the data.
- A parameter belongs to the first segment that uses it; later ones get it as the value ``weight.NAME`` with each
  micro-batch and send its gradient back.
- Operations that a backward runs again are a segment of their own. By the first rule that changes no bit.
- Neighbours are always joined by an edge, if only an empty one: by it a stage learns that a micro-batch exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roundelay.errors import PlanError
from roundelay.ir.graph import Graph
from roundelay.ir.stage import Edge, Partition, SegmentSpec, StageSpec
from roundelay.lower.dataflow import Hop, hops, journeys
from roundelay.lower.recompute_selection import Part, idle, parts_of


@dataclass(frozen=True, slots=True)
class _Span:
    """A segment's place: its stage and its operations ``start`` to ``stop - 1``; the loss is an empty span."""

    stage: int
    start: int
    stop: int
    again: bool = False


def partition(graph: Graph, stages: Sequence[Sequence[str]], recompute: Sequence[str] = ()) -> Partition:
    """Cut ``graph`` into stages.

    Args:
        graph: the logical graph.
        stages: for each stage the names of the operations that end its segments, in order. The very last name
            must be the graph's last operation.
        recompute: names of modules that backwards run again, as :mod:`roundelay.lower.recompute_selection` says.

    Raises:
        PlanError: a name is unknown, out of order, or not a legal cut; or of no module that can be run again.
    """
    if not stages:
        raise _bad_cut(graph, 0, "", "missing")
    spans = _parted(graph, _spans(graph, stages), recompute)
    loss = _Span(len(stages) - 1, len(graph.ops), len(graph.ops))
    owners = _owners(graph, spans)
    chains = _chains(graph, [*spans, loss])
    edges = _edges(graph, spans, len(stages))
    return Partition(
        tuple(
            StageSpec(
                stage=k,
                segments=tuple(_segment(graph, span, owners, chains) for span in spans if span.stage == k),
                loss_reads=(*graph.outputs, *graph.batch) if k == loss.stage else (),
                sends=tuple(edge for edge in edges if edge.source == k),
                receives=tuple(edge for edge in edges if edge.target == k),
                recomputed=tuple(i for i, span in enumerate(s for s in spans if s.stage == k) if span.again),
            )
            for k in range(len(stages))
        )
    )


def _spans(graph: Graph, stages: Sequence[Sequence[str]]) -> list[_Span]:
    positions = {op.name: i for i, op in enumerate(graph.ops)}
    legal = {*graph.cuts, len(graph.ops) - 1}
    start, spans = 0, []
    for k, names in enumerate(stages):
        if not names:
            raise _bad_cut(graph, k, "", "missing")
        for name in names:
            stop = positions.get(name, -1) + 1
            if stop <= start or stop - 1 not in legal:
                why = "unknown" if stop == 0 else "out of order" if stop <= start else "not a legal cut"
                raise _bad_cut(graph, k, name, why)
            spans.append(_Span(k, start, stop))
            start = stop
    if start != len(graph.ops):
        raise _bad_cut(graph, len(stages) - 1, stages[-1][-1], "not the last operation")
    return spans


def _parted(graph: Graph, spans: list[_Span], recompute: Sequence[str]) -> list[_Span]:
    """The spans, with every part that is to be run again in a span of its own."""
    parts = parts_of(graph, recompute)
    if not parts:
        return spans
    made = [piece for span in spans for piece in _pieces(graph, span, parts)]
    for part in parts:
        some = [other for other in parts if other.name == part.name]
        if not any(span.again and one.start <= span.start < one.stop for span in made for one in some):
            grad = any(graph.values[op.name].requires_grad for one in some for op in graph.ops[one.start : one.stop])
            raise idle(part.name, "which cannot be cut out of the graph" if grad else "which no gradient flows through")
    return made


def _pieces(graph: Graph, span: _Span, parts: Sequence[Part]) -> Iterator[_Span]:
    """A span, cut where parts begin and end: at the next legal cuts inside of them."""
    places = [span.start, *(cut + 1 for cut in graph.cuts if span.start <= cut < span.stop - 1), span.stop]
    start = span.start
    for part in parts:
        inside = [place for place in places if part.start <= place <= part.stop]
        first, last = (inside[0], inside[-1]) if inside else (start, start)
        if any(graph.values[op.name].requires_grad for op in graph.ops[first:last]):
            if start < first:
                yield _Span(span.stage, start, first)
            yield _Span(span.stage, first, last, again=True)
            start = last
    if start < span.stop:
        yield _Span(span.stage, start, span.stop)


def severable(graph: Graph, part: Part) -> bool:
    """Whether any of a part's operations can be run again, wherever stages are cut."""
    return any(span.again for span in _pieces(graph, _Span(0, 0, len(graph.ops)), (part,)))


def _bad_cut(graph: Graph, stage: int, name: str, why: str) -> PlanError:
    last = graph.ops[-1].name
    return PlanError(
        f"segments of stage {stage}",
        got=f"an end at {name!r}, which is {why}" if name else "no segment",
        expected=f"names of operations in graph order at legal cuts, the last stage ending at {last!r}",
        remedy="Write a new plan with `roundelay plan`; roundelay.capture(job).graph lists operations and legal cuts.",
    )


def _owners(graph: Graph, spans: Sequence[_Span]) -> dict[str, _Span]:
    """The first segment that uses each parameter."""
    owners: dict[str, _Span] = {}
    for span in spans:
        for op in graph.ops[span.start : span.stop]:
            for name in op.parameters:
                owners.setdefault(name, span)
    return owners


def _chains(graph: Graph, spans: Sequence[_Span]) -> dict[str, list[_Span]]:
    """For every value that is read outside of the segment that makes it: its maker, then its readers in order.

    Stage 0 makes inputs and batch tensors before its first segment, at the empty span (0, 0, 0); the loss, the last of
    ``spans``, reads behind the last operation.
    """
    at = {-1: _Span(0, 0, 0), len(graph.ops): spans[-1]}
    at |= {place: span for span in spans for place in range(span.start, span.stop)}
    chains = {way.name: list(dict.fromkeys(at[place] for place in way.places)) for way in journeys(graph)}
    return {name: chain for name, chain in chains.items() if len(chain) > 1}


def _edges(graph: Graph, spans: Sequence[_Span], num_stages: int) -> tuple[Edge, ...]:
    at = {place: span.stage for span in spans for place in range(span.start, span.stop)}
    at[len(graph.ops)] = num_stages - 1
    travels: dict[tuple[int, int], list[Hop]] = {(k, k + 1): [] for k in range(num_stages - 1)}
    for hop in hops(graph):
        if at[hop.source] != at[hop.target]:
            travels.setdefault((at[hop.source], at[hop.target]), []).append(hop)
    return tuple(
        Edge(source, target, tuple(hop.name for hop in parts), tuple(hop.name for hop in parts if hop.gradient))
        for (source, target), parts in sorted(travels.items())
    )


def _segment(graph: Graph, span: _Span, owners: dict[str, _Span], chains: dict[str, list[_Span]]) -> SegmentSpec:
    ops = graph.ops[span.start : span.stop]
    names = dict.fromkeys(name for op in ops for name in op.parameters if owners[name] == span)
    return SegmentSpec(
        start=span.start,
        stop=span.stop,
        parameters=tuple(names),
        buffers=tuple(dict.fromkeys(name for op in ops for name in op.buffers)),
        inputs=tuple(name for name, chain in chains.items() if span in chain[1:]),
        outputs=tuple(name for name, chain in chains.items() if span in chain[:-1]),
    )
