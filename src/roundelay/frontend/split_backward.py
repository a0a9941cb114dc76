"""A piece whose backward can run in two halves: the inputs' gradients first, the weights' when there is time.

Backward has no arithmetic in common between the two halves of a product: ``dx = dy W`` is what the stage before waits
for, ``dW = dy^T x`` is what the update waits for (Qi et al., "Zero Bubble Pipeline Parallelism", 2023). So every
operation that multiplies by a parameter is run on the parameter *detached*, and leaves a note of what it owes
(:class:`roundelay.frontend.deferred_wgrad.PendingWgrad`): what it read, and the place in autograd's graph where its
output's gradient will pass. The first half is one run of autograd that computes no such weight's gradient and picks up
the gradients at those places; the second half, :func:`settle`, calls the kernels that autograd would have called, on
the same operands, so that the bits are those of the whole backward. Nothing is computed twice, and no graph is kept
between the halves.

Split are matrix products, convolutions and embeddings (:data:`roundelay.frontend.deferred_wgrad.FORMULAS`). Every other
operation's weight gradient (a normalisation's, a recurrent layer's, whose kernel makes both at once) is computed in the
first half, and so is that of a parameter which such an operation reads too, or which more than two operations read:
autograd adds three terms in an order that is its own.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from roundelay.frontend.deferred_wgrad import FORMULAS, ONLY_UNCAST, PendingWgrad

Tensors = dict[str, torch.Tensor]

MOST_READERS = 2
"""A sum of two terms has the same bits in either order; of three it has not."""


@dataclass(frozen=True, slots=True)
class SplitSegment:
    """A piece that can owe weight gradients.

    Args:
        call: as the piece's own, with a list behind the draw key, to which every split operation adds what it owes.
        late: names of the parameters whose gradients come in the second half.
    """

    call: Callable[..., Sequence[Any]]
    late: frozenset[str]


def split(
    piece: torch.fx.GraphModule, parameters: Sequence[str], trainable: frozenset[str], *, lowered: bool = False
) -> SplitSegment:
    """The piece with every operation split that can be.

    Args:
        piece: a graph of parameters, buffers, inputs and the draw key.
        parameters: names of its first placeholders.
        trainable: which of them want a gradient.
        lowered: it will be called under autocast.
    """
    graph = copy.deepcopy(piece.graph)
    places = [node for node in graph.nodes if node.op == "placeholder"]
    alone = _made_alone(graph, dict(zip(places, parameters, strict=False)), trainable)
    late, chosen = _chosen(graph, alone, ONLY_UNCAST if lowered else frozenset())
    with graph.inserting_after(places[-1]):
        owed = graph.placeholder("owed")
    for node in chosen:
        node.args, node.target = (owed, *node.args), FORMULAS[node.target].run
    return SplitSegment(torch.fx.GraphModule(piece, graph).forward, late)


def settle(owed: Sequence[PendingWgrad], parameters: Mapping[str, torch.Tensor]) -> Tensors:
    """The second half: gradients of parameters by name; a name is missing where none has arrived.

    Args:
        owed: by one forward, with the gradients that its first half has left.
        parameters: leaves by name.
    """
    sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for one in reversed(owed):
        if one.gradient is None:
            continue
        for weight, made_of in zip(one.weights, one.due(one.gradient), strict=True):
            before, grad = sums.get(id(weight)), made_of.to(weight.dtype)
            sums[id(weight)] = weight, grad if before is None else before[1] + grad
    made = {name: sums.pop(id(leaf))[1] for name, leaf in parameters.items() if id(leaf) in sums}
    for name, grad in _through(list(sums.values()), parameters).items():
        made[name] = made[name] + grad if name in made else grad
    return {name: grad.contiguous() for name, grad in made.items()}


def _through(sums: Sequence[tuple[torch.Tensor, torch.Tensor]], parameters: Mapping[str, torch.Tensor]) -> Tensors:
    """Gradients of parameters from those of what has been made of them."""
    if not sums:
        return {}
    weights, grads = zip(*sums, strict=True)
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(
        weights, list(parameters.values()), grads, allow_unused=True
    )
    return {name: grad for name, grad in zip(parameters, found, strict=True) if grad is not None}


_Readers = dict[torch.fx.Node, frozenset[str]]


def _made_alone(graph: torch.fx.Graph, names: Mapping[torch.fx.Node, str], trainable: frozenset[str]) -> _Readers:
    """Parameters and what is made of parameters alone (a transposed weight), with the trainable ones behind each."""
    alone: _Readers = {node: frozenset({name} & trainable) for node, name in names.items()}
    for node in graph.nodes:
        sources = node.all_input_nodes
        if node.op == "call_function" and sources and all(source in alone for source in sources):
            alone[node] = _behind(node, alone)
    return alone


def _behind(node: torch.fx.Node, alone: _Readers) -> frozenset[str]:
    return frozenset[str]().union(*(alone.get(source, ()) for source in node.all_input_nodes))


def _chosen(graph: torch.fx.Graph, alone: _Readers, whole: Set[Any]) -> tuple[frozenset[str], list[torch.fx.Node]]:
    """The parameters all of whose readers can be split, and those readers; what holds for one may undo another.

    Operators in ``whole`` are not split.
    """
    readers = {node: read for node in graph.nodes if node not in alone and (read := _behind(node, alone))}
    count = Counter(name for read in readers.values() for name in read)
    early = {name for name, times in count.items() if times > MOST_READERS}
    chosen = [node for node in readers if node.target not in whole and _fits(node, alone)]
    while True:
        early |= {name for node, read in readers.items() if node not in chosen for name in read}
        kept = [node for node in chosen if not readers[node] & early]
        if len(kept) == len(chosen):
            return frozenset[str]().union(*(readers[node] for node in kept)), kept
        chosen = kept


def _fits(node: torch.fx.Node, alone: _Readers) -> bool:
    """Whether an operation is one of those that can be split, between a tensor and what is made of parameters."""
    formula = FORMULAS.get(node.target)
    if formula is None or node.kwargs or len(node.args) <= max(formula.weight, formula.read):
        return False
    x, weight = node.args[formula.read], node.args[formula.weight]
    if not isinstance(x, torch.fx.Node) or not isinstance(weight, torch.fx.Node) or not alone.get(weight):
        return False
    others = [source for source in node.all_input_nodes if source not in alone]
    return others == [x] and formula.fits(_ndim(x), _ndim(weight), node.args)


def _ndim(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.ndim if isinstance(value, torch.Tensor) else -1
