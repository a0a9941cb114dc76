"""Segments: a contiguous piece of the graph as a pair of functions with the weights as arguments.

::

    forward(params, buffers, inputs, draw)   -> outputs, tape
    backward(tape, grad_outputs, params)     -> grad_inputs, grad_params

A weight version is an argument, not a trick. The three backward modes differ in what the tape holds:

=============  ====================================================  ===========================================
mode           the tape holds                                        backward differentiates
=============  ====================================================  ===========================================
``stash``      activations and the forward's weights                 at the forward's weights
``recompute``  the stage's inputs (the forward is run again)         everything at the weights given to backward
``mixed``      activations, with weights replaced by references      activations of the forward, given weights
=============  ====================================================  ===========================================

A segment with ``halves`` runs its backward in two: :meth:`Segment.backward` leaves out the gradients of the parameters
that :mod:`roundelay.frontend.split_backward` can compute later, and :func:`roundelay.frontend.split_backward.settle`
computes those.

The mode ``recompute`` belongs to a whole stage (:mod:`roundelay.frontend.stage_function`); a segment knows ``stash``
and ``mixed``. One that runs itself again is a :class:`roundelay.frontend.remat_segment.RematSegment`.

What enters a segment lies as a network would deliver it: contiguous, and where torch's own memory would begin. Strides
and alignment decide which kernel runs, and so the last bits: they must not depend on what has carried a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from roundelay.frontend.deferred_wgrad import PendingWgrad
from roundelay.frontend.keyed_rng import RngKey
from roundelay.frontend.precision import Cast, Casts
from roundelay.frontend.split_backward import SplitSegment
from roundelay.ir.stage import SegmentSpec

Tensors = dict[str, torch.Tensor]
Call = Callable[..., Sequence[Any]]
Reference = tuple[int | Cast, torch.Size, tuple[int, ...], int]
"""The number of a weight, or a cast of one; then size, strides and offset of what was saved of it."""


@dataclass(slots=True)
class Weights:
    """The weights that ``mixed`` backward reads: filled in when backward starts."""

    live: Sequence[torch.Tensor] | None = None


class Leaves(NamedTuple):
    """Weights as the beginning of a graph, in the memory that the weights have.

    Args:
        every: the segment's parameters, in its order.
        trained: those that want a gradient, by name.
        addresses: of each one's storage, its place in ``every``.
    """

    every: tuple[torch.Tensor, ...]
    trained: Tensors
    addresses: dict[int, int]


@dataclass(slots=True)
class Tape:
    """What one forward of a segment leaves for its backward.

    Args:
        roots: outputs still joined to their graph, by name; only those that a gradient can enter.
        inputs: leaves of the inputs that want a gradient, by name.
        parameters: leaves of the trained parameters, by name.
        weights: where ``mixed`` finds the backward's weights; None for ``stash``.
        storages: bytes of each storage that is held for backward, by its address; parameters are not counted.
        owed: what the weights' half of backward will compute; nothing where backward is whole.
    """

    roots: Tensors
    inputs: Tensors
    parameters: Tensors
    weights: Weights | None
    storages: dict[int, int]
    owed: list[PendingWgrad]


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment.

    Args:
        spec: what it reads and makes.
        call: parameters, buffers, inputs (in the order of ``spec``), then the draw key -> outputs.
        trainable: names of parameters that want a gradient.
        differentiable: names of inputs that want a gradient.
        mutated: names of buffers that a forward changes.
        halves: the same call, for a backward in two halves; None for a whole one.
        casts: whether weights are cast to a lower precision on the way.
    """

    spec: SegmentSpec
    call: Call
    trainable: frozenset[str]
    differentiable: frozenset[str]
    mutated: frozenset[str]
    halves: SplitSegment | None = None
    casts: bool = False

    def forward(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Tensors,
        inputs: Mapping[str, Any],
        draw: RngKey,
        *,
        mixed: bool = False,
        measure: bool = False,
        kept: Leaves | None = None,
    ) -> tuple[dict[str, Any], Tape]:
        """Run forward, keeping what backward needs.

        Args:
            params: weights by name, each in a storage of its own; read, never written.
            buffers: by name; an entry that the forward changes is replaced by a new tensor.
            inputs: values by name.
            draw: key of the random numbers.
            mixed: keep references instead of weights.
            measure: fill in ``Tape.storages``.
            kept: what :meth:`leaves` has made of these very weights; ``mixed`` makes its own.
        """
        leaves = self.leaves(params) if kept is None or mixed else kept
        entered: Tensors = {}
        values = []
        for name in self.spec.inputs:
            value = _delivered(inputs[name])
            if name in self.differentiable:
                value = entered[name] = value.detach().requires_grad_()
            values.append(value)
        weights = Weights() if mixed else None
        storages: dict[int, int] = {}
        owed: list[PendingWgrad] = []
        last = (draw,) if self.halves is None else (draw, owed)
        hooks = _Hooks(leaves, weights, storages if measure else None, self.casts) if mixed or measure else None
        with nullcontext() if hooks is None else hooks.active():
            made = self._run(leaves, buffers, values, last)
        roots, outputs = {}, {}
        for name, value in made:
            if isinstance(value, torch.Tensor):
                if value.requires_grad:
                    roots[name] = value
                value = value.detach()
            outputs[name] = value
        if mixed:  # backward reads others: the forward's weights, if predicted, need not wait for it
            for leaf in leaves.trained.values():
                leaf.data = leaf.new_empty(()).expand(leaf.shape)
        if hooks is not None and measure:
            for held in (*roots.values(), *entered.values(), *(x for one in owed for x in one.read)):
                hooks.count(held)
        return outputs, Tape(roots, entered, leaves.trained, weights, storages, owed)

    def leaves(self, params: Mapping[str, torch.Tensor]) -> Leaves:
        """The weights as a forward reads them, for as many forwards as read these in the same memory."""
        # .data and not .detach(): a tape outlives updates of the parameter, so its leaves count versions of their own
        every = {n: params[n].data for n in self.spec.parameters}
        trained = {n: leaf.requires_grad_() for n, leaf in every.items() if n in self.trainable}
        addresses = {leaf.untyped_storage().data_ptr(): i for i, leaf in enumerate(every.values())}
        return Leaves(tuple(every.values()), trained, addresses)

    def backward(
        self, tape: Tape, grad_outputs: Mapping[str, torch.Tensor | None], params: Mapping[str, torch.Tensor]
    ) -> tuple[Tensors, Tensors]:
        """Gradients of inputs and parameters, by name; a name is missing where no gradient arrives.

        In two halves this is the first: the tape's ``owed`` then know the gradients that the second one needs.

        Args:
            tape: of the forward.
            grad_outputs: gradients of the outputs by name; None or missing means none.
            params: the weights that ``mixed`` reads; the others ignore them.
        """
        if tape.weights is not None:
            tape.weights.live = [params[n] for n in self.spec.parameters]
        roots, entering = [], []
        for name, root in tape.roots.items():
            grad = grad_outputs.get(name)
            if grad is not None:
                roots.append(root)
                entering.append(_delivered(grad))
        parameters, leaves = tape.parameters, (*tape.inputs.values(), *tape.parameters.values())
        if self.halves is not None:
            parameters = {n: leaf for n, leaf in parameters.items() if n not in self.halves.late}
            places: Sequence[Any] = [one.place for one in tape.owed]
            leaves = (*tape.inputs.values(), *parameters.values(), *places)
        if not roots or not leaves:
            return {}, {}
        # what torch.autograd.grad calls, without checks that cost as much as the backward of a small layer
        grads: Sequence[torch.Tensor | None] = torch.autograd.Variable._execution_engine.run_backward(
            tuple(roots),
            tuple(entering),
            False,  # keep the graph
            False,  # make a graph of the backward
            leaves,
            True,  # a leaf may have no gradient
            accumulate_grad=False,
        )
        first, second = len(tape.inputs), len(tape.inputs) + len(parameters)
        for one, grad in zip(tape.owed, grads[second:], strict=True):
            one.place, one.gradient = None, grad
        return _present(tape.inputs, grads[:first]), _present(parameters, grads[first:second])

    def _run(
        self, leaves: Leaves, buffers: Tensors, values: Sequence[Any], last: tuple[Any, ...]
    ) -> list[tuple[str, Any]]:
        """Call the piece on copies of the buffers it changes, so that tapes of earlier micro-batches keep theirs."""
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self._run(leaves, buffers, values, last)
        call = self.call if self.halves is None else self.halves.call
        own = [buffers[n].clone() if n in self.mutated else buffers[n] for n in self.spec.buffers]
        made = call(*leaves.every, *own, *values, *last)
        if own:
            buffers.update((n, new) for n, new in zip(self.spec.buffers, own, strict=True) if n in self.mutated)
        return [(n, _boundary(value, leaves.addresses)) for n, value in zip(self.spec.outputs, made, strict=True)]


def _present(names: Iterable[str], grads: Sequence[torch.Tensor | None]) -> Tensors:
    return {name: grad.contiguous() for name, grad in zip(names, grads, strict=True) if grad is not None}


def _boundary(value: Any, owned: Mapping[int, int]) -> Any:
    """An output as it leaves the segment: contiguous, and never a window into a weight that will change."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.contiguous()
    return value.clone() if value.untyped_storage().data_ptr() in owned else value


_BEGINS_AT = {"cpu": 64, "meta": 1}
"""Bytes by whose multiples the memory begins that torch allocates, by kind of device; 512 on all others."""


def _delivered(value: Any) -> Any:
    """A value as it would come over a network; itself if it lies so already, as nearly all do."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_contiguous() and not value.data_ptr() % _BEGINS_AT.get(value.device.type, 512):
        return value
    return value.clone(memory_format=torch.contiguous_format)


class _Hooks:
    """Saved-tensor hooks of one forward: count what is held, and keep references instead of weights."""

    def __init__(
        self,
        leaves: Leaves,
        weights: Weights | None,
        storages: dict[int, int] | None,
        casts: bool,
    ) -> None:
        self._owned, self._weights, self._storages = leaves.addresses, weights, storages
        self._strides = [leaf.stride() for leaf in leaves.every]
        self._casts = Casts(leaves.addresses) if weights is not None and casts else None

    @contextmanager
    def active(self) -> Iterator[None]:
        """The context in which the hooks act."""
        saved = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with saved, self._casts or nullcontext():
            yield

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage behind ``tensor`` once, unless a parameter owns it."""
        address = tensor.untyped_storage().data_ptr()
        if self._storages is not None and address not in self._owned:
            self._storages[address] = tensor.untyped_storage().nbytes()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Reference:
        address = tensor.untyped_storage().data_ptr()
        index: int | Cast | None = self._owned.get(address) if self._weights is not None else None
        if index is None and self._casts is not None:
            index = self._casts.found.get(address)
        if index is None:
            self.count(tensor)
            return tensor.detach()  # an output that its own graph held would live in a cycle until a backward
        return index, tensor.size(), tensor.stride(), int(tensor.storage_offset())

    def _unpack(self, saved: torch.Tensor | Reference) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        source, size, stride, offset = saved
        assert self._weights is not None and self._weights.live is not None
        index = source.source.weight if isinstance(source, Cast) else source
        live = self._weights.live[index].data
        if live.stride() != self._strides[index]:  # what was saved is a view of the forward's layout
            live = live.new_empty_strided(live.shape, self._strides[index]).copy_(live)
        live = source.again(live) if isinstance(source, Cast) else live
        return live.as_strided(size, stride, offset)
