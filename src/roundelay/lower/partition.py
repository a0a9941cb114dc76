"""Cut a graph into stages and determine what is sent between them.

Rules, each with its reason:

- A value goes only to the segments that read it, one after the other in graph order: its producer passes it to the
  first reader, the first reader to the second. Its gradient comes back along the same chain, so that autograd adds
  every contribution in the order of the uncut model: the sum has the same bits wherever the cuts are.
- Inputs and batch tensors are produced by stage 0, which reads the data.
- A parameter belongs to the first segment that uses it; later ones receive it as the value ``weight.NAME`` with each
  micro-batch and send its gradient back.
- Operations that a backward recomputes are a segment of their own. By the first rule that changes no bit.
- Neighbouring stages are always joined by an edge, even an empty one: its messages announce the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from roundelay.errors import PlanError
from roundelay.ir.graph import Graph
from roundelay.ir.stage import Edge, Partition, SegmentSpec, StageSpec
from roundelay.lower.dataflow import Hop, ReaderChain, hops, reader_chains
from roundelay.lower.recompute_selection import RecomputeRange, nothing_to_recompute, recompute_ranges


class _Span(NamedTuple):
    """A segment's stage and its operations ``start`` to ``stop - 1``; the loss is an empty span."""

    stage: int
    start: int
    stop: int
    recomputed: bool = False


def partition(graph: Graph, stages: Sequence[Sequence[str]], recompute: Sequence[str] = ()) -> Partition:
    """Cut ``graph`` into stages.

    Args:
        graph: the logical graph.
        stages: for each stage the names of the operations that end its segments, in order. The very last name
            must be the graph's last operation.
        recompute: names of modules that backwards recompute; see :mod:`roundelay.lower.recompute_selection`.

    Raises:
        PlanError: a name is unknown, out of order, or not a legal cut; or a module cannot be recomputed.
    """
    if not stages:
        raise _bad_cut(graph, 0, "", "missing")
    spans = _cut_at_recomputed(graph, _spans(graph, stages), recompute)
    loss = _Span(len(stages) - 1, len(graph.ops), len(graph.ops))
    owners = _owners(graph, spans)
    readers = reader_chains(graph)
    chains = _chains(readers, [*spans, loss], len(graph.ops))
    edges = _edges(graph, readers, spans, len(stages))
    return Partition(
        tuple(
            StageSpec(
                stage=k,
                segments=tuple(_segment(graph, span, owners, chains) for span in spans if span.stage == k),
                loss_reads=(*graph.outputs, *graph.batch) if k == loss.stage else (),
                sends=tuple(edge for edge in edges if edge.source == k),
                receives=tuple(edge for edge in edges if edge.target == k),
                recomputed=tuple(i for i, span in enumerate(s for s in spans if s.stage == k) if span.recomputed),
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


def _cut_at_recomputed(graph: Graph, spans: list[_Span], recompute: Sequence[str]) -> list[_Span]:
    """Return the spans, with every recomputed part in a span of its own."""
    parts = recompute_ranges(graph, recompute)
    if not parts:
        return spans
    cut = [piece for span in spans for piece in _pieces(graph, span, parts)]
    for part in parts:
        same = [other for other in parts if other.name == part.name]
        if not any(span.recomputed and one.start <= span.start < one.stop for span in cut for one in same):
            grad = any(graph.values[op.name].requires_grad for one in same for op in graph.ops[one.start : one.stop])
            raise nothing_to_recompute(
                part.name, "which cannot be cut out of the graph" if grad else "which no gradient flows through"
            )
    return cut


def _pieces(graph: Graph, span: _Span, parts: Sequence[RecomputeRange]) -> Iterator[_Span]:
    """Cut a span where parts begin and end: at the nearest legal cuts inside of them."""
    places = [span.start, *(cut + 1 for cut in graph.cuts if span.start <= cut < span.stop - 1), span.stop]
    start = span.start
    for part in parts:
        inside = [place for place in places if part.start <= place <= part.stop]
        first, last = (inside[0], inside[-1]) if inside else (start, start)
        if any(graph.values[op.name].requires_grad for op in graph.ops[first:last]):
            if start < first:
                yield _Span(span.stage, start, first)
            yield _Span(span.stage, first, last, recomputed=True)
            start = last
    if start < span.stop:
        yield _Span(span.stage, start, span.stop)


def can_recompute(graph: Graph, part: RecomputeRange) -> bool:
    """Whether any of a part's operations can be recomputed, wherever stages are cut."""
    return any(span.recomputed for span in _pieces(graph, _Span(0, 0, len(graph.ops)), (part,)))


def _bad_cut(graph: Graph, stage: int, name: str, why: str) -> PlanError:
    last = graph.ops[-1].name
    return PlanError(
        f"segments of stage {stage}",
        got=f"an end at {name!r}, which is {why}" if name else "no segment",
        expected=f"names of operations in graph order at legal cuts, the last stage ending at {last!r}",
        remedy="Write a new plan with `roundelay plan`; roundelay.capture(job).graph lists operations and legal cuts.",
    )


def _owners(graph: Graph, spans: Sequence[_Span]) -> dict[str, _Span]:
    """Return the first segment that uses each parameter."""
    owners: dict[str, _Span] = {}
    for span in spans:
        for op in graph.ops[span.start : span.stop]:
            for name in op.parameters:
                owners.setdefault(name, span)
    return owners


def _chains(readers: Sequence[ReaderChain], spans: Sequence[_Span], end: int) -> dict[str, list[_Span]]:
    """Return, for every value that is read outside of its segment, the segment that produces it, then its readers.

    Stage 0 produces inputs and batch tensors before its first segment, at the empty span (0, 0, 0). The loss, the last
    of ``spans``, reads after the last operation.
    """
    at = {-1: _Span(0, 0, 0), end: spans[-1]}
    at |= {i: span for span in spans for i in range(span.start, span.stop)}
    chains = {chain.name: list(dict.fromkeys(at[i] for i in chain.positions)) for chain in readers}
    return {name: chain for name, chain in chains.items() if len(chain) > 1}


def _edges(graph: Graph, readers: Sequence[ReaderChain], spans: Sequence[_Span], num_stages: int) -> tuple[Edge, ...]:
    stage_of = {i: span.stage for span in spans for i in range(span.start, span.stop)}
    stage_of[len(graph.ops)] = num_stages - 1
    sent: dict[tuple[int, int], list[Hop]] = {(k, k + 1): [] for k in range(num_stages - 1)}
    for hop in hops(graph, readers):
        if stage_of[hop.source] != stage_of[hop.target]:
            sent.setdefault((stage_of[hop.source], stage_of[hop.target]), []).append(hop)
    return tuple(
        Edge(source, target, tuple(hop.name for hop in over), tuple(hop.name for hop in over if hop.gradient))
        for (source, target), over in sorted(sent.items())
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
