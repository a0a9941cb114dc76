"""Segments: a contiguous part of the graph as a forward and a backward function that take the weights as arguments.

::

    forward(params, buffers, inputs, rng_key)  -> outputs, tape
    backward(tape, grad_outputs, params)       -> grad_inputs, grad_params

The caller chooses the weight version by passing it. The three backward modes differ in what the tape holds:

=============  ====================================================  ===========================================
mode           the tape holds                                        backward differentiates
=============  ====================================================  ===========================================
``stash``      activations and the forward's weights                 at the forward's weights
``recompute``  the stage's inputs (the forward is run again)         everything at the weights passed to backward
``mixed``      activations, with weights replaced by references      the forward's activations, at the weights passed
=============  ====================================================  ===========================================

A segment with ``halves`` splits its backward in two: :meth:`Segment.backward` leaves out the weight gradients that
:mod:`roundelay.frontend.stages.split_backward` can compute later;
:func:`roundelay.frontend.stages.split_backward.settle` computes them.

The mode ``recompute`` belongs to a whole stage (:mod:`roundelay.frontend.stages.stage_function`); a segment implements
``stash`` and ``mixed``. A segment that recomputes itself is a
:class:`roundelay.frontend.stages.remat_segment.RematSegment`.

Every tensor that enters a segment is made contiguous and aligned as torch's allocators align, as if it had just been
received. Strides and alignment decide which kernel runs, and so the last bits: they must not depend on the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from roundelay.frontend.stages.deferred_wgrad import PendingWgrad
from roundelay.frontend.stages.keyed_rng import RngKey
from roundelay.frontend.stages.precision import Cast, Casts
from roundelay.frontend.stages.split_backward import SplitSegment
from roundelay.ir.stage import SegmentSpec

Tensors = dict[str, torch.Tensor]
Call = Callable[..., Sequence[Any]]
Reference = tuple[int | Cast, torch.Size, tuple[int, ...], int]
"""A weight's index, or a cast of a weight; then size, strides and offset of the view that was saved."""


@dataclass(slots=True)
class BackwardWeights:
    """The weights that a ``mixed`` backward reads; set when the backward starts."""

    live: Sequence[torch.Tensor] | None = None


class Leaves(NamedTuple):
    """A segment's weights as leaves of an autograd graph; they share the memory of the weights.

    Args:
        every: the segment's parameters, in its order.
        trained: those that require a gradient, by name.
        addresses: storage address to index in ``every``.
    """

    every: tuple[torch.Tensor, ...]
    trained: Tensors
    addresses: dict[int, int]


@dataclass(slots=True)
class Tape:
    """What one forward of a segment keeps for its backward.

    Args:
        roots: outputs that are attached to the autograd graph and can receive a gradient, by name.
        inputs: leaves of the inputs that require a gradient, by name.
        parameters: leaves of the trained parameters, by name.
        weights: where ``mixed`` finds the backward's weights; None for ``stash``.
        storages: storage address to bytes held for backward, parameters not counted.
        pending: weight gradients that the second half of the backward computes; empty if the backward is not split.
    """

    roots: Tensors
    inputs: Tensors
    parameters: Tensors
    weights: BackwardWeights | None
    storages: dict[int, int]
    pending: list[PendingWgrad]


@dataclass(frozen=True, slots=True)
class Segment:
    """Forward and backward of one segment.

    Args:
        spec: its inputs and outputs.
        call: parameters, buffers, inputs (in the order of ``spec``), then the RNG key -> outputs.
        trainable: names of parameters that require a gradient.
        differentiable: names of inputs that require a gradient.
        mutated: names of buffers that a forward changes.
        halves: the same call for a backward in two halves; None for a backward that is not split.
        casts: whether autocast casts weights to a lower precision.
        around: gives the context in which its backward runs.
    """

    spec: SegmentSpec
    call: Call
    trainable: frozenset[str]
    differentiable: frozenset[str]
    mutated: frozenset[str]
    halves: SplitSegment | None = None
    casts: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(
        self,
        params: Mapping[str, torch.Tensor],
        buffers: Tensors,
        inputs: Mapping[str, Any],
        rng_key: RngKey,
        *,
        mixed: bool = False,
        measure: bool = False,
        cached_leaves: Leaves | None = None,
    ) -> tuple[dict[str, Any], Tape]:
        """Run the forward and record a tape.

        Args:
            params: weights by name, each in its own storage; read, never written.
            buffers: by name; an entry that the forward changes is replaced by a new tensor.
            inputs: values by name.
            rng_key: key of the random numbers.
            mixed: save references instead of weights.
            measure: fill in ``Tape.storages``.
            cached_leaves: what :meth:`leaves` returned for these weights; ignored with ``mixed``.
        """
        leaves = self.leaves(params) if cached_leaves is None or mixed else cached_leaves
        input_leaves: Tensors = {}
        values = []
        for name in self.spec.inputs:
            value = _as_received(inputs[name])
            if name in self.differentiable:
                value = input_leaves[name] = value.detach().requires_grad_()
            values.append(value)
        weights = BackwardWeights() if mixed else None
        storages: dict[int, int] = {}
        pending: list[PendingWgrad] = []
        last = (rng_key,) if self.halves is None else (rng_key, pending)
        hooks = _Hooks(leaves, weights, storages if measure else None, self.casts) if mixed or measure else None
        with nullcontext() if hooks is None else hooks.active():
            results = self._run(leaves, buffers, values, last)
        roots, outputs = {}, {}
        for name, value in results:
            if isinstance(value, torch.Tensor):
                if value.requires_grad:
                    roots[name] = value
                value = value.detach()
            outputs[name] = value
        if mixed:  # backward reads other weights: free the forward's, which may be predicted copies
            for leaf in leaves.trained.values():
                leaf.data = leaf.new_empty(()).expand(leaf.shape)
        if hooks is not None and measure:
            for held in (*roots.values(), *input_leaves.values(), *(x for one in pending for x in one.saved)):
                hooks.count(held)
        return outputs, Tape(roots, input_leaves, leaves.trained, weights, storages, pending)

    def leaves(self, params: Mapping[str, torch.Tensor]) -> Leaves:
        """Return leaves for these weights; forwards may reuse them as long as the weights keep their memory."""
        # .data, not .detach(): a tape outlives updates of the parameter, so leaves need a version counter of their own
        every = {n: params[n].data for n in self.spec.parameters}
        trained = {n: leaf.requires_grad_() for n, leaf in every.items() if n in self.trainable}
        addresses = {leaf.untyped_storage().data_ptr(): i for i, leaf in enumerate(every.values())}
        return Leaves(tuple(every.values()), trained, addresses)

    def backward(
        self, tape: Tape, grad_outputs: Mapping[str, torch.Tensor | None], params: Mapping[str, torch.Tensor]
    ) -> tuple[Tensors, Tensors]:
        """Compute the gradients of inputs and parameters, by name; a name without a gradient is missing.

        If the backward is split, this is its first half: it stores in ``tape.pending`` what the second half needs.

        Args:
            tape: of the forward.
            grad_outputs: gradients of the outputs by name; None or missing means none.
            params: the weights that ``mixed`` reads; ignored by ``stash``.
        """
        if tape.weights is not None:
            tape.weights.live = [params[n] for n in self.spec.parameters]
        roots, grads_in = [], []
        for name, root in tape.roots.items():
            grad = grad_outputs.get(name)
            if grad is not None:
                roots.append(root)
                grads_in.append(_as_received(grad))
        parameters, leaves = tape.parameters, (*tape.inputs.values(), *tape.parameters.values())
        if self.halves is not None:
            parameters = {n: leaf for n, leaf in parameters.items() if n not in self.halves.late}
            edges: Sequence[Any] = [one.edge for one in tape.pending]
            leaves = (*tape.inputs.values(), *parameters.values(), *edges)
        if not roots or not leaves:
            return {}, {}
        # what torch.autograd.grad calls, without its checks, which cost as much as the backward of a small layer
        with self.around():
            grads: Sequence[torch.Tensor | None] = torch.autograd.Variable._execution_engine.run_backward(
                tuple(roots),
                tuple(grads_in),
                False,  # keep_graph
                False,  # create_graph
                leaves,
                True,  # allow_unreachable
                accumulate_grad=False,
            )
        first, second = len(tape.inputs), len(tape.inputs) + len(parameters)
        for one, grad in zip(tape.pending, grads[second:], strict=True):
            one.edge, one.grad_output = None, grad
        return _by_name(tape.inputs, grads[:first]), _by_name(parameters, grads[first:second])

    def _run(
        self, leaves: Leaves, buffers: Tensors, values: Sequence[Any], last: tuple[Any, ...]
    ) -> list[tuple[str, Any]]:
        """Call the segment on copies of the buffers it changes: tapes of earlier micro-batches keep the old ones."""
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self._run(leaves, buffers, values, last)
        call = self.call if self.halves is None else self.halves.call
        own = [buffers[n].clone() if n in self.mutated else buffers[n] for n in self.spec.buffers]
        results = call(*leaves.every, *own, *values, *last)
        if own:
            buffers.update((n, new) for n, new in zip(self.spec.buffers, own, strict=True) if n in self.mutated)
        return [(n, _as_output(value, leaves.addresses)) for n, value in zip(self.spec.outputs, results, strict=True)]


def storages_of(values: Iterable[Any]) -> dict[int, int]:
    """Return storage address to bytes for the tensors among some values."""
    storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _by_name(names: Iterable[str], grads: Sequence[torch.Tensor | None]) -> Tensors:
    return {name: grad.contiguous() for name, grad in zip(names, grads, strict=True) if grad is not None}


def _as_output(value: Any, weight_at: Mapping[int, int]) -> Any:
    """Make an output contiguous, and copy it if it is a view of a weight, which an update would change."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.contiguous()
    return value.clone() if value.untyped_storage().data_ptr() in weight_at else value


_ALIGNMENT = {"cpu": 64, "meta": 1}
"""Alignment in bytes of torch's allocators, by device type; 512 on all others."""


def _as_received(value: Any) -> Any:
    """Return a tensor contiguous and aligned as if just received: the tensor itself where it is, as in most cases."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_contiguous() and not value.data_ptr() % _ALIGNMENT.get(value.device.type, 512):
        return value
    return value.clone(memory_format=torch.contiguous_format)


class _Hooks:
    """Saved-tensor hooks of one forward: count the bytes held, and save references instead of weights."""

    def __init__(
        self,
        leaves: Leaves,
        weights: BackwardWeights | None,
        storages: dict[int, int] | None,
        casts: bool,
    ) -> None:
        self._weight_at, self._weights, self._storages = leaves.addresses, weights, storages
        self._strides = [leaf.stride() for leaf in leaves.every]
        self._casts = Casts(leaves.addresses) if weights is not None and casts else None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Install the hooks for the duration of the context."""
        saved = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        with saved, self._casts or nullcontext():
            yield

    def count(self, tensor: torch.Tensor) -> None:
        """Count the storage of ``tensor`` once, unless a parameter owns it."""
        address = tensor.untyped_storage().data_ptr()
        if self._storages is not None and address not in self._weight_at:
            self._storages[address] = tensor.untyped_storage().nbytes()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | Reference:
        address = tensor.untyped_storage().data_ptr()
        index: int | Cast | None = self._weight_at.get(address) if self._weights is not None else None
        if index is None and self._casts is not None:
            index = self._casts.found.get(address)
        if index is None:
            self.count(tensor)
            return tensor.detach()  # an output saved by its own graph would be a reference cycle until the backward
        return index, tensor.size(), tensor.stride(), int(tensor.storage_offset())

    def _unpack(self, saved: torch.Tensor | Reference) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        source, size, stride, offset = saved
        assert self._weights is not None and self._weights.live is not None
        index = source.weight if isinstance(source, Cast) else source
        live = self._weights.live[index].data
        if live.stride() != self._strides[index]:  # the saved view refers to the forward's layout
            live = live.new_empty_strided(live.shape, self._strides[index]).copy_(live)
        live = source.again(live) if isinstance(source, Cast) else live
        return live.as_strided(size, stride, offset)
