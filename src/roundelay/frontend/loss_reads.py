"""Observe which tensors the loss reads, by calling it once on the sample while every torch function is watched.

The loss may also read tensors that the forward leaves in attributes, dicts and lists, and weights of the model. These
become outputs of the model, and :mod:`roundelay.frontend.loss_closure` puts them where the loss reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_structure

from roundelay.errors import JobError, RoundelayError
from roundelay.frontend.batch import Batch, fields, leaves, numbers
from roundelay.frontend.export.export_adapter import Opaque, OutputShape, Seen, SideOutput
from roundelay.frontend.export.export_checks import autograd_nodes, refusing_draws
from roundelay.frontend.export.trace_guards import refusing_grad
from roundelay.frontend.export.traced_checks import CheckedLoss
from roundelay.frontend.label_counts import Labels, LabelWatch
from roundelay.frontend.loss import LossCall, LossFunction, LossReads, checked, with_tensors
from roundelay.frontend.loss_closure import ClosureSlots, weights_at
from roundelay.frontend.loss_metrics import Metrics, check_count, layout, tensors
from roundelay.frontend.loss_metrics import split as without_metrics
from roundelay.reach.reachable_state import Change, ReachableState
from roundelay.reach.source_lines import users_line_of


@dataclass(frozen=True, slots=True)
class Sample:
    """The whole sample micro-batch, of which a loss is observed on the first rows.

    Args:
        batch: the sample.
        sizes: of every output leaf on it; None where they are not known.
    """

    batch: Batch
    sizes: Sequence[Sequence[Sequence[int]] | None]


def observe_loss(
    loss: LossFunction,
    model: torch.nn.Module,
    seen: Seen,
    outputs: Sequence[torch.Tensor],
    batch: Batch,
    sample: Sample | None = None,
) -> tuple[LossCall, tuple[Change, ...]]:
    """Run the loss on real outputs and record what it reads; a second time if it reads weights of the model.

    Args:
        loss: the user's loss.
        model: the model.
        seen: layout of the model's result, and of what its forward leaves elsewhere.
        outputs: tensor leaves of both.
        batch: the sample micro-batch, or its first rows.
        sample: the whole sample, if these are its first rows; its labels are counted, too.

    Returns:
        The loss as a function of what it reads, and the slots that it has changed (and that have been restored).

    Raises:
        JobError: the loss raises, or does not return a differentiable scalar (or a pair of scalars), or reads what a
            stage cannot provide.
        OtherLossError: the first rows do not show what it reads on the whole sample.
    """
    assert seen.shape is not None
    state = ReachableState([("model", model), ("loss", loss)])
    own = dict((*model.named_parameters(), *model.named_buffers()))
    left = seen.left
    called = loss
    if seen.checks:
        called = CheckedLoss(loss, seen.checks)
        left += tuple(SideOutput(slot, OutputShape(tree_structure(0), {})) for slot in called.slots())
    trial = _Trial(called, model, seen.shape, ClosureSlots(left, (), seen.shape.num_tensors), own, batch, sample)
    if numbers(batch):  # whose use cannot be observed: it gets them, and whether they matter is tried
        without = _without_numbers(trial, outputs, state)
        trial = replace(trial, numbers=True)
        reads, changed = _observe(trial, outputs, state)
        if without is None or {*without.batch} != {*reads.batch} - numbers(batch).keys():
            # with another number it may read another field, and be no mean over labels
            reads = replace(reads, batch=tuple(fields(batch)), labels=None)
    else:
        reads, changed = _observe(trial, outputs, state)
    if reads.weights:
        weights = {name: own[name] for name in reads.weights}
        trial = replace(trial, places=replace(trial.places, weights=weights_at(state, weights)))
        outputs = [*outputs, *weights.values()]
        again, changed = _observe(trial, outputs, state)
        if again.weights:
            raise JobError(
                f"the loss, which reads parameter {again.weights[0]!r} of the model",
                got="a weight kept where it cannot be replaced by another version (in a tuple, in a partial)",
                expected="weights that it reads from the model, or from a list or a dict",
                remedy="Let the loss read it from the model, as in model.head.weight, or let forward return it.",
            )
        reads = replace(again, weights=reads.weights, batch=reads.batch)
    call = LossCall(called, reads, seen.shape, trial.places, batch)
    before_call = ReachableState(state.roots, model)
    try:
        return _with_unobserved_reads(call, outputs), changed
    finally:
        before_call.restore()


def _without_numbers(trial: _Trial, outputs: Sequence[torch.Tensor], state: ReachableState) -> LossReads | None:
    """What the loss reads if it does not get the numbers of the batch; None if it cannot do without."""
    try:
        return _observe(trial, outputs, state)[0]
    except JobError:
        return None


@dataclass(frozen=True, slots=True)
class _Trial:
    """A loss, and all that a call of it needs except the outputs.

    ``numbers`` says whether it gets the numbers of the batch, too; then they count as read.
    """

    loss: LossFunction
    model: torch.nn.Module
    shape: OutputShape
    places: ClosureSlots
    own: Mapping[str, torch.Tensor]
    batch: Batch
    sample: Sample | None
    numbers: bool = False


class OtherLossError(Exception):
    """Raised when a loss on the first rows of the sample may not be what it is on all of them."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What one call of the loss returns and does.

    Args:
        value: its result.
        outputs: the output leaves that it was called with.
        fields: the batch's tensors that it was called with, by path.
        seen: names of the tensors that it was seen to read.
        terms: its number of labels if it is a mean over labels.
        writes: whether it writes into what it reads.
        draws: whether it draws random numbers.
        changed: the slots that it changes.
    """

    value: Any
    outputs: Sequence[torch.Tensor]
    fields: Mapping[str, torch.Tensor]
    seen: set[str]
    terms: torch.Tensor | None
    writes: bool
    draws: bool
    changed: tuple[Change, ...]

    @property
    def labels(self) -> Labels | None:
        """Where the number of labels may come from, if the loss is a cross entropy of its own or the model's."""
        loss = without_metrics(self.value)[0]
        returned = [i for i, output in enumerate(self.outputs) if loss is output]
        return Labels(terms=float(self.terms)) if self.terms is not None else Labels(returned[0]) if returned else None

    def structure(self) -> tuple[Any, ...]:
        """All that must be the same on the first rows as on the whole sample."""
        counts, metrics = checked(self.value)[1] is not None, layout(without_metrics(self.value)[1])
        slots = {change.slot.id for change in self.changed}
        labels = None if self.labels is None else self.labels.output
        return self.seen, self.writes, self.draws, counts, metrics, slots, labels


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


def _observe(
    trial: _Trial, results: Sequence[torch.Tensor], state: ReachableState
) -> tuple[LossReads, tuple[Change, ...]]:
    """What one call of the loss reads (``weights``: directly from the model), and the slots that it changes."""
    first = tuple(next(i for i, same in enumerate(results) if same is leaf) for leaf in results)
    entry = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in results]
    copies = [leaf.clone() for leaf in entry]  # a loss may write into what it reads; autograd forbids it for leaves
    call = _called(trial, [copies[i] for i in first], state)
    scalar, metrics, count = _checked_result(call.value)
    labels = call.labels
    if trial.sample is not None:
        labels = _labels_of_sample(trial, trial.sample, call, [results[i] for i in first], state)
    seen = call.seen | _through_gradients(scalar, [entry[i] for i in first], call.fields, trial.own, call.seen)
    reads = LossReads(
        outputs=tuple(i for i in range(len(first)) if f"o{i}" in seen),
        batch=tuple(path for path in call.fields if f"b{path}" in seen),
        counts=count is not None,
        writes=call.writes,
        draws=call.draws,
        first=first,
        weights=tuple(name for name in trial.own if f"w{name}" in seen),
        metrics=metrics,
        labels=labels,
    )
    return reads, call.changed


def _called(trial: _Trial, outputs: Sequence[torch.Tensor], state: ReachableState) -> _Call:
    """Call the loss once on a copy of the batch, and restore what it changes."""
    own = {path: leaf.clone() for path, leaf in leaves(trial.batch).items()}  # apart from outputs, too
    sent = fields(trial.batch).keys() - own.keys() if trial.numbers else set[str]()
    first = {id(output): i for i, output in reversed(list(enumerate(outputs)))}
    watched = {own: f"o{i}" for own, i in first.items()} | {id(leaf): f"b{path}" for path, leaf in own.items()}
    watched |= {id(tensor): f"w{name}" for name, tensor in trial.own.items()}
    buffers = {name: tensor for name, tensor in trial.own.items() if not isinstance(tensor, torch.nn.Parameter)}
    before = [leaf._version for leaf in (*outputs, *own.values())]
    versions = {name: buffer._version for name, buffer in buffers.items()}
    rng_state = torch.random.get_rng_state()
    batch = with_tensors(trial.batch, own.__getitem__, lambda path, leaf: leaf if path in sent else None)
    with trial.places.filled(outputs.__getitem__):
        before_call = ReachableState(state.roots, trial.model)
        try:
            value, seen, terms = _call_watched(trial, outputs, batch, watched)
            changed = tuple(before_call.changes())
        finally:
            before_call.restore()
    _refuse_buffer_writes(buffers, versions)
    writes = before != [leaf._version for leaf in (*outputs, *own.values())]
    draws = not torch.equal(rng_state, torch.random.get_rng_state())
    seen |= {f"b{path}" for path in sent}
    return _Call(
        value, outputs, own | {path: fields(trial.batch)[path] for path in sent}, seen, terms, writes, draws, changed
    )


def _labels_of_sample(
    trial: _Trial, sample: Sample, call: _Call, results: Sequence[torch.Tensor], state: ReachableState
) -> Labels | None:
    """The labels of the whole sample, on which the loss is called with the outputs of the first rows repeated.

    Raises:
        OtherLossError: there it reads, changes or returns something else; or the first rows have no labels, or no
            finite loss.
    """
    loss, count = checked(call.value)
    if not bool(loss.isfinite()) or (count is not None and not count) or (call.terms is not None and not call.terms):
        raise OtherLossError
    places = {f"o{i}" for i in range(len(results))} & call.seen
    repeated = dict[int, torch.Tensor]()
    for i, leaf in enumerate(results):
        if id(leaf) not in repeated:
            sizes = sample.sizes[i] if i < len(sample.sizes) else [leaf.shape]
            repeated[id(leaf)] = _repeated(leaf.detach(), sizes, read=f"o{i}" in places)
    outputs = [repeated[id(leaf)] for leaf in results]
    on_sample = _called(replace(trial, batch=sample.batch), outputs, state)
    if on_sample.structure() != call.structure():
        raise OtherLossError
    return on_sample.labels


def _repeated(leaf: torch.Tensor, sizes: Sequence[Sequence[int]] | None, *, read: bool) -> torch.Tensor:
    """An output of the first rows, repeated to the sizes that it has on the sample; zeros if it is not read."""
    if sizes is None or len(sizes) != 1 or len(sizes[0]) != leaf.ndim:
        raise OtherLossError
    if not read:
        return leaf.new_zeros(()).expand(sizes[0])
    result = leaf
    for dim, (size, few) in enumerate(zip(sizes[0], leaf.shape, strict=True)):
        if size != few:
            result = result.index_select(dim, torch.arange(size, device=leaf.device) % few)
    return leaf.clone() if result is leaf else result


def _checked_result(value: Any) -> tuple[torch.Tensor, Metrics, torch.Tensor | None]:
    """The loss, which metrics it has, and its count if it is a sum.

    Raises:
        JobError: the result is not a loss that can be trained.
    """
    scalar, count = checked(value)
    if count is not None:
        check_count(float(scalar.detach()), float(count.detach()))
    metric_values = without_metrics(value)[1]
    metrics = layout(metric_values)
    tensors(metric_values, metrics)
    if not scalar.requires_grad:
        raise JobError(
            "the loss",
            got="a value that no gradient enters",
            expected="a value that depends on a trained parameter through differentiable operations",
            remedy="Look for detach(), item(), argmax or no_grad in the loss or the model, and for frozen parameters.",
        )
    return scalar, metrics, count


def _refuse_buffer_writes(buffers: Mapping[str, torch.Tensor], versions: Mapping[str, int]) -> None:
    for name, buffer in buffers.items():
        if buffer._version != versions[name]:
            raise JobError(
                f"the loss, which writes into buffer {name!r} of the model",
                got="a state that changes outside of the model's forward",
                expected="buffers that the forward changes",
                remedy="Move the write into forward; instead of calling the model a second time in the loss, let its "
                "forward compute and return both results.",
            )


def _call_watched(
    trial: _Trial, outputs: Sequence[torch.Tensor], batch: Batch, watched: Mapping[int, str]
) -> tuple[Any, set[str], torch.Tensor | None]:
    """The loss's result, the tensors it has read, and its number of labels if it is a mean over labels."""
    result = trial.shape.unflatten(dict(enumerate(outputs)))
    numbers = {f"o{i}" for i in trial.shape.numbers}  # unflatten reads them
    with (
        torch.enable_grad(),
        refusing_draws("the loss"),
        refusing_grad("the loss", JobError, _WITHOUT_GRAD),
        LabelWatch() as labels,
        _ReadWatch(watched) as watch,
    ):
        try:
            value = trial.loss(result, batch)
        except RoundelayError:
            raise
        except Exception as error:  # raised by user code
            raise _failed(error, batch) from error
        watch.record_reads(value)
    return value, watch.seen | numbers, labels.terms_of(without_metrics(value)[0])


_WITHOUT_GRAD = (
    "Train this model in plain PyTorch; or replace a gradient penalty by one without second derivatives "
    "(torch.nn.utils.parametrizations.spectral_norm), and balance losses by their values (loss / loss.detach()) or by "
    "learned weights."
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
    trained = [leaf for node in autograd_nodes([scalar]) if (leaf := getattr(node, "variable", None)) is not None]
    trained += [scalar] if scalar.grad_fn is None else []
    for leaf in trained:
        if id(leaf) not in names:
            raise JobError(
                "the loss",
                got=f"a gradient for a tensor of shape {tuple(leaf.shape)} that is not part of the model: a layer or a "
                "weight of the loss itself",
                expected="a loss whose weights belong to the model, so that the optimizer gets them",
                remedy="Make the layer a submodule of the model and call it in forward; or call requires_grad_(False) "
                "on what should not be trained.",
            )
    entered = {names[id(leaf)] for leaf in trained}
    return entered if entered <= seen else entered | {f"b{path}" for path in fields}


def _with_unobserved_reads(call: LossCall, outputs: Sequence[torch.Tensor]) -> LossCall:
    """The loss with all tensors of the batch, if it fails without one whose read was not observed.

    ``torch.autograd.Variable(x)``, for example, reads a tensor without torch's Python functions.

    Args:
        call: the loss, with the reads that were observed.
        outputs: the output leaves.
    """
    own = fields(call.layout)
    own = {path: value for path, value in own.items() if path in call.reads.batch or path in leaves(call.layout)}
    labels = call.reads.labels
    if len(call.reads.batch) == len(own) or (labels is not None and labels.output >= 0):
        return call
    try:
        call(*(outputs[i].detach() for i in call.reads.outputs), *(own[path].clone() for path in call.reads.batch))
    except TypeError:
        return replace(call, reads=replace(call.reads, batch=tuple(own)))
    except Exception:  # raised by user code; it will be raised again where it matters
        return call
    return call


def _failed(error: Exception, batch: Batch) -> JobError:
    if Opaque.__name__ in str(error):
        return JobError(
            f"the loss on the first batch{users_line_of(error)}",
            got=f"{type(error).__name__}: it reads a part of the batch that is neither a tensor nor a number",
            expected="a loss that reads tensors and numbers only: nothing else of a batch is sent to the last stage",
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
