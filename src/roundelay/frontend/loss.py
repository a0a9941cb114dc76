"""The loss as the last segment, and which tensors it reads.

The loss is the user's function of the model's result and the batch. It is called once while every torch function is
watched; only the tensors that it reads travel to the last stage. All others are replaced by an :class:`Opaque`, which
raises an error if the loss reads it for a later batch.

The loss may also read tensors that the forward leaves in attributes, dicts and lists, and weights of the model. These
become outputs of the model, and :mod:`roundelay.frontend.loss_closure` puts them where the loss reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from roundelay.errors import JobError, RoundelayError
from roundelay.frontend import batch as batches
from roundelay.frontend.batch import Batch, leaves, without_tensors
from roundelay.frontend.batch import layout as layout_of
from roundelay.frontend.export_adapter import Opaque, OutputShape, Seen
from roundelay.frontend.export_checks import refusing_draws
from roundelay.frontend.label_counts import Labels, LabelWatch
from roundelay.frontend.loss_closure import ClosureSlots, unread, weights_at
from roundelay.frontend.loss_metrics import Metrics, check_count, layout, tensors
from roundelay.frontend.loss_metrics import split as without_metrics
from roundelay.frontend.reachable_state import Change, ReachableState
from roundelay.frontend.source_lines import users_line_of
from roundelay.frontend.trace_guards import refusing_grad

LossFunction = Callable[[Any, Any], Any]


class _ReadWatch(TorchFunctionMode):
    """Records which of the watched tensors any torch function (attribute reads included) gets."""

    def __init__(self, watched: Mapping[int, str]) -> None:
        super().__init__()
        self.watched = watched
        self.seen: set[str] = set()

    def record_reads(self, part: Any) -> None:
        """Record every watched tensor in nested tuples, lists and dicts."""
        if isinstance(part, torch.Tensor):
            if id(part) in self.watched:
                self.seen.add(self.watched[id(part)])
        elif isinstance(part, (tuple, list)):
            for item in part:
                self.record_reads(item)
        elif isinstance(part, dict):
            for item in part.values():
                self.record_reads(item)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.record_reads(args)
        self.record_reads(kwargs or {})
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class LossReads:
    """What the loss reads.

    Args:
        outputs: indices of output leaves; of leaves that are the same tensor, the first. The leaves of the model's
            result are followed by those that the forward leaves elsewhere, then by weights of the model.
        batch: paths of batch leaves.
        counts: it returns (sum, count).
        writes: it writes into what it reads, so it gets copies.
        draws: it draws random numbers, so it runs under the micro-batch's key.
        first: for every output leaf the first leaf that is the same tensor.
        weights: parameters and buffers that it reads from the model itself.
        metrics: the metrics that it returns; not part of the model's identity, hence not in the repr.
        labels: where the number of labels comes from, if the loss is a mean over labels; not in the repr either.
    """

    outputs: tuple[int, ...]
    batch: tuple[str, ...]
    counts: bool
    writes: bool
    draws: bool
    first: tuple[int, ...]
    weights: tuple[str, ...] = ()
    metrics: Metrics = field(default=(), repr=False)
    labels: Labels | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class LossRecord:
    """Record of one call of the loss on the first batch.

    Args:
        reads: what it reads.
        places: slots from which it reads what is not an argument.
        changed: slots that the call has changed (and that have been restored).
    """

    reads: LossReads
    places: ClosureSlots
    changed: tuple[Change, ...]


def record(
    loss: LossFunction, model: torch.nn.Module, seen: Seen, outputs: Sequence[torch.Tensor], batch: Batch
) -> LossRecord:
    """Run the loss once on real outputs and record what it reads; a second time if it reads weights of the model.

    Args:
        loss: the user's loss.
        model: the model.
        seen: layout of the model's result, and of what its forward leaves elsewhere.
        outputs: tensor leaves of both.
        batch: the sample micro-batch.

    Raises:
        JobError: the loss raises, or does not return a differentiable scalar (or a pair of scalars), or reads what a
            stage cannot provide.
    """
    assert seen.shape is not None
    state = ReachableState([("model", model), ("loss", loss)])
    own = dict((*model.named_parameters(), *model.named_buffers()))
    places = ClosureSlots(seen.left, (), seen.shape.num_tensors)
    observed = _observe(_Trial(loss, model, seen.shape, places, own, batch), outputs, state)
    if observed.weights:
        places = replace(places, weights=weights_at(state, {name: own[name] for name in observed.weights}))
        outputs = [*outputs, *(own[name] for name in observed.weights)]
        again = _observe(_Trial(loss, model, seen.shape, places, own, batch), outputs, state)
        if again.weights:
            raise _out_of_reach(again.weights[0])
        observed = replace(again, reads=replace(again.reads, weights=observed.weights))
    return LossRecord(observed.reads, places, observed.changed)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A loss, and all that a call of it needs except the outputs."""

    loss: LossFunction
    model: torch.nn.Module
    shape: OutputShape
    places: ClosureSlots
    own: Mapping[str, torch.Tensor]
    batch: Batch


@dataclass(frozen=True, slots=True)
class _CallRecord:
    """Record of one call: what it reads, also directly from the model, and what it changes."""

    reads: LossReads
    weights: tuple[str, ...]
    changed: tuple[Change, ...]


def _observe(call: _Trial, leaves_out: Sequence[torch.Tensor], state: ReachableState) -> _CallRecord:
    first = tuple(next(i for i, same in enumerate(leaves_out) if same is leaf) for leaf in leaves_out)
    entry = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves_out]
    copies = [leaf.clone() for leaf in entry]  # a loss may write into what it reads; autograd forbids it for leaves
    outputs = [copies[i] for i in first]
    fields = {path: leaf.clone() for path, leaf in leaves(call.batch).items()}  # not outputs
    watched = {id(outputs[i]): f"o{i}" for i in first} | {id(leaf): f"b{path}" for path, leaf in fields.items()}
    watched |= {id(tensor): f"w{name}" for name, tensor in call.own.items()}
    buffers = [tensor for tensor in call.own.values() if not isinstance(tensor, torch.nn.Parameter)]
    before = [leaf._version for leaf in (*outputs, *fields.values())]
    versions = [buffer._version for buffer in buffers]
    rng_state = torch.random.get_rng_state()
    batch = batches.replace(call.batch, lambda path, _: fields[path], _no_tensor, whole=without_tensors)
    with ExitStack() as stack:
        stack.enter_context(call.places.filled(outputs.__getitem__))
        before_call = ReachableState(state.roots, call.model)
        value, seen, terms = _call_watched(call, outputs, batch, watched)
        changed = tuple(before_call.changes())
        before_call.restore()
    if versions != [buffer._version for buffer in buffers]:
        raise _writes_buffer(call, buffers, versions)
    scalar, count = checked(value)
    if count is not None:
        check_count(float(scalar.detach()), float(count.detach()))
    metric_values = without_metrics(value)[1]
    metrics = layout(metric_values)
    tensors(metric_values, metrics)
    if not scalar.requires_grad:
        raise _without_gradient()
    seen |= _through_gradients(scalar, [entry[i] for i in first], fields, call.own, seen)
    reads = LossReads(
        outputs=tuple(i for i in range(len(outputs)) if f"o{i}" in seen),
        batch=tuple(path for path in fields if f"b{path}" in seen),
        counts=count is not None,
        writes=before != [leaf._version for leaf in (*outputs, *fields.values())],
        draws=not torch.equal(rng_state, torch.random.get_rng_state()),
        first=first,
        metrics=metrics,
        labels=_labels(value, outputs, terms),
    )
    return _CallRecord(reads, tuple(name for name in call.own if f"w{name}" in seen), changed)


def _labels(value: Any, outputs: Sequence[torch.Tensor], terms: torch.Tensor | None) -> Labels | None:
    """Where the number of labels may come from, if the loss is a cross entropy of its own or the model's."""
    returned = [i for i, output in enumerate(outputs) if without_metrics(value)[0] is output]
    return Labels(terms=float(terms)) if terms is not None else Labels(returned[0]) if returned else None


def _call_watched(
    call: _Trial, outputs: Sequence[torch.Tensor], batch: Batch, watched: Mapping[int, str]
) -> tuple[Any, set[str], torch.Tensor | None]:
    """The loss's result, the tensors it has read, and its number of labels if it is a mean over labels."""
    result = call.shape.unflatten(dict(enumerate(outputs)))
    numbers = {f"o{i}" for i in call.shape.numbers}  # unflatten reads them
    with (
        torch.enable_grad(),
        refusing_draws("the loss"),
        refusing_grad(_grad_in_loss),
        LabelWatch() as labels,
        _ReadWatch(watched) as watch,
    ):
        try:
            value = call.loss(result, batch)
        except RoundelayError:
            raise
        except Exception as error:  # raised by user code
            raise _failed(error, batch) from error
        watch.record_reads(value)
    return value, watch.seen | numbers, labels.terms_of(without_metrics(value)[0])


def _grad_in_loss(where: str) -> JobError:
    return JobError(
        f"torch.autograd.grad in the loss{where}",
        got="a gradient with respect to inputs or weights as a part of the loss, as in a gradient penalty",
        expected="a loss of the model's outputs: a stage's backward runs once and is not differentiated itself",
        remedy="Train this model in plain PyTorch; or replace the penalty by one without second derivatives "
        "(torch.nn.utils.parametrizations.spectral_norm), and balance losses by their values (loss / loss.detach()) or "
        "by learned weights.",
    )


def _through_gradients(
    scalar: torch.Tensor,
    entering: Sequence[torch.Tensor],
    fields: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    seen: set[str],
) -> set[str]:
    """What the loss's gradients flow into; if that was not seen to be read, all of the batch in addition.

    A scripted function reads tensors without torch's Python functions.

    Raises:
        JobError: a gradient flows into a tensor that is neither an output nor the model's.
    """
    names = {id(tensor): f"w{name}" for name, tensor in own.items()}
    names |= {id(leaf): f"o{i}" for i, leaf in reversed(list(enumerate(entering)))}
    trained = list(_trained_leaves(scalar))
    for leaf in trained:
        if id(leaf) not in names:
            raise _own_weight(leaf)
    entered = {names[id(leaf)] for leaf in trained}
    return entered if entered <= seen else entered | {f"b{path}" for path in fields}


def _own_weight(leaf: torch.Tensor) -> JobError:
    return JobError(
        "the loss",
        got=f"a gradient for a tensor of shape {tuple(leaf.shape)} that is not part of the model: a layer or a weight "
        "of the loss itself",
        expected="a loss whose weights belong to the model, so that the optimizer gets them",
        remedy="Make the layer a submodule of the model and call it in forward; or call requires_grad_(False) on what "
        "should not be trained.",
    )


def _trained_leaves(scalar: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaf tensors for which a backward would compute gradients."""
    left, seen = [scalar.grad_fn], set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        left += [below for below, _ in node.next_functions]
    if scalar.grad_fn is None:
        yield scalar


def _writes_buffer(call: _Trial, buffers: Sequence[torch.Tensor], versions: Sequence[int]) -> JobError:
    written = next(b for b, version in zip(buffers, versions, strict=True) if b._version != version)
    name = next(name for name, tensor in call.own.items() if tensor is written)
    return JobError(
        f"the loss, which writes into buffer {name!r} of the model",
        got="a state that changes outside of the model's forward",
        expected="buffers that the forward changes",
        remedy="Move the write into forward; instead of calling the model a second time in the loss, let its forward "
        "compute and return both results.",
    )


def _out_of_reach(name: str) -> JobError:
    return JobError(
        f"the loss, which reads parameter {name!r} of the model",
        got="a weight kept where it cannot be replaced by another version (in a tuple, in a partial)",
        expected="weights that it reads from the model, or from a list or a dict",
        remedy="Let the loss read it from the model, as in model.head.weight, or let forward return it.",
    )


def _no_tensor(path: str, leaf: Any) -> Any:
    """The stand-in for a batch leaf that is not a tensor: it is not sent, so the loss may not read it."""
    if leaf is None:
        return None
    how = " (give it as torch.from_numpy(array))" if isinstance(leaf, (np.ndarray, np.generic)) else ""
    return Opaque(f"batch field {path!r}, a {type(leaf).__name__}{how}")


def _without_gradient() -> JobError:
    return JobError(
        "the loss",
        got="a value that no gradient enters",
        expected="a value that depends on a trained parameter through differentiable operations",
        remedy="Look for detach(), item(), argmax or no_grad in the loss or the model, and for frozen parameters.",
    )


def with_unobserved_reads(call: LossCall, outputs: Sequence[torch.Tensor]) -> LossCall:
    """The loss with all tensors of the batch, if it fails without one whose read was not observed.

    ``torch.autograd.Variable(x)``, for example, reads a tensor without torch's Python functions.

    Args:
        call: the loss, with the reads that were observed.
        outputs: the output leaves.
    """
    fields = leaves(call.layout)
    labels = call.reads.labels
    if len(call.reads.batch) == len(fields) or (labels is not None and labels.output >= 0):
        return call
    try:
        call(*(outputs[i].detach() for i in call.reads.outputs), *(fields[path].clone() for path in call.reads.batch))
    except TypeError:
        return replace(call, reads=replace(call.reads, batch=tuple(fields)))
    except Exception:  # raised by user code; it will be raised again where it matters
        return call
    return call


def _failed(error: Exception, batch: Batch) -> JobError:
    if Opaque.__name__ in str(error):
        return JobError(
            f"the loss on the first batch{users_line_of(error)}",
            got=f"{type(error).__name__}: it reads a part of the batch that is not a tensor",
            expected="a loss that reads tensors only: nothing else of a batch is sent to the last stage",
            remedy="Give it as a tensor in batches(epoch): torch.from_numpy(array), torch.tensor(numbers).",
        )
    names = isinstance(error, (KeyError, IndexError, AttributeError))
    return JobError(
        f"the loss on the first batch{users_line_of(error)}",
        got=f"{type(error).__name__}: {error}",
        expected=f"a function (outputs, batch) -> scalar; this batch holds {', '.join(map(repr, leaves(batch)))}",
        remedy="Check the names of the labels in the batch and the layout of the model's outputs."
        if names
        else "Call the loss by hand on the model's result for one batch, and fix what raises there.",
    )


def checked(value: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss's result without metrics as (scalar, None) or (sum, count).

    Raises:
        JobError: it is neither.
    """
    value, _ = without_metrics(value)
    parts = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(parts) == 2 and isinstance(parts[1], (int, float)):
        parts = (parts[0], torch.tensor(float(parts[1])))
    good = len(parts) in (1, 2) and all(isinstance(part, torch.Tensor) and part.numel() == 1 for part in parts)
    if not good or not parts[0].is_floating_point():
        got = [f"tensor of shape {tuple(p.shape)} {p.dtype}" if isinstance(p, torch.Tensor) else repr(p) for p in parts]
        raise JobError(
            "the loss",
            got=f"{' and '.join(got)}",
            expected="one floating-point scalar (the mean over the micro-batch's rows), or the pair (sum, count); or "
            "a dict with such a 'loss' and metrics",
            remedy="Reduce it with .mean(), or return (loss.sum(), number_of_terms).",
        )
    first = parts[0].reshape(())
    if first.dtype.itemsize < torch.float32.itemsize:  # it is summed, and a count would be rounded
        first = first.float()
    return (first, parts[1].reshape(()).to(first.dtype)) if len(parts) == 2 else (first, None)


@dataclass(frozen=True, slots=True)
class LossCall:
    """The loss as a function of the tensors that are sent to the last stage.

    Args:
        loss: the user's loss.
        reads: what it reads.
        shape: layout of the model's result.
        places: slots from which it reads what is not an argument.
        layout: a batch of the right layout; its tensors are not used.
    """

    loss: LossFunction
    reads: LossReads
    shape: OutputShape
    places: ClosureSlots
    layout: Batch

    @property
    def shown(self) -> Any:
        """What the loss gets of a batch apart from tensor values; it must be the same for every batch."""
        return layout_of(self.layout)

    def __call__(self, *values: Any) -> list[torch.Tensor]:
        """The loss of one micro-batch.

        Args:
            values: outputs read, the number of labels if the model counts them, batch leaves read.

        Returns:
            [loss], [sum, count] or, for a mean over labels, [loss, labels]; then metrics.
        """
        if self.reads.writes:
            values = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in values)
        read = dict(zip(self.reads.outputs, values, strict=False))
        shown = range(self.shape.num_tensors)
        outputs = {i: self._leaf(read, i) for i in shown}
        labels, num_outputs = self.reads.labels, len(self.reads.outputs)
        counted = labels is not None and labels.output >= 0
        fields = dict(zip(self.reads.batch, values[num_outputs + counted :], strict=True))
        batch = batches.replace(
            self.layout,
            lambda path, _: fields.get(path, Opaque(f"batch field {path!r}")),
            _no_tensor,
            whole=without_tensors,
        )
        watch = LabelWatch()
        with self.places.filled(lambda i: self._leaf(read, i)), watch if labels and not counted else nullcontext():
            value = self.loss(self.shape.unflatten(outputs), batch)
        loss, count = checked(value)
        metrics = tensors(without_metrics(value)[1], self.reads.metrics)
        if labels is not None:
            terms = values[num_outputs] if counted else watch.terms_of(without_metrics(value)[0])
            return [*_of_labels(loss, terms), *metrics]
        return [loss, *metrics] if count is None else [loss, count, *metrics]

    def _leaf(self, read: Mapping[int, Any], i: int) -> Any:
        """An output leaf, or the stand-in for one that was not read on the first batch."""
        one = self.reads.first[i]
        if one in read:
            return read[one]
        return Opaque(f"output {i}") if i < self.places.start else unread(self.places, i)


def _of_labels(loss: torch.Tensor, terms: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over labels and their number; without labels the mean is 0 instead of 0/0, with zero gradients.

    The number is NaN if the loss is not such a mean this time; it is not used for a batch in one micro-batch.
    """
    if terms is None:
        return loss, loss.new_full((), math.nan, dtype=torch.float64).detach()
    return torch.where(terms.detach() > 0, loss, 0.0), terms.detach()
