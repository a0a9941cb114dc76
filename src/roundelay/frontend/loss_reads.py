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

from roundelay.errors import JobError, RoundelayError
from roundelay.frontend.batch import Batch, leaves
from roundelay.frontend.export_adapter import Opaque, OutputShape, Seen
from roundelay.frontend.export_checks import autograd_nodes, refusing_draws
from roundelay.frontend.label_counts import Labels, LabelWatch
from roundelay.frontend.loss import LossCall, LossFunction, LossReads, checked, with_tensors
from roundelay.frontend.loss_closure import ClosureSlots, weights_at
from roundelay.frontend.loss_metrics import Metrics, check_count, layout, tensors
from roundelay.frontend.loss_metrics import split as without_metrics
from roundelay.frontend.reachable_state import Change, ReachableState
from roundelay.frontend.source_lines import users_line_of
from roundelay.frontend.trace_guards import refusing_grad


def observe_loss(
    loss: LossFunction, model: torch.nn.Module, seen: Seen, outputs: Sequence[torch.Tensor], batch: Batch
) -> tuple[LossCall, tuple[Change, ...]]:
    """Run the loss on real outputs and record what it reads; a second time if it reads weights of the model.

    Args:
        loss: the user's loss.
        model: the model.
        seen: layout of the model's result, and of what its forward leaves elsewhere.
        outputs: tensor leaves of both.
        batch: the sample micro-batch.

    Returns:
        The loss as a function of what it reads, and the slots that it has changed (and that have been restored).

    Raises:
        JobError: the loss raises, or does not return a differentiable scalar (or a pair of scalars), or reads what a
            stage cannot provide.
    """
    assert seen.shape is not None
    state = ReachableState([("model", model), ("loss", loss)])
    own = dict((*model.named_parameters(), *model.named_buffers()))
    trial = _Trial(loss, model, seen.shape, ClosureSlots(seen.left, (), seen.shape.num_tensors), own, batch)
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
        reads = replace(again, weights=reads.weights)
    return _with_unobserved_reads(LossCall(loss, reads, seen.shape, trial.places, batch), outputs), changed


@dataclass(frozen=True, slots=True)
class _Trial:
    """A loss, and all that a call of it needs except the outputs."""

    loss: LossFunction
    model: torch.nn.Module
    shape: OutputShape
    places: ClosureSlots
    own: Mapping[str, torch.Tensor]
    batch: Batch


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
    outputs = [copies[i] for i in first]
    fields = {path: leaf.clone() for path, leaf in leaves(trial.batch).items()}  # apart from outputs, too
    watched = {id(outputs[i]): f"o{i}" for i in first} | {id(leaf): f"b{path}" for path, leaf in fields.items()}
    watched |= {id(tensor): f"w{name}" for name, tensor in trial.own.items()}
    buffers = {name: tensor for name, tensor in trial.own.items() if not isinstance(tensor, torch.nn.Parameter)}
    before = [leaf._version for leaf in (*outputs, *fields.values())]
    versions = {name: buffer._version for name, buffer in buffers.items()}
    rng_state = torch.random.get_rng_state()
    with trial.places.filled(outputs.__getitem__):
        before_call = ReachableState(state.roots, trial.model)
        value, seen, terms = _call_watched(trial, outputs, with_tensors(trial.batch, fields.__getitem__), watched)
        changed = tuple(before_call.changes())
        before_call.restore()
    _refuse_buffer_writes(buffers, versions)
    scalar, metrics, count = _checked_result(value)
    seen |= _through_gradients(scalar, [entry[i] for i in first], fields, trial.own, seen)
    reads = LossReads(
        outputs=tuple(i for i in range(len(outputs)) if f"o{i}" in seen),
        batch=tuple(path for path in fields if f"b{path}" in seen),
        counts=count is not None,
        writes=before != [leaf._version for leaf in (*outputs, *fields.values())],
        draws=not torch.equal(rng_state, torch.random.get_rng_state()),
        first=first,
        weights=tuple(name for name in trial.own if f"w{name}" in seen),
        metrics=metrics,
        labels=_labels(value, outputs, terms),
    )
    return reads, changed


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


def _labels(value: Any, outputs: Sequence[torch.Tensor], terms: torch.Tensor | None) -> Labels | None:
    """Where the number of labels may come from, if the loss is a cross entropy of its own or the model's."""
    returned = [i for i, output in enumerate(outputs) if without_metrics(value)[0] is output]
    return Labels(terms=float(terms)) if terms is not None else Labels(returned[0]) if returned else None


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
