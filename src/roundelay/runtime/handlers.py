"""The handlers of instructions: one function of torch code for each opcode, in one table."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from roundelay.actor.machine import Run
from roundelay.errors import DivergedError
from roundelay.frontend import RngKey
from roundelay.frontend.loss_metrics import check_count
from roundelay.ir.exchange import GRADIENT_PARTS, USED, WEIGHT_GRADIENT, ExchangePlan, reduce_scatter
from roundelay.ir.graph import COUNT, LABELS, LOSS, METRIC, TERMS
from roundelay.ir.mesh import COPIES
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.program import Channel
from roundelay.ir.stage import Edge
from roundelay.runtime.boxing_parts import Boxing
from roundelay.runtime.collectives import Parts
from roundelay.runtime.grad_norm import GradNorms
from roundelay.runtime.links import Room
from roundelay.runtime.loss_scaler import LossScaler
from roundelay.runtime.loss_seed import lacking_weight, seed
from roundelay.runtime.processes.worker_messages import Report, Reporter
from roundelay.runtime.stage_state import Stage
from roundelay.runtime.state_reports import StateReporter
from roundelay.transport.endpoint import Message, Value

Entry = tuple[MicroBatch, dict[str, torch.Tensor]]
"""A micro-batch as it is read: header, and the values that enter the graph; none if it has no rows."""

Audit = Callable[[str, int, Mapping[str, Any]], None]
"""Called for every forward, backward and update with kind, number, and tensors by name."""


@dataclass(slots=True)
class Context:
    """The state that the handlers of one stage work on.

    Args:
        worker: number of the worker.
        stage: the stage's state.
        seed: seed of the run.
        data: micro-batches, one of each replica at a time, on the worker that reads them.
        read: names of the values that a micro-batch's data consist of.
        rooms: by channel, from a batch to the memory from which it is sent, where that is shared.
        axes: by channel, the axis along which gradients of weights are exchanged.
        boxings: by channel, what is boxed within the stage.
        partials: channels on which sums of some holders are handed on.
        edges: the edge of every channel, and the channel itself.
        report: called with reports to the launcher.
        audit: called with everything that is computed; None for no audit.
        states: takes the stage's state after updates.
        norms: on stage 0, norms of the whole model's gradient and loss scales, if the plan needs them; else None.
        scaled: whether losses are scaled.
        awaits_norm: whether updates wait for the norm of their own batch.
        finite: whether the gradients for the next update are finite: the stage's own, or, if updates wait for the norm,
            those of all stages.
        skipped: number of updates skipped because the gradients were not finite.
        inbox: unread messages by (channel, micro-batch).
        undealt: micro-batches that were read for others and are not given to them yet.
        outbox: messages of the last instruction, by channel.
        values: by micro-batch, what stage 0 has read and not yet forwarded, and what parts of a forward have computed.
        grads: by micro-batch, the gradients of values that parts of a backward have computed.
        shapes: of values that are being boxed, by channel.
        unaudited: gradients from parts of a backward, by micro-batch, until its last part is audited too.
        losses: losses on the last stage, by micro-batch, until their backward.
        counts: by micro-batch, until its backward: terms summed by the loss, or the weight that ignored labels take
            from it.
    """

    worker: int
    stage: Stage
    seed: int
    data: Iterator[Sequence[Entry]]
    read: tuple[str, ...]
    rooms: Mapping[int, Room]
    axes: Mapping[int, str]
    boxings: Mapping[int, Boxing]
    partials: frozenset[int]
    edges: Mapping[int, tuple[Channel, Edge]]
    report: Reporter
    audit: Audit | None
    states: StateReporter
    norms: GradNorms | None
    scaled: bool
    awaits_norm: bool
    finite: bool = True
    skipped: int = 0
    inbox: dict[tuple[int, int], Message] = field(default_factory=dict)
    undealt: deque[Entry] = field(default_factory=deque)
    outbox: dict[int, Message] = field(default_factory=dict)
    values: dict[int, dict[str, Any]] = field(default_factory=dict)
    grads: dict[int, dict[str, torch.Tensor | None]] = field(default_factory=dict)
    shapes: dict[int, torch.Size] = field(default_factory=dict)
    unaudited: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: dict[int, float] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The stage's number."""
        return self.stage.spec.stage


Handler = Callable[[Context, Run], MicroBatch | None]


def do_read(context: Context, run: Run) -> MicroBatch | None:
    """Read the next micro-batch and send the other holders theirs, or take the one that was sent."""
    if run.takes:
        message = context.inbox.pop((run.takes[0][0], run.g))
        header, came = MicroBatch.of(message.header), zip(context.read, message.values, strict=False)
        values = {name: value.to(context.stage.device) for name, value in came if isinstance(value, torch.Tensor)}
    else:
        dealt = next(context.data)
        header, values = dealt[0]
        header = header if context.norms is None else context.norms.attach(header)
        numbers = {"scale_log2": header.scale_log2, "norm_bits": header.norm_bits}
        alike = [(other._replace(**numbers), sent) for other, sent in dealt]
        if not run.gives:
            context.undealt.extend(alike[1:])
        each = (len(run.gives) + 1) // len(dealt)  # workers of the mesh: all get the same
        others = [entry for entry in alike for _ in range(each)][1:] if run.gives else []
        for (channel, _), (other, sent) in zip(run.gives, others, strict=True):
            parts = tuple([_value(sent[name]) for name in context.read]) if sent else ()
            context.outbox[channel] = Message(channel, other.numbers(), parts)
    context.values[header.g] = dict(values)
    return header


def do_deal(context: Context, run: Run) -> MicroBatch | None:
    """Give the next micro-batch to another holder: what was read for it, or what comes now."""
    if not context.undealt:
        context.undealt.extend(next(context.data))
    header, values = context.undealt.popleft()
    parts = tuple([_value(values[name]) for name in context.read]) if values else ()
    for channel, _ in run.gives:
        context.outbox[channel] = Message(channel, header.numbers(), parts)
    return header


def do_forward(context: Context, run: Run) -> MicroBatch | None:
    """Run the forward of a micro-batch, or a part of it; the last part sends its outputs."""
    header, function = _header(run), context.stage.function
    values = context.values.pop(run.g, None) or {}
    for channel, _ in run.takes:
        message = context.inbox.pop((channel, run.g))
        values.update(zip(context.edges[channel][1].values, message.values, strict=True))
    inputs = {name: values[name] for name in context.stage.part_of(run).inputs}
    values.update(context.stage.forward(run, header, inputs, RngKey(context.seed, header.number)))
    if not run.instruction.runs_last:
        context.values[run.g] = values
        return None
    outputs = {name: values[name] for name in function.outputs}
    if context.audit is not None:
        context.audit("forward", run.g, outputs)
    for channel, _ in run.gives:
        sent = [_value(values[name]) for name in context.edges[channel][1].values]
        context.outbox[channel] = Message(channel, header.numbers(), tuple(sent))
    if LOSS in outputs:
        _report_loss(context, run, outputs)
    return None


def do_backward(context: Context, run: Run) -> MicroBatch | None:
    """Run the backward of a micro-batch, or its first half, or a part; the last part sends its inputs' gradients."""
    header, stage = _header(run), context.stage
    grads = context.grads.pop(run.g, {})
    for channel, _ in run.takes:
        message = context.inbox.pop((channel, run.g))
        context.counts[run.g] = float(message.values[0] or 0.0)
        grads.update(zip(context.edges[channel][1].gradients, message.values[1:], strict=True))  # type: ignore[arg-type]
    scale = header.loss_scale
    if run.g in context.losses:
        counts = COUNT in stage.function.outputs
        lacking = 0.0 if counts else context.counts[run.g]
        grads |= seed(header, context.losses.pop(run.g), counts=counts, scale=scale, lacking=lacking)
    entering = {name: grads.pop(name, None) for name in stage.part_of(run).outputs}
    of_inputs, of_parameters = stage.backward(run, entering, scale)
    if context.audit is not None:
        context.unaudited.setdefault(run.g, {}).update(of_parameters)
    grads.update(of_inputs)
    if not run.instruction.runs_first:
        context.grads[run.g] = grads
        return None
    count = context.counts.pop(run.g, 0.0)
    stage.gradients.count(count)
    if context.audit is not None:
        context.unaudited[run.g] |= {f"d {n}": g for n in stage.function.inputs if (g := grads.get(n)) is not None}
        if not stage.halved:
            context.audit("backward", run.g, context.unaudited.pop(run.g))
    for channel, _ in run.gives:
        values = [grads.get(name) for name in context.edges[channel][1].gradients]
        context.outbox[channel] = Message(channel, header.numbers(), (count, *values))
    return None


def do_backward_weight(context: Context, run: Run) -> MicroBatch | None:
    """Run the second half of a micro-batch's backward."""
    of_parameters = context.stage.weight_half(run.g, _header(run).loss_scale)
    if context.audit is not None:
        context.audit("backward", run.g, {**context.unaudited.pop(run.g), **of_parameters})
    return None


def do_box(context: Context, run: Run) -> MicroBatch | None:
    """Start an exchange with other holders of the stage, which may take the messages of the forward that follows."""
    for channel, _ in run.takes:
        values = context.inbox.pop((channel, run.g)).values
        context.values.setdefault(run.g, {}).update(zip(context.edges[channel][1].values, values, strict=False))
    for channel, _ in run.gives:
        axis = context.axes[channel]
        of, _, segment = axis.partition(" ")
        if channel in context.boxings:
            packed = _boxed(context, run, channel)
        elif of in _OF_PARTS:
            packed = _in_room(_OF_PARTS[of][0](context.stage, int(segment or 0), run), _room(context, run))
        else:
            packed = context.stage.gradients.packed(axis, _room(context, run))
        context.outbox[channel] = Message(channel, _header(run).numbers(), packed)
    return None


def do_unbox(context: Context, run: Run) -> MicroBatch | None:
    """Take what an exchange gives in place of what this holder had."""
    for channel, _ in run.takes:
        parts: Parts = context.inbox.pop((channel, run.g)).values  # type: ignore[assignment]
        axis = context.axes[channel]
        of, _, segment = axis.partition(" ")
        if of in _OF_PARTS:
            _OF_PARTS[of][1](context.stage, int(segment or 0), parts)
        elif channel not in context.boxings:
            context.stage.gradients.unpack(axis, parts)
        elif parts:
            boxing = context.boxings[channel]
            held = context.values if boxing.forward else context.grads
            held[run.g][boxing.name] = boxing.unpacked(parts, context.shapes.pop(channel))
    return None


def _boxed(context: Context, run: Run, channel: int) -> Parts:
    """What a holder gives of a value, or of its gradient; nothing if the micro-batch has no rows or it no gradient."""
    boxing = context.boxings[channel]
    value = (context.values if boxing.forward else context.grads).get(run.g, {}).get(boxing.name)
    if value is None:
        return ()
    context.shapes[channel] = value.shape
    return boxing.packed(value)


def do_sum(context: Context, run: Run) -> MicroBatch | None:
    """Add the gradients of a batch to those of the holders before this one, and hand the sum on."""
    gradients = context.stage.gradients
    before, gradients.carried = gradients.carried, ()
    for channel, _ in run.takes:
        before = context.inbox.pop((channel, run.g)).values  # type: ignore[assignment]
    parts = gradients.added(before, _room(context, run))
    if not any(channel in context.partials for channel, _ in run.gives):
        gradients.carried = parts
    _hand_on(context, run, parts)
    return None


def do_share(context: Context, run: Run) -> MicroBatch | None:
    """Take the total for the next update, from this holder's own sum or from another, and pass it on."""
    gradients = context.stage.gradients
    parts, gradients.carried = gradients.carried, ()
    for channel, _ in run.takes:
        parts = context.inbox.pop((channel, run.g)).values  # type: ignore[assignment]
    gradients.total(parts)
    _hand_on(context, run, parts)
    return None


def do_hold(context: Context, run: Run) -> MicroBatch | None:
    """Take the state of the stage."""
    for channel, _ in run.takes:
        context.stage.take_state(run.version, context.inbox.pop((channel, run.g)).values)
    return None


def do_pass(context: Context, run: Run) -> MicroBatch | None:
    """Hand on the state of the stage."""
    for channel, _ in run.gives:
        context.outbox[channel] = Message(channel, (run.g, run.version), context.stage.pass_state(run.version))
    return None


def _room(context: Context, run: Run) -> Parts | None:
    """The shared memory in which gradients are given; None if there is none."""
    rooms = [context.rooms[channel] for channel, _ in run.gives if channel in context.rooms]
    return rooms[0](_header(run).batch) if rooms else None


def _in_room(parts: Parts, room: Parts | None) -> Parts:
    """What is given, in shared memory if there is some for it."""
    if room is None or not parts:
        return parts
    placed = tuple([out[: len(part)] for part, out in zip(parts, room, strict=True)])
    for part, out in zip(parts, placed, strict=True):
        out.copy_(part)
    return placed


def _hand_on(context: Context, run: Run, parts: Parts) -> None:
    """Send sums, which nobody writes to, to one holder or several."""
    for channel, _ in run.gives:
        context.outbox[channel] = Message(channel, _header(run).numbers(), parts)


def do_grad_norm_sq(context: Context, run: Run) -> MicroBatch | None:
    """Send the squared norm of the stage's gradients to stage 0, which adds up those of all stages."""
    header, later = _header(run), 0.0
    for channel, _ in reversed(run.takes):  # from the last stage to the first
        later += float(context.inbox.pop((channel, run.g)).values[0] or 0.0)
    own = context.stage.gradients.square()
    context.finite = math.isfinite(own)
    if context.norms is not None:
        context.norms.finished(header, later + own)
        _report_skipped(context, context.norms.scaler, header)
    for channel, _ in run.gives:
        context.outbox[channel] = Message(channel, header.numbers(), (later + own,))
    return None


def do_update(context: Context, run: Run) -> MicroBatch | None:
    """Run one optimizer step, and hand over the stage's state if it is needed."""
    header = _header(run)
    norm = _clipping_norm(context, run, header)
    if context.scaled and not context.finite:
        context.stage.gradients.drop()
        context.skipped += 1
    context.stage.update(run.version, norm, saved=bool(header.saved))
    if context.audit is not None:
        copies = {name: weight.detach().clone() for name, weight in context.stage.owned.weights.items()}
        context.audit("update", header.batch, copies)  # memory that numpy has seen cannot be freed by a state's way
    context.states.hand_over(context.stage, header, context.norms)
    return None


GATHERED, DUE, COPIED, USED_WEIGHTS, MADE = "*weights", "*due", "*copied", "*segment", "*gradients"
"""In place of an exchange's axis, and unlike any: updated weights; gradients of which each replica updates a part; such
parts, among replicas that have the same; a segment's weights before use, and its gradients of a micro-batch, with its
number behind."""

_OF_PARTS: dict[str, tuple[Callable[[Stage, int, Run], Parts], Callable[[Stage, int, Parts], None]]] = {
    GATHERED: (lambda stage, *_: stage.owned.packed(), lambda stage, _, parts: stage.owned.gather(parts)),
    DUE: (lambda stage, *_: stage.gradients.scattered(), lambda stage, _, parts: stage.gradients.reduced(parts)),
    COPIED: (lambda stage, *_: stage.gradients.copied(), lambda stage, _, parts: stage.gradients.take_copied(parts)),
    USED_WEIGHTS: (
        lambda stage, i, run: stage.owned.packed_segment(i, stage.weights(run)),
        lambda stage, i, parts: stage.owned.use(i, parts),
    ),
    MADE: (
        lambda stage, i, run: stage.gradients.scattered_parts(i, run.g),
        lambda stage, i, parts: stage.gradients.add_parts(i, parts),
    ),
}
"""What a stage gives of that, by the number of a segment, and what it does with what it gets."""


def axis_of(exchange: ExchangePlan) -> str:
    """The axis of an exchange, or what takes its place."""
    if exchange.kind in (*USED, GRADIENT_PARTS):
        return f"{MADE if exchange.kind == GRADIENT_PARTS else USED_WEIGHTS} {exchange.segment}"
    if exchange.kind == "weight":
        return GATHERED
    if exchange.axis == COPIES:
        return COPIED
    scattered = exchange.kind == WEIGHT_GRADIENT and exchange.phases == reduce_scatter()
    return DUE if scattered else exchange.axis


HANDLERS: dict[str, Handler] = {
    "read": do_read,
    "forward": do_forward,
    "backward": do_backward,
    "backward-weight": do_backward_weight,
    "grad-norm-sq": do_grad_norm_sq,
    "box": do_box,
    "unbox": do_unbox,
    "deal": do_deal,
    "sum": do_sum,
    "share": do_share,
    "hold": do_hold,
    "pass": do_pass,
    "update": do_update,
}

PASSED_OVER = ("forward", "backward", "backward-weight")
"""What is not computed for a micro-batch without rows."""


def pass_over(context: Context, run: Run) -> MicroBatch | None:
    """Pass on a micro-batch without rows: its messages are empty."""
    for channel, _ in run.takes:
        del context.inbox[channel, run.g]
    context.values.pop(run.g, None)
    context.stage.pass_over(run, _header(run))
    for channel, _ in run.gives:
        context.outbox[channel] = Message(channel, _header(run).numbers(), ())
    return None


def _header(run: Run) -> MicroBatch:
    assert run.header is not None
    return run.header


def _report_skipped(context: Context, scaler: LossScaler | None, header: MicroBatch) -> None:
    """Report on stage 0 that a batch's gradients are not finite."""
    if scaler is not None and scaler.in_a_row:
        data = {"update": header.batch, "in_a_row": scaler.in_a_row, "scale": scaler.newest}
        context.report(Report("skipped", context.worker, data))


def _clipping_norm(context: Context, run: Run, header: MicroBatch) -> float | None:
    """Return the norm of the whole model's gradient by which this update is clipped; None if it is not."""
    whole = _whole_norm(context, run, header) if context.awaits_norm else None
    return {"previous": header.grad_norm, "global": whole}.get(context.stage.clip.by)


def _whole_norm(context: Context, run: Run, header: MicroBatch) -> float:
    """Return the norm of the whole model's gradient of this update's batch, which stage 0 sends to the others."""
    norm: Any = 0.0 if context.norms is None else context.norms.whole
    for channel, _ in run.takes:
        norm = context.inbox.pop((channel, run.g)).values[0]
    for channel, _ in run.gives:
        context.outbox[channel] = Message(channel, header.numbers(), (norm,))
    context.finite = math.isfinite(norm)
    return norm  # type: ignore[no-any-return]


def _value(value: Any) -> Value:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def _report_loss(context: Context, run: Run, outputs: Mapping[str, Any]) -> None:
    header, numbers = _header(run), _numbers(outputs)
    loss, count = numbers[LOSS], numbers.get(COUNT, 0.0)
    if not math.isfinite(loss):
        raise DivergedError(
            f"the loss of stage {context.number}, micro-batch {header.number} (update {header.batch})",
            got=str(loss),
            expected="a finite number",
            remedy=_not_finite(header, loss, run.version),
        )
    if COUNT in outputs:
        check_count(loss, count)
    context.losses[header.g] = outputs[LOSS]
    lacking = lacking_weight(header, numbers[LABELS], context.stage.labels_per_row) if LABELS in numbers else 0.0
    context.counts[header.g] = count or lacking
    data: dict[str, Any] = {"g": header.number, "loss": loss, "count": count, "header": header.numbers()}
    if context.stage.part:  # the first worker of the mesh reports it
        return
    if lacking:
        data["lacking"] = lacking
    if context.scaled:
        data["scale"] = header.loss_scale
    if metrics := {name.removeprefix(METRIC): value for name, value in numbers.items() if name.startswith(METRIC)}:
        data["metrics"] = {n: (value, numbers.get(TERMS + n, 0.0)) for n, value in metrics.items()}
    context.report(Report("loss", context.worker, data))


def _numbers(outputs: Mapping[str, Any]) -> dict[str, float]:
    """What the loss has returned, with its metrics, as numbers; a device is waited for once."""
    returned = {n: v for n, v in outputs.items() if n in (LOSS, COUNT, LABELS) or n.startswith((METRIC, TERMS))}
    device = outputs[LOSS].device
    if device.type == "cpu":
        return {name: float(value) for name, value in returned.items()}
    doubles = [value.detach().reshape(()).to(device, torch.float64) for value in returned.values()]
    return dict(zip(returned, torch.stack(doubles).tolist(), strict=True))


def _not_finite(header: MicroBatch, loss: float, updates: int) -> str:
    """Return the remedy for a loss that is not finite after this number of updates."""
    remedy = "Lower the learning rate, or look at this batch."
    if not updates:
        remedy = (
            "No update was made before it, so the cause is in the data or in the initial model: look for numbers in "
            "this batch that are not finite, and for a log, a root or a division by 0 in model and loss."
        )
    if not header.whole and math.isnan(loss):
        remedy += (
            " This is one of several micro-batches of a batch: a mean over no elements is 0/0; let the loss "
            "return (sum, count), or give --micro-batches 1."
        )
    return remedy
