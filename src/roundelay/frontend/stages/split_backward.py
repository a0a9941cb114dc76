"""Split a segment's backward in two halves: input gradients first, weight gradients later.

The two gradients of a product share no arithmetic: the previous stage waits for ``dx = dy W``, the update waits for
``dW = dy^T x`` (Qi et al., "Zero Bubble Pipeline Parallelism", 2023). So every operation that multiplies by a parameter
runs on the *detached* parameter and records a :class:`roundelay.frontend.stages.deferred_wgrad.PendingWgrad`: the
tensors that it read, and the edge of the autograd graph through which its output's gradient will pass. The first half
is one run of autograd that skips those weight gradients and captures the gradients at those edges. The second half,
:func:`settle`, calls the kernels that autograd would have called, on the same operands, so the bits equal those of the
unsplit backward. Nothing is computed twice, and no graph is kept between the halves.

Matrix products, convolutions and embeddings are split (:data:`roundelay.frontend.stages.deferred_wgrad.FORMULAS`). All
other weight gradients (of normalisations, and of recurrent layers, whose kernel computes both gradients at once) are
computed in the first half. So are those of parameters that such an operation also reads, or that more than two
operations read: the order in which autograd adds three terms is not known here.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from roundelay.frontend.stages.deferred_wgrad import FORMULAS, ONLY_UNCAST, PendingWgrad

Tensors = dict[str, torch.Tensor]

MOST_READERS = 2
"""A sum of two terms has the same bits in either order; a sum of three does not."""


@dataclass(frozen=True, slots=True)
class SplitSegment:
    """A segment's function whose weight gradients are deferred.

    Args:
        call: as the segment's own, with a list after the RNG key to which every split operation appends a
            :class:`PendingWgrad`.
        late: names of the parameters whose gradients the second half computes.
    """

    call: Callable[..., Sequence[Any]]
    late: frozenset[str]


def split(
    piece: torch.fx.GraphModule, parameters: Sequence[str], trainable: frozenset[str], *, lowered: bool = False
) -> SplitSegment:
    """Split every operation of a segment's graph that can be split.

    Args:
        piece: a graph of parameters, buffers, inputs and the RNG key.
        parameters: names of its first placeholders.
        trainable: which of them require a gradient.
        lowered: whether it will be called under autocast.
    """
    graph = copy.deepcopy(piece.graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    derived = _derived(graph, dict(zip(placeholders, parameters, strict=False)), trainable)
    late, chosen = _chosen(graph, derived, ONLY_UNCAST if lowered else frozenset())
    with graph.inserting_after(placeholders[-1]):
        pending = graph.placeholder("pending")
    for node in chosen:
        node.args, node.target = (pending, *node.args), FORMULAS[node.target].run
    return SplitSegment(torch.fx.GraphModule(piece, graph).forward, late)


def settle(pending: Sequence[PendingWgrad], parameters: Mapping[str, torch.Tensor]) -> Tensors:
    """Run the second half of a backward: the gradients of parameters, by name; a name without a gradient is missing.

    Args:
        pending: of one forward, with the gradients that the first half has stored in them.
        parameters: leaves by name.
    """
    sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for one in reversed(pending):
        if one.grad_output is None:
            continue
        for weight, computed in zip(one.weights, one.compute(one.grad_output), strict=True):
            earlier, grad = sums.get(id(weight)), computed.to(weight.dtype)
            sums[id(weight)] = weight, grad if earlier is None else earlier[1] + grad
    gradients = {name: sums.pop(id(leaf))[1] for name, leaf in parameters.items() if id(leaf) in sums}
    for name, grad in _chain(list(sums.values()), parameters).items():
        gradients[name] = gradients[name] + grad if name in gradients else grad
    return {name: grad.contiguous() for name, grad in gradients.items()}


def _chain(sums: Sequence[tuple[torch.Tensor, torch.Tensor]], parameters: Mapping[str, torch.Tensor]) -> Tensors:
    """Propagate gradients of values derived from parameters (a transposed weight) to the parameters."""
    if not sums:
        return {}
    weights, grads = zip(*sums, strict=True)
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(
        weights, list(parameters.values()), grads, allow_unused=True
    )
    return {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}


_Trained = dict[torch.fx.Node, frozenset[str]]


def _derived(graph: torch.fx.Graph, names: Mapping[torch.fx.Node, str], trainable: frozenset[str]) -> _Trained:
    """Map parameters, and values derived from parameters only (a transposed weight), to the trainable ones they use."""
    derived: _Trained = {node: frozenset({name} & trainable) for node, name in names.items()}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and sources and all(source in derived for source in sources):
            derived[node] = _parameters_read(node, derived)
    return derived


def _parameters_read(node: torch.fx.Node, derived: _Trained) -> frozenset[str]:
    return frozenset[str]().union(*(derived.get(source, ()) for source in node.all_input_nodes))


def _chosen(graph: torch.fx.Graph, derived: _Trained, whole: Set[Any]) -> tuple[frozenset[str], list[torch.fx.Node]]:
    """Return the parameters whose readers can all be split, and those readers; operators in ``whole`` are not split.

    Iterates to a fixed point: a reader that cannot be split excludes its parameters, which may exclude other readers.
    """
    readers = {node: read for node in graph.nodes if node not in derived and (read := _parameters_read(node, derived))}
    count = Counter(name for read in readers.values() for name in read)
    early = {name for name, times in count.items() if times > MOST_READERS}
    chosen = [node for node in readers if node.target not in whole and _can_split(node, derived)]
    while True:
        early |= {name for node, read in readers.items() if node not in chosen for name in read}
        kept = [node for node in chosen if not readers[node] & early]
        if len(kept) == len(chosen):
            return frozenset[str]().union(*(readers[node] for node in kept)), kept
        chosen = kept


def _can_split(node: torch.fx.Node, derived: _Trained) -> bool:
    """Whether an operation can be split: a known operator on one tensor and one value derived from parameters only."""
    formula = FORMULAS.get(node.target)
    if formula is None or node.kwargs or len(node.args) <= max(formula.weight, formula.read):
        return False
    x, weight = node.args[formula.read], node.args[formula.weight]
    if not isinstance(x, torch.fx.Node) or not isinstance(weight, torch.fx.Node) or not derived.get(weight):
        return False
    others = [source for source in node.all_input_nodes if source not in derived]
    return others == [x] and formula.fits(_ndim(x), _ndim(weight), node.args)


def _ndim(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.ndim if isinstance(value, torch.Tensor) else -1
