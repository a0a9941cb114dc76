"""A captured model: its logical graph, and the functions of any stage cut from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.fx

from roundelay.errors import JobError, RoundelayError, counted
from roundelay.frontend.activation_checkpointing import noting_checkpoints
from roundelay.frontend.batch import SPARSE, Batch, fresh, layout, leaves, num_rows, replace, twice
from roundelay.frontend.compiled_segment import CompiledSegment
from roundelay.frontend.describe_graph import describe_graph
from roundelay.frontend.export import Exported, Role, export, first_of_storages, refuse_failing
from roundelay.frontend.export_adapter import CallShape, Inputs, Unready, default_inputs
from roundelay.frontend.external_mutation import ExternalMutations
from roundelay.frontend.graph_outputs import move_buffer_writes_up, spans_of_output_buffers, wrap_outputs
from roundelay.frontend.graph_passes import (
    DRAW,
    Cleaned,
    StateWritten,
    clean,
    key_draws,
    prune,
    run_nodes,
    write_error,
)
from roundelay.frontend.keyed_rng import RngKey, keyed_call
from roundelay.frontend.label_counts import add_count
from roundelay.frontend.loss import LossCall, LossFunction, record, with_unseen
from roundelay.frontend.model_call import alone_if_drawing, called, changes_on, first_forward, train
from roundelay.frontend.precision import FULL, Lowered, autocast, not_in
from roundelay.frontend.reachable_state import Change, ReachableState
from roundelay.frontend.remat_segment import RematSegment
from roundelay.frontend.retarget_device import CPU, retarget
from roundelay.frontend.segment import Call, Segment
from roundelay.frontend.side_channels import fields_of, refuse_left, refuse_written
from roundelay.frontend.source_lines import line_of_change
from roundelay.frontend.split_backward import SplitSegment, split
from roundelay.frontend.stage_function import Mode, StageFunction
from roundelay.ir.graph import BATCH, COUNT, INPUT, LABELS, LOSS, WEIGHT, Graph
from roundelay.ir.stage import SegmentSpec, StageSpec


@dataclass(frozen=True, slots=True)
class Captured:
    """A model, its loss and its call, ready to be cut.

    Args:
        model: the person's own module; its weights are never changed by capture or by stages.
        graph: what the planner and the lowering see.
        settings: what the model was captured with, and must go on with.
        mode: the backward mode that its stages are compiled for; None: they are not.
        precision: in which its stages compute, and its graph's values are counted.
        checkpointed: modules that its own code checkpoints, by path.
        sharing: parameters that lie in the memory of another, by that one's name.
        changed: slots that the forward has changed, buffers apart, and those that the loss has.
        writes: paths of tensors of the batch that ``inputs`` writes into, and of those that the forward does.
    """

    model: torch.nn.Module
    graph: Graph
    _exported: Exported
    _cleaned: Cleaned
    _loss: LossCall
    _inputs: Inputs
    _call: CallShape
    _describe: Callable[[], Graph]
    _pieces: dict[tuple[SegmentSpec, torch.device], torch.fx.GraphModule] = field(default_factory=dict)
    _fitting: set[tuple[torch.Size, ...]] = field(default_factory=set)
    _compiled: dict[tuple[SegmentSpec, torch.device, str, bool], CompiledSegment] = field(default_factory=dict)
    settings: ExternalMutations = field(kw_only=True)
    mode: Mode | None = None
    precision: str = FULL
    checkpointed: tuple[str, ...] = ()
    sharing: dict[str, tuple[torch.nn.Parameter, ...]] = field(default_factory=dict)
    changed: tuple[tuple[Change, ...], tuple[Change, ...]] = ((), ())
    writes: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def __repr__(self) -> str:
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        operations, cuts = counted(len(self.graph.ops), "operation"), counted(len(self.graph.cuts), "place")
        return f"Captured({type(self.model).__name__}: {operations}, {cuts} to cut, {counted(weights, 'weight')})"

    def compiling(self, mode: Mode | None) -> Captured:
        """The same model, whose stages are compiled for a backward mode, or not; what is compiled is shared."""
        return changed(self, mode=mode)

    def lowering(self, precision: str) -> Captured:
        """The same model computing in a precision, ``fp32`` or a lower one: its values have other dtypes and bytes.

        Raises:
            CaptureError: an operation cannot be computed in it.
        """
        if precision == self.precision:
            return self
        try:
            with torch.random.fork_rng(devices=[]), autocast(precision, CPU):
                return changed(self, graph=self._describe(), precision=precision)
        except Exception as error:  # whatever an operation says of dtypes that it does not take
            raise not_in(precision, error) from error

    def values(self, micro_batch: Batch) -> dict[str, torch.Tensor]:
        """The graph's inputs and the batch tensors that the loss reads, by value name, from one micro-batch.

        Raises:
            JobError: the call differs from the sample's in more than its tensors; or the model is not as it was.
        """
        self.settings.check()
        if self.graph.one_row and num_rows(micro_batch) == 1:
            raise JobError(
                "a batch of one row",
                got=self.graph.one_row,
                expected="at least two rows, of which BatchNorm takes its statistics in training mode",
                remedy="Leave a last batch of one row out: DataLoader(..., drop_last=True), or another batch_size.",
            )
        own = self._own(micro_batch)
        tensors, call = CallShape.flatten(*called(self._inputs, own))
        if (differing := call.differing(self._call)) is not None:
            raise _varies(*differing)
        if not call.matches(self._call) or len(tensors) != len(self.graph.inputs):
            raise JobError(
                "the call of the model",
                got=f"{len(tensors)} tensors in the layout {call.spec} with constants {list(call.constants.values())}",
                expected=f"{len(self.graph.inputs)} tensors in the layout of the first batch, {self._call.spec}, "
                f"with constants {list(self._call.constants.values())}",
                remedy="Call the model the same way for every batch; only tensors may differ.",
            )
        self._check_sizes(tensors)
        named = {INPUT + str(i): tensor for i, tensor in enumerate(tensors)}
        fields = leaves(own)
        missing = [name.removeprefix(BATCH) for name in self.graph.batch if name.removeprefix(BATCH) not in fields]
        if missing:
            raise JobError(
                "the batch",
                got=f"no tensor {' and no '.join(map(repr, missing))}, only {', '.join(map(repr, fields))}",
                expected="every tensor that the loss read on the first batch",
                remedy="Let batches(epoch) yield the same fields in every batch.",
            )
        if (found := layout(own)) != self._loss.shown:
            raise JobError(
                "the batch",
                got=f"{_shown(found)}",
                expected=f"{_shown(self._loss.shown)}, as in the first batch: keys, lengths of lists, what is None",
                remedy="Let batches(epoch) yield the same fields in every batch, with tensors for what varies.",
            )
        return named | {name: fields[name.removeprefix(BATCH)] for name in self.graph.batch}

    def _own(self, micro_batch: Batch) -> Batch:
        """What ``inputs`` may change: the batch itself may be asked for its values again."""
        return replace(micro_batch, lambda _, leaf: leaf.clone()) if self.writes[0] else fresh(micro_batch)

    def check_numbers(self, micro_batch: Batch) -> None:
        """Refuse a micro-batch whose call differs in a number or another constant, or in sizes that do not fit.

        All else is found in the run.

        Raises:
            JobError: it does.
        """
        try:
            tensors, call = CallShape.flatten(*called(self._inputs, self._own(micro_batch)))
        except Exception:  # the person's own code
            return
        if (differing := call.differing(self._call)) is not None:
            raise _varies(*differing)
        if call.matches(self._call) and len(tensors) == len(self.graph.inputs):
            self._check_sizes(tensors)

    def _check_sizes(self, tensors: Sequence[torch.Tensor]) -> None:
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in self._fitting:
            self._check_new_sizes(tensors)
            self._fitting.add(shapes)

    def _check_new_sizes(self, tensors: Sequence[torch.Tensor]) -> None:
        for i, (tensor, sizes) in enumerate(zip(tensors, self._exported.sizes, strict=True)):
            fits = tensor.ndim == len(sizes) and all(
                s is None or s == n for s, n in zip(sizes, tensor.shape, strict=True)
            )
            if not fits:
                raise JobError(
                    f"tensor {i} of the model's call",
                    got=f"sizes {tuple(tensor.shape)}",
                    expected=f"sizes {tuple('any' if s is None else s for s in sizes)}, as the model was captured",
                    remedy=_fixed(sizes, tensor.shape),
                )
        try:
            self._exported.guard(tensors)
        except AssertionError as error:
            raise JobError(
                "the tensors of the model's call",
                got=f"sizes {', '.join(str(tuple(tensor.shape)) for tensor in tensors)}: {error}",
                expected="sizes for which the model takes the same way as for the first batch",
                remedy="The model branches on sizes while it is captured: make the batches alike in what it asks for.",
            ) from error

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Every parameter of the graph by its first name; the person's own objects."""
        roles = [r for r in self._exported.roles.values() if r.kind == "parameter"]
        return {r.name: r.tensor for r in roles if isinstance(r.tensor, torch.nn.Parameter)}

    def laid(self, name: str, weight: torch.Tensor) -> None:
        """Have the model's parameter of this name lie in that memory, and all parameters that share its own."""
        own = self.parameters()[name]
        own.data = weight
        for other in self.sharing.get(name, ()):
            other.data = own.data

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every buffer of the graph by name; the person's own objects."""
        return {r.name: r.tensor for r in self._exported.roles.values() if r.kind == "buffer" and r.tensor is not None}

    @property
    def loss_draws(self) -> bool:
        """Whether the loss draws random numbers."""
        return self._loss.reads.draws

    def mutated_buffers(self) -> frozenset[str]:
        """Names of the buffers that a forward changes."""
        return self._cleaned.mutated

    def stage(self, spec: StageSpec, device: torch.device = CPU, *, halved: bool = False) -> StageFunction:
        """The functions of one stage, for weights, buffers and inputs that lie on ``device``.

        Args:
            spec: which operations.
            device: where they run.
            halved: its backward leaves the weights' half for later, as :mod:`roundelay.frontend.split_backward` says.
        """
        segments = [self._segment(part, device) for part in spec.segments]
        if halved:
            segments = [
                changed(segment, halves=self._halves(part, device, segment))
                for part, segment in zip(spec.segments, segments, strict=True)
            ]
        segments = [RematSegment.of(part) if i in spec.recomputed else part for i, part in enumerate(segments)]
        outputs = tuple(name for name in spec.outputs if not name.startswith((INPUT, BATCH)))  # those the reader sends
        if spec.loss_reads:
            segments.append(self._loss_segment(spec, device))
            outputs = (*outputs, *self._loss_outputs())
        return StageFunction(tuple(segments), spec.inputs if spec.stage else self._stage_zero_inputs(spec), outputs)

    def walk(self, micro_batch: Batch, each: Callable[[int, Callable[[], Any]], Any]) -> torch.Tensor:
        """Run the whole model operation by operation, with a tape, on copies of the buffers; returns the loss.

        Args:
            micro_batch: what to run it on.
            each: called with every operation's number and a function that runs it; returns what that returns. The loss
                is the last one.
        """
        values = self.values(micro_batch)
        order = {op.name: i for i, op in enumerate(self.graph.ops)}

        def call(node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
            target: Any = node.target
            return each(order[node.name], partial(target, *args, **kwargs))

        with torch.enable_grad(), autocast(self.precision, CPU):
            made, _ = run_nodes(self._exported, [values[name] for name in self.graph.inputs], call=call)
            values |= {name: made[name] for name in self.graph.outputs if name in order}
            reads = [values[name] for name in (*self.graph.outputs, *self.graph.batch)]
            result: list[torch.Tensor] = each(len(order), partial(self._loss_call(), *reads, RngKey(0, 0)))
        return result[0]

    def _stage_zero_inputs(self, spec: StageSpec) -> tuple[str, ...]:
        """Stage 0 reads the data: what its own segments read of it, and nothing of what it only passes on."""
        made = (*self.graph.inputs, *self.graph.batch)
        read = {name for segment in spec.segments for name in segment.inputs} | set(spec.loss_reads)
        return tuple(name for name in made if name in read)

    def _segment(self, spec: SegmentSpec, device: torch.device) -> Segment:
        if (spec, device) not in self._pieces:
            self._pieces[spec, device] = retarget(_piece(self._exported, self.graph, spec), device)
        trainable = frozenset(n for n in spec.parameters if self.graph.parameters[n].trainable)
        wanted = frozenset(n for n in spec.inputs if self._wants_gradient(n))
        mutated = frozenset(n for n in spec.buffers if n in self._cleaned.mutated)
        return Segment(spec, self._call_of(spec, device), trainable, wanted, mutated, casts=self.precision != FULL)

    def _lowered(self, call: Call, device: torch.device) -> Call:
        return call if self.precision == FULL else Lowered(call, self.precision, device)

    def _halves(self, spec: SegmentSpec, device: torch.device, segment: Segment) -> SplitSegment:
        made = split(self._pieces[spec, device], spec.parameters, segment.trainable, lowered=self.precision != FULL)
        return changed(made, call=self._lowered(made.call, device))

    def _call_of(self, spec: SegmentSpec, device: torch.device) -> Call:
        piece = self._pieces[spec, device]
        plain = self._lowered(piece.forward, device)
        if self.mode is None:
            return plain
        key = (spec, device, self.precision, saves_all := self.mode == "mixed")
        if key not in self._compiled:
            self._compiled[key] = CompiledSegment(
                piece, plain, partial(autocast, self.precision, device), saves_all=saves_all
            )
        return self._compiled[key]

    def _loss_segment(self, spec: StageSpec, device: torch.device) -> Segment:
        end = len(self.graph.ops)
        part = SegmentSpec(end, end, (), (), spec.loss_reads, self._loss_outputs())
        wanted = frozenset(n for n in spec.loss_reads if self._wants_gradient(n))
        return Segment(part, self._lowered(self._loss_call(device), device), frozenset(), wanted, frozenset())

    def _loss_outputs(self) -> tuple[str, ...]:
        beside = COUNT if self.graph.loss_counts else LABELS if self.graph.labels_per_row else None
        return (LOSS, *([beside] if beside else []), *self.graph.metrics)

    def _loss_call(self, device: torch.device = CPU) -> Callable[..., list[torch.Tensor]]:
        return partial(self._keyed_loss, device) if self._loss.reads.draws else self._plain_loss

    def _plain_loss(self, *values: Any) -> list[torch.Tensor]:
        return self._loss(*values[:-1])

    def _keyed_loss(self, device: torch.device, *values: Any) -> list[torch.Tensor]:
        """A loss that draws random numbers is the random operation behind the last one of the graph."""
        position = sum(op.draws >= 0 for op in self.graph.ops)
        made: list[torch.Tensor] = keyed_call(self._loss, *values[:-1], draw=values[-1], position=position, on=device)
        return made

    def _wants_gradient(self, name: str) -> bool:
        if name.startswith(WEIGHT):
            return self.graph.parameters[name.removeprefix(WEIGHT)].trainable
        if name.startswith((INPUT, BATCH)):
            return False
        return self.graph.values[name].requires_grad


def capture(model: torch.nn.Module, loss: LossFunction, batch: Batch, inputs: Inputs | None = None) -> Captured:
    """Capture a model in training mode, called as it would be called on ``batch``.

    Args:
        model: any exportable module; it is left as it was, in training mode.
        loss: (outputs, batch) -> scalar, or (sum, count).
        batch: a sample micro-batch; one row is repeated, since export fixes sizes of one.
        inputs: batch -> (args, kwargs).

    Raises:
        CaptureError: the model cannot be exported.
        JobError: batch, call or loss cannot be used.
    """
    train(model)
    doubled = num_rows(batch) == 1
    sample = replace(twice(batch) if doubled else batch, lambda _, leaf: _own(leaf))
    given = _given(model, loss, inputs, sample)
    tensors, call = given.tensors, given.call
    with torch.random.fork_rng(devices=[]):
        with noting_checkpoints(model) as checkpointed:
            exported = _exported(model, loss, call, tensors)
        move_buffer_writes_up(exported)
        cleaned = _cleaned(model, exported, call, tensors)
        nodes = wrap_outputs(exported)
        with torch.enable_grad():
            made, _ = run_nodes(exported, tensors)
        looked = record(loss, model, exported.seen, [made[node.name] for node in nodes], sample)
        outputs = [made[node.name] for node in nodes]
        loss_call = with_unseen(LossCall(loss, looked.reads, exported.output_shape, looked.places, sample), outputs)
        reads = loss_call.reads
        by_forward = [path for i in cleaned.inputs if (path := given.fields[i]) is not None]
        refuse_written(by_forward, reads.batch, leaves(batch) if not doubled else leaves(sample))
        nodes = wrap_outputs(exported, reads.weights)
        together = spans_of_output_buffers(exported, cleaned.mutated)
        cleaned = changed(cleaned, uncuttable=(*cleaned.uncuttable, *together))
        terms = (
            None if reads.labels is None or reads.labels.output < 0 else add_count(exported, nodes[reads.labels.output])
        )
        if reads.labels is not None and reads.labels.output >= 0 and terms is None:
            reads = changed(reads, labels=None)
            loss_call = changed(loss_call, reads=reads)
        results = [*(nodes[i] for i in reads.outputs), *([] if terms is None else [terms])]
        prune(exported, results, cleaned.writers)
        draws = key_draws(exported)
        describes = partial(
            describe_graph, exported, cleaned, draws, reads, (tensors, leaves(sample), num_rows(sample))
        )
        graph = describes()
    apart = {change.slot.place for change in (*exported.seen.changed, *looked.changed)}
    return Captured(
        model,
        graph,
        exported,
        cleaned,
        loss_call,
        given.how,
        call,
        describes,
        settings=ExternalMutations(model, given.kept | apart, given.functions),
        writes=(given.written, tuple(by_forward)),
        checkpointed=tuple(checkpointed),
        sharing=_sharing(model),
        changed=(exported.seen.changed, looked.changed),
    )


@dataclass(frozen=True, slots=True)
class _Given:
    """How the model is called for the sample.

    Args:
        how: the person's ``inputs``.
        tensors: of the call.
        call: its layout.
        fields: for each of the tensors the field of the batch in whose memory it lies.
        written: fields of the batch that ``inputs`` writes into.
        kept: places of slots that it changes.
        functions: the person's, by names for people.
    """

    how: Inputs
    tensors: list[torch.Tensor]
    call: CallShape
    fields: list[str | None]
    written: tuple[str, ...]
    kept: frozenset[tuple[int, str, Any]]
    functions: list[tuple[str, Any]]


def _given(model: torch.nn.Module, loss: LossFunction, inputs: Inputs | None, sample: Batch) -> _Given:
    functions = [("loss", loss), *([] if inputs is None else [("inputs", inputs)])]
    world, before = ReachableState(functions, model), leaves(sample)
    versions = [leaf._version for leaf in before.values()]
    how, made = alone_if_drawing(inputs or default_inputs, sample)
    written = [path for (path, leaf), v in zip(before.items(), versions, strict=True) if leaf._version != v]
    changes = world.changes()
    refuse_left(changes, model, loss)
    tensors, call = CallShape.flatten(*made)
    _check_call(tensors, call)
    kept = frozenset(change.slot.place for change in changes)
    return _Given(how, tensors, call, fields_of(tensors, leaves(sample)), tuple(written), kept, functions)


def _exported(model: torch.nn.Module, loss: LossFunction, call: CallShape, tensors: list[torch.Tensor]) -> Exported:
    """Export the model; one that sets buffers in its first forward has them set by one before.

    Raises:
        CaptureError: such a buffer changes in later forwards, too, so that what it was before the first is not known.
    """
    roots = [("model", model), ("loss", loss)]
    try:
        return export(model, call, tensors, roots)
    except Unready:
        made = first_forward(model, call, tensors, roots)
    exported = export(model, call, tensors, roots)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        values, _ = run_nodes(exported, tensors)
    for name, role in exported.roles.items():
        if role.tensor is not None and id(role.tensor) in made and not torch.equal(role.tensor, values[name]):
            raise changes_on(role.name)
    return exported


def _sharing(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Parameter, ...]]:
    found: dict[str, tuple[torch.nn.Parameter, ...]] = {}
    for other, name in first_of_storages(model).items():
        found[name] = (*found.get(name, ()), model.get_parameter(other))
    return found


def _cleaned(model: torch.nn.Module, exported: Exported, call: CallShape, tensors: list[torch.Tensor]) -> Cleaned:
    """Clean the graph: the first time that its operations meet values, of which export saw no more than shapes."""
    try:
        return clean(exported, tensors)
    except RoundelayError:
        raise
    except StateWritten as error:
        raise write_error(error.role, _line_of_write(model, error.role, call, tensors)) from None
    except Exception:  # whatever an operation says of values, or of this processor
        refuse_failing(model, call, tensors)
        raise


def _line_of_write(model: torch.nn.Module, role: Role, call: CallShape, tensors: list[torch.Tensor]) -> str:
    """Where the forward writes into one of the model's tensors; all have their values back."""
    world = ReachableState([("model", model)], torch.nn.Module())
    args, kwargs = call.unflatten([tensor.clone() for tensor in tensors])
    slots = [slot for slot in world.slots.values() if slot.kind == "values" and slot.holder is role.tensor]
    try:
        changes = [Change(slot, slot.read(), None) for slot in slots]
        return next((line_of_change(change, lambda: model(*args, **kwargs)) for change in changes), "")
    finally:
        world.restore()


def _fixed(sizes: Sequence[int | None], got: Sequence[int]) -> str:
    """What to do about a size that is not the one with which the model was captured."""
    if len(sizes) == len(got) and any(s == 1 != n for s, n in zip(sizes, got, strict=True)):
        return "Capture fixes a size of one: let a batch with more come first, or pad every batch to the same size."
    if len(sizes) == len(got) and sizes[0] not in (None, got[0]):
        return (
            "The model fixes the number of rows while it is captured (len(x) is a number, x.size(0) may vary; a loss "
            "between the rows of a batch): leave a short last batch out by drop_last=True, or use x.size(0)."
        )
    return (
        "The model fixes these sizes while it is captured (a loop over time steps fixes its length; nn.LSTM, nn.GRU "
        "and nn.RNN do not): pad every batch to the same size."
    )


def _own(leaf: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own: of a window into another tensor, export would ask of every batch that it be one."""
    return leaf.clone(memory_format=torch.contiguous_format)


def _check_call(tensors: Sequence[torch.Tensor], call: CallShape) -> None:
    """Refuse what could not be the same for every batch, or not be sent.

    Raises:
        JobError: the model is called with an array, or with a sparse tensor.
    """
    for place, leaf in call.constants.items():
        if isinstance(leaf, (np.ndarray, np.generic)):
            raise JobError(
                f"the call of the model, {call.named(place)}",
                got=f"a NumPy {type(leaf).__name__}",
                expected="tensors: all else is taken for the same at every call",
                remedy="Let batches(epoch) yield torch.from_numpy(array), or torch.tensor(number), or convert it in "
                'Job(inputs=...): inputs=lambda batch: ((torch.from_numpy(batch["x"]),), {}).',
            )
    for i, tensor in enumerate(tensors):
        if tensor.layout in SPARSE:
            raise JobError(
                f"tensor {i} of the model's call",
                got=f"one of layout {str(tensor.layout).removeprefix('torch.')}",
                expected="tensors that hold every value",
                remedy="Call the model with x.to_dense(), or with its indices and values as tensors of their own.",
            )


def _varies(where: str, now: Any, first: Any) -> JobError:
    return JobError(
        f"the call of the model, {where}",
        got=f"{now!r:.80}",
        expected=f"{first!r:.80} as for the first batch: what is no tensor must be the same at every call",
        remedy="Give a number that varies as a tensor, in batches(epoch) or in Job(inputs=...): torch.tensor(number)."
        if isinstance(first, (int, float))
        else "Leave what the model does not read out of its call, by Job(inputs=...); give what chooses a way through "
        "it as a tensor of numbers, for example one-hot, and weigh the ways by it.",
    )


def _shown(found: Any) -> str:
    """A layout for people: where tensors are, where None is."""
    if isinstance(found, dict):
        return "{" + ", ".join(f"{key!r}: {_shown(value)}" for key, value in found.items()) + "}"
    if isinstance(found, list):
        return f"a sequence of {len(found)}: " + ", ".join(map(_shown, found))
    return "no tensor" if found is ... else "None" if found else "a tensor"


def _piece(exported: Exported, graph: Graph, spec: SegmentSpec) -> torch.fx.GraphModule:
    """Operations ``start`` to ``stop`` as a function of parameters, buffers, inputs and the draw key."""
    piece = torch.fx.Graph()
    owner = torch.nn.Module()
    inner = {op.name for op in graph.ops[spec.start : spec.stop]}
    nodes = {node.name: node for node in exported.module.graph.nodes}
    places: dict[tuple[str, str], str] = {(r.kind, r.name): name for name, r in reversed(exported.roles.items())}
    env: dict[str, torch.fx.Node] = {}
    sources = [("parameter", n) for n in spec.parameters] + [("buffer", n) for n in spec.buffers]
    read = [places[source] for source in sources]
    read += [name if name in nodes else places[_source(name)] for name in spec.inputs]
    for place in read:  # called as in the whole graph: a parameter's own name may be that of an operation
        env[place] = piece.placeholder(place)
        env[place].meta = dict(nodes[place].meta)  # shapes, by which operations are split
    env[DRAW] = piece.placeholder(DRAW)
    first_place = {id(exported.roles[p].tensor): p for p in env if p in exported.roles}

    def find(node: torch.fx.Node) -> torch.fx.Node:
        if node.name in env:
            return env[node.name]
        role = exported.roles.get(node.name)
        if role is not None and role.kind in ("parameter", "buffer"):  # another name of a tied tensor
            return env[first_place[id(role.tensor)]]
        name = str(node.target) if role is None else node.name
        setattr(owner, name, getattr(exported.module, name) if role is None else role.tensor)
        env[node.name] = piece.get_attr(name)
        return env[node.name]

    for op in graph.ops[spec.start : spec.stop]:
        env[op.name] = piece.node_copy(nodes[op.name], find)
    results = []
    for name in spec.outputs:
        if name in inner:
            results.append(env[name])
        else:  # handed on, by an operation at the very end, so that the later readers' gradient is added first
            place = name if name in nodes else places[_source(name)]
            results.append(piece.call_function(_hand_on, (env[place],)))
    piece.output(results)
    return torch.fx.GraphModule(owner, piece)


def _hand_on(value: Any) -> Any:
    return torch.ops.aten.alias.default(value) if isinstance(value, torch.Tensor) else value


def _source(name: str) -> tuple[str, str]:
    if name.startswith(WEIGHT):
        return "parameter", name.removeprefix(WEIGHT)
    return "input", name.removeprefix(INPUT)
