"""The loss as the last segment, and what it reads.

The loss is the person's own function of the model's result and the batch. Which tensors it reads is seen by running it
once while every torch function it calls is watched; only those travel to the last stage. A tensor that was not seen
being read is replaced by a stand-in that tells, rather than guesses, when a later batch reads it after all.

It may read more than it is given: tensors that the forward leaves in attributes, dicts and lists, and weights of the
model. These are outputs of the model as well, and :mod:`roundelay.frontend.loss_closure` lays them where the loss
looks.
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


class _Watch(TorchFunctionMode):
    """Notes which of the watched tensors any torch function (attribute reads included) touches."""

    def __init__(self, watched: Mapping[int, str]) -> None:
        super().__init__()
        self.watched = watched
        self.seen: set[str] = set()

    def note(self, part: Any) -> None:
        """Note every watched tensor in a nest of tuples, lists and mappings."""
        if isinstance(part, torch.Tensor):
            if id(part) in self.watched:
                self.seen.add(self.watched[id(part)])
        elif isinstance(part, (tuple, list)):
            for item in part:
                self.note(item)
        elif isinstance(part, dict):
            for item in part.values():
                self.note(item)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note(args)
        self.note(kwargs or {})
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class LossReads:
    """What the loss reads.

    Args:
        outputs: indices of output leaves; of leaves that are one tensor the first. Behind those of the model's result
            come those that the forward leaves elsewhere, then the model's own weights.
        batch: paths of batch leaves.
        counts: it returns (sum, count).
        writes: it writes into what it reads, so it gets copies.
        draws: it draws random numbers, so it runs under the micro-batch's key.
        first: for every output leaf the first leaf that is the same tensor.
        weights: parameters and buffers of the model that it reads past the model's result.
        metrics: what it returns beside the loss; no part of the model's identity, which is why it is not shown.
        labels: where their number comes from, if the loss is a mean over labels; not shown either.
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
class Looked:
    """What one call of the loss on the first batch has shown.

    Args:
        reads: what it reads.
        places: where it finds what it is not given.
        changed: slots that the call has changed, put back by now.
    """

    reads: LossReads
    places: ClosureSlots
    changed: tuple[Change, ...]


def record(
    loss: LossFunction, model: torch.nn.Module, seen: Seen, outputs: Sequence[torch.Tensor], batch: Batch
) -> Looked:
    """Run the loss once on real outputs and see what it reads; once more where it reads weights of the model.

    Args:
        loss: the person's loss.
        model: the model.
        seen: layout of the model's result, and of what its forward leaves elsewhere.
        outputs: tensor leaves of both.
        batch: the sample micro-batch.

    Raises:
        JobError: the loss raises, does not return a scalar (or a pair of scalars), or one that no gradient enters; or
            it reads what no stage could give it.
    """
    assert seen.shape is not None
    world = ReachableState([("model", model), ("loss", loss)])
    own = dict((*model.named_parameters(), *model.named_buffers()))
    places = ClosureSlots(seen.left, (), seen.shape.num_tensors)
    found = _look(_Call(loss, model, seen.shape, places, own, batch), outputs, world)
    if found.weights:
        places = replace(places, weights=weights_at(world, {name: own[name] for name in found.weights}))
        outputs = [*outputs, *(own[name] for name in found.weights)]
        again = _look(_Call(loss, model, seen.shape, places, own, batch), outputs, world)
        if again.weights:
            raise _out_of_reach(again.weights[0])
        found = replace(again, reads=replace(again.reads, weights=found.weights))
    return Looked(found.reads, places, found.changed)


@dataclass(frozen=True, slots=True)
class _Call:
    """A loss, and all that one call of it needs but the outputs."""

    loss: LossFunction
    model: torch.nn.Module
    shape: OutputShape
    places: ClosureSlots
    own: Mapping[str, torch.Tensor]
    batch: Batch


@dataclass(frozen=True, slots=True)
class _Found:
    """What one call has shown: besides what it reads, weights of the model that it reads past its arguments."""

    reads: LossReads
    weights: tuple[str, ...]
    changed: tuple[Change, ...]


def _look(call: _Call, given: Sequence[torch.Tensor], world: ReachableState) -> _Found:
    first = tuple(next(i for i, same in enumerate(given) if same is leaf) for leaf in given)
    entering = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in given]
    handed = [leaf.clone() for leaf in entering]  # a loss may write into what it reads, and not into leaves
    outputs = [handed[i] for i in first]
    fields = {path: leaf.clone() for path, leaf in leaves(call.batch).items()}  # own, even where the model returns one
    watched = {id(outputs[i]): f"o{i}" for i in first} | {id(leaf): f"b{path}" for path, leaf in fields.items()}
    watched |= {id(tensor): f"w{name}" for name, tensor in call.own.items()}
    buffers = [tensor for tensor in call.own.values() if not isinstance(tensor, torch.nn.Parameter)]
    before = [leaf._version for leaf in (*outputs, *fields.values())]
    versions = [buffer._version for buffer in buffers]
    state = torch.random.get_rng_state()
    batch = batches.replace(call.batch, lambda path, _: fields[path], _no_tensor, whole=without_tensors)
    with ExitStack() as stack:
        stack.enter_context(call.places.filled(outputs.__getitem__))
        before_call = ReachableState(world.roots, call.model)
        value, seen, terms = _called(call, outputs, batch, watched)
        changed = tuple(before_call.changes())
        before_call.restore()
    if versions != [buffer._version for buffer in buffers]:
        raise _writes_buffer(call, buffers, versions)
    scalar, count = checked(value)
    if count is not None:
        check_count(float(scalar.detach()), float(count.detach()))
    beside = without_metrics(value)[1]
    metrics = layout(beside)
    tensors(beside, metrics)
    if not scalar.requires_grad:
        raise _without_gradient()
    seen |= _through_gradients(scalar, [entering[i] for i in first], fields, call.own, seen)
    reads = LossReads(
        outputs=tuple(i for i in range(len(outputs)) if f"o{i}" in seen),
        batch=tuple(path for path in fields if f"b{path}" in seen),
        counts=count is not None,
        writes=before != [leaf._version for leaf in (*outputs, *fields.values())],
        draws=not torch.equal(state, torch.random.get_rng_state()),
        first=first,
        metrics=metrics,
        labels=_labels(value, outputs, terms),
    )
    return _Found(reads, tuple(name for name in call.own if f"w{name}" in seen), changed)


def _labels(value: Any, outputs: Sequence[torch.Tensor], terms: torch.Tensor | None) -> Labels | None:
    """Where the number of labels may come from, of a loss that is a cross entropy of its own or the model's."""
    returned = [i for i, output in enumerate(outputs) if without_metrics(value)[0] is output]
    return Labels(terms=float(terms)) if terms is not None else Labels(returned[0]) if returned else None


def _called(
    call: _Call, outputs: Sequence[torch.Tensor], batch: Batch, watched: Mapping[int, str]
) -> tuple[Any, set[str], torch.Tensor | None]:
    """What the loss returns, which tensors it has touched, and the number of its labels if it is a mean over them."""
    result = call.shape.unflatten(dict(enumerate(outputs)))
    numbers = {f"o{i}" for i in call.shape.numbers}  # they were read for that
    with (
        torch.enable_grad(),
        refusing_draws("the loss"),
        refusing_grad(_penalty),
        LabelWatch() as labels,
        _Watch(watched) as watch,
    ):
        try:
            value = call.loss(result, batch)
        except RoundelayError:
            raise
        except Exception as error:  # the person's own code
            raise _failed(error, batch) from error
        watch.note(value)
    return value, watch.seen | numbers, labels.terms_of(without_metrics(value)[0])


def _penalty(where: str) -> JobError:
    return JobError(
        f"torch.autograd.grad in the loss{where}",
        got="a gradient of outputs by inputs or weights inside of what is trained, as of a gradient penalty",
        expected="a loss of the model's outputs: a stage runs its backward once, and keeps no graph of it",
        remedy="Train this model in plain PyTorch; or, for a penalty, take one that needs no second derivative "
        "(torch.nn.utils.parametrizations.spectral_norm), and to balance losses, weights that need no gradients: of "
        "their values (loss / loss.detach()), or learned ones.",
    )


def _through_gradients(
    scalar: torch.Tensor,
    entering: Sequence[torch.Tensor],
    fields: Mapping[str, torch.Tensor],
    own: Mapping[str, torch.Tensor],
    seen: set[str],
) -> set[str]:
    """What the loss has read, as its gradients tell; all of the batch if it has read past what was watched.

    A scripted function reads without torch's Python functions.

    Raises:
        JobError: a gradient flows into what is neither an output nor the model's.
    """
    names = {id(tensor): f"w{name}" for name, tensor in own.items()}
    names |= {id(leaf): f"o{i}" for i, leaf in reversed(list(enumerate(entering)))}
    leaves_read = list(_trained_leaves(scalar))
    for leaf in leaves_read:
        if id(leaf) not in names:
            raise _own_weight(leaf)
    found = {names[id(leaf)] for leaf in leaves_read}
    return found if found <= seen else found | {f"b{path}" for path in fields}


def _own_weight(leaf: torch.Tensor) -> JobError:
    return JobError(
        "the loss",
        got=f"a gradient for a tensor of shape {tuple(leaf.shape)} that is no part of the model: a layer or a weight "
        "that the loss keeps for itself",
        expected="a loss whose weights are the model's own, which the optimizer is given",
        remedy="Make the layer a submodule of the model and call it in forward; or call requires_grad_(False) on what "
        "is not to be trained.",
    )


def _trained_leaves(scalar: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors into which a backward would add gradients."""
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


def _writes_buffer(call: _Call, buffers: Sequence[torch.Tensor], versions: Sequence[int]) -> JobError:
    written = next(b for b, version in zip(buffers, versions, strict=True) if b._version != version)
    name = next(name for name, tensor in call.own.items() if tensor is written)
    return JobError(
        f"the loss, which writes into buffer {name!r} of the model",
        got="a state that changes outside of the model's forward",
        expected="buffers that the forward changes",
        remedy="Move what writes it into forward; a loss that calls the model a second time is to be a model whose "
        "forward calls it twice and returns both results.",
    )


def _out_of_reach(name: str) -> JobError:
    return JobError(
        f"the loss, which reads parameter {name!r} of the model",
        got="a weight that it holds where no other can be put in its place (in a tuple, in a partial)",
        expected="weights that it reads from the model, or from a list or a dict",
        remedy="Let the loss read it from the model, as in model.head.weight, or let forward return it.",
    )


def _no_tensor(path: str, leaf: Any) -> Any:
    """What stands for a leaf that is no tensor: it does not travel, so the loss may not read it."""
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


def with_unseen(call: LossCall, outputs: Sequence[torch.Tensor]) -> LossCall:
    """The loss with all tensors of the batch, if it fails on one that it was not seen to read.

    ``torch.autograd.Variable(x)``, for example, reads a tensor without torch's Python functions.

    Args:
        call: the loss, with what it was seen to read.
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
    except Exception:  # the person's own code: met again where it matters
        return call
    return call


def _failed(error: Exception, batch: Batch) -> JobError:
    if Opaque.__name__ in str(error):
        return JobError(
            f"the loss on the first batch{users_line_of(error)}",
            got=f"{type(error).__name__}, as it reads a part of the batch that is no tensor",
            expected="a loss that reads tensors alone: nothing else of a batch travels to the last stage",
            remedy="Give it as a tensor in batches(epoch): torch.from_numpy(array), torch.tensor(numbers).",
        )
    names = isinstance(error, (KeyError, IndexError, AttributeError))
    return JobError(
        f"the loss on the first batch{users_line_of(error)}",
        got=f"{type(error).__name__}: {error}",
        expected=f"a function (outputs, batch) -> scalar; this batch holds {', '.join(map(repr, leaves(batch)))}",
        remedy="Check the names of the labels in the batch and the layout of the model's outputs."
        if names
        else "Call the loss by hand on the model's result for one batch, and mend what raises there.",
    )


def checked(value: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss's result as (scalar, None) or (sum, count), metrics beside it left out.

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
            "a dict with such a 'loss' and metrics beside it",
            remedy="Reduce it with .mean(), or return (loss.sum(), number_of_terms).",
        )
    first = parts[0].reshape(())
    if first.dtype.itemsize < torch.float32.itemsize:  # it is summed, and a count would be rounded
        first = first.float()
    return (first, parts[1].reshape(()).to(first.dtype)) if len(parts) == 2 else (first, None)


@dataclass(frozen=True, slots=True)
class LossCall:
    """The loss as a function of the tensors that reach the last stage.

    Args:
        loss: the person's loss.
        reads: what it reads.
        shape: layout of the model's result.
        places: where the loss finds what it is not given.
        layout: a batch of the right layout; its tensors are not used.
    """

    loss: LossFunction
    reads: LossReads
    shape: OutputShape
    places: ClosureSlots
    layout: Batch

    @property
    def shown(self) -> Any:
        """What the loss is shown of that batch, beside tensors; every batch must be like it."""
        return layout_of(self.layout)

    def __call__(self, *values: Any) -> list[torch.Tensor]:
        """The loss of one micro-batch.

        Args:
            values: outputs read, the number of labels if the model counts them, batch leaves read.

        Returns:
            [loss], [sum, count] or, of a mean over labels, [loss, labels]; then metrics.
        """
        if self.reads.writes:
            values = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in values)
        read = dict(zip(self.reads.outputs, values, strict=False))
        shown = range(self.shape.num_tensors)
        outputs = {i: self._leaf(read, i) for i in shown}
        labels, behind = self.reads.labels, len(self.reads.outputs)
        counted = labels is not None and labels.output >= 0
        fields = dict(zip(self.reads.batch, values[behind + counted :], strict=True))
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
            terms = values[behind] if counted else watch.terms_of(without_metrics(value)[0])
            return [*_of_labels(loss, terms), *metrics]
        return [loss, *metrics] if count is None else [loss, count, *metrics]

    def _leaf(self, read: Mapping[int, Any], i: int) -> Any:
        """An output leaf, or what tells that it was not seen to be read."""
        one = self.reads.first[i]
        if one in read:
            return read[one]
        return Opaque(f"output {i}") if i < self.places.start else unread(self.places, i)


def _of_labels(loss: torch.Tensor, terms: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A mean over labels, and their number; 0 where there are none, which is 0/0, and zeros as its gradients.

    NaN where the loss is something else than such a mean this time: of a batch in one piece nobody asks.
    """
    if terms is None:
        return loss, loss.new_full((), math.nan, dtype=torch.float64).detach()
    return torch.where(terms.detach() > 0, loss, 0.0), terms.detach()
