"""Capture a model: its logical graph, and the functions of any stage cut from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from roundelay.checkpoint.shards import Ranges, whole_ranges
from roundelay.errors import CaptureError, RoundelayError, counted
from roundelay.frontend import batch as batches
from roundelay.frontend.batch import Batch, fields, layout, num_rows, twice
from roundelay.frontend.changed_settings import ExternalMutations
from roundelay.frontend.describe_graph import describe_graph
from roundelay.frontend.export.activation_checkpointing import recording_checkpoints
from roundelay.frontend.export.export import Exported, Role, export, first_of_storages, refuse_failing
from roundelay.frontend.export.export_adapter import Inputs, LazyBuffer
from roundelay.frontend.export.recurrent import flatten, weights_of
from roundelay.frontend.few_rows import Rows, row_steps, same_small_sizes, sizes_of
from roundelay.frontend.graph_inputs import GraphInputs
from roundelay.frontend.graph_outputs import move_buffer_writes_up, spans_of_output_buffers, wrap_outputs
from roundelay.frontend.graph_passes import (
    Cleaned,
    StateWritten,
    clean,
    drop_assertions,
    first_run,
    key_draws,
    prune,
    write_error,
)
from roundelay.frontend.graph_run import run_nodes
from roundelay.frontend.label_counts import add_count
from roundelay.frontend.loss import LossCall, LossFunction
from roundelay.frontend.loss_reads import Sample, observe_loss
from roundelay.frontend.model_call import first_forward, train
from roundelay.frontend.sharding import Sharding, own_part, split_range
from roundelay.frontend.side_channels import SampleCall, call_on_sample, refuse_written
from roundelay.frontend.side_effects import SideEffects
from roundelay.frontend.stage_builder import StageBuilder
from roundelay.frontend.stages.precision import autocast, not_in
from roundelay.frontend.stages.retarget_device import CPU
from roundelay.frontend.stages.stage_function import Mode, StageFunction
from roundelay.frontend.value_layouts import layout_of
from roundelay.ir.deduction import Box
from roundelay.ir.graph import Graph
from roundelay.ir.residence import Residence
from roundelay.ir.sbp import P, Signature, Split
from roundelay.ir.stage import StageSpec
from roundelay.ir.value_layout import ValueLayout
from roundelay.reach.reachable_state import Change, ReachableState
from roundelay.reach.source_lines import line_of_change


@dataclass(frozen=True, slots=True)
class Captured:
    """A model, its loss and its call, ready to be cut.

    Args:
        model: the user's own module; its weights are never changed by capture or by stages.
        graph: the description from which planner and lowering work.
        inputs: makes the graph's inputs from micro-batches.
        builder: makes the functions of stages.
        checkpointed: paths of modules that the model's code checkpoints itself.
        sharing: by name of a parameter, later ones that share its memory.
        effects: what its code does besides computing the loss.
        sharding: how it lies on the workers of a mesh axis; None: each stage is on one worker.
        whole: without it; None where there is none.
        residences: of parameters of which each replica updates a part, by name.
    """

    model: torch.nn.Module
    graph: Graph
    inputs: GraphInputs
    builder: StageBuilder
    checkpointed: tuple[str, ...]
    sharing: dict[str, tuple[torch.nn.Parameter, ...]]
    effects: SideEffects
    _describe: Callable[[Exported], Graph]
    sharding: Sharding | None = None
    whole: Captured | None = None
    residences: Mapping[str, Residence] = field(default_factory=dict)

    def __repr__(self) -> str:
        weights = sum(parameter.numel() for parameter in self.model.parameters())
        operations, cuts = counted(len(self.graph.ops), "operation"), counted(len(self.graph.cuts), "place")
        return f"Captured({type(self.model).__name__}: {operations}, {cuts} to cut, {counted(weights, 'weight')})"

    @property
    def states(self) -> dict[str, Split]:
        """How the optimizer's states of parameters are split over replicas, by name."""
        return {name: residence.state for name, residence in self.residences.items()}

    @property
    def mode(self) -> Mode | None:
        """The backward mode for which stages are compiled; None: they are not compiled."""
        return self.builder.mode

    @property
    def precision(self) -> str:
        """In which stages compute, and for which the graph gives dtypes and bytes."""
        return self.builder.precision

    def compiling(self, mode: Mode | None) -> Captured:
        """The same model with stages compiled for a backward mode, or not compiled; compiled code is shared."""
        return replace(self, builder=replace(self.builder, mode=mode))

    def lowering(self, precision: str) -> Captured:
        """The same model computing in a precision, ``fp32`` or a lower one, which changes values' dtypes and bytes.

        Raises:
            CaptureError: an operation cannot be computed in it.
        """
        if precision == self.precision:
            return self
        try:
            graph = self._described(self.builder.exported, precision)
        except Exception as error:  # an operation that does not support the dtype
            raise not_in(precision, error) from error
        builder = replace(self.builder, graph=graph, precision=precision)
        return replace(self, graph=graph, inputs=replace(self.inputs, graph=graph), builder=builder)

    def _described(self, exported: Exported, precision: str) -> Graph:
        with torch.random.fork_rng(devices=[]), autocast(precision, CPU):
            return self._describe(exported)

    def rewritten(self, exported: Exported) -> Captured:
        """The same model with a graph that computes the same; cuts are made in it."""
        graph = replace(self._described(exported, self.precision), fingerprint=self.graph.fingerprint)
        builder = replace(self.builder, exported=exported, graph=graph, _pieces={}, compiled={})
        return replace(self, graph=graph, inputs=replace(self.inputs, graph=graph), builder=builder)

    def on(self, graph: Graph, sharding: Sharding) -> Captured:
        """The same model on the workers of a mesh axis.

        Args:
            graph: the model's with its boxings.
            sharding: what each worker runs and has.
        """
        assert self.sharding is None, "what is on a mesh is not put on another"
        inputs, builder = replace(self.inputs, graph=graph), sharding.builders[0]
        return replace(self, graph=graph, inputs=inputs, builder=builder, sharding=sharding)

    def values(self, micro_batch: Batch) -> dict[str, torch.Tensor]:
        """The graph's inputs and the batch tensors that the loss reads, by value name, from one micro-batch.

        Raises:
            JobError: the call differs from the sample's in more than its tensors; or the model's settings have changed.
        """
        self.effects.settings.check()
        return self.inputs.values(micro_batch)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Every parameter of the graph by its first name; the user's own objects."""
        roles = [r for r in self.builder.exported.roles.values() if r.kind == "parameter"]
        return {r.name: r.tensor for r in roles if isinstance(r.tensor, torch.nn.Parameter)}

    def set_parameter(self, name: str, weight: torch.Tensor) -> None:
        """Let the model's parameter of this name, and all that share its memory, use the memory of ``weight``."""
        own = self.parameters()[name]
        own.data = weight
        for other in self.sharing.get(name, ()):
            other.data = own.data

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every buffer of the graph by name; the user's own objects."""
        roles = self.builder.exported.roles.values()
        return {r.name: r.tensor for r in roles if r.kind == "buffer" and r.tensor is not None}

    @property
    def loss_draws(self) -> bool:
        """Whether the loss draws random numbers."""
        return self.builder.loss.reads.draws

    def mutated_buffers(self) -> frozenset[str]:
        """Names of the buffers that a forward changes."""
        return self.builder.mutated

    def stage(
        self, spec: StageSpec, device: torch.device = CPU, *, halved: bool = False, part: int = 0
    ) -> StageFunction:
        """The functions of one stage, for weights, buffers and inputs on ``device``.

        Args:
            spec: which operations.
            device: where they run.
            halved: its backward leaves weight gradients for later; see :mod:`roundelay.frontend.stages.split_backward`.
            part: which worker of the mesh axis, if there is one.
        """
        builder = self.builder if self.sharding is None else self.sharding.builders[part]
        return builder.stage(spec, device, halved=halved)

    def flatten_recurrent(self, spec: StageSpec, weights: Mapping[str, torch.Tensor]) -> None:
        """Move the weights of each recurrent layer of a stage on a GPU into one memory; elsewhere they stay.

        See :func:`roundelay.frontend.export.recurrent.flatten`.
        """
        if not any(weight.is_cuda for weight in weights.values()):
            return
        exported = self.builder.exported
        inner = {op.name for segment in spec.segments for op in self.graph.ops[segment.start : segment.stop]}
        for node in exported.module.graph.nodes:
            names = [exported.roles[of.name].name for of in weights_of(node) if of.name in exported.roles]
            if node.name in inner and names and len(names) == len(weights_of(node)):
                flatten(node, [weights[name] for name in names])

    def local(self, name: str, tensor: torch.Tensor, part: int) -> torch.Tensor:
        """What one worker of the mesh axis has of a parameter, or of what has its shape; all of it without a mesh."""
        return tensor if self.sharding is None else self.sharding.local(name, tensor, part)

    def owned(self, name: str, local: torch.Tensor, replica: tuple[int, int]) -> torch.Tensor:
        """What one of several replicas updates of what a worker has of a parameter, in memory of its own.

        Args:
            name: of the parameter.
            local: what the worker has of it, or of what has its shape.
            replica: how many there are, and which one it is.
        """
        split = self.states.get(name)
        return local if split is None else own_part(local, split, *replica)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """What is boxed on the mesh."""
        return () if self.sharding is None else tuple(self.sharding.boxes.values())

    def is_split(self, name: str) -> bool:
        """Whether each worker of the mesh axis has a part of its own of a parameter."""
        return self.sharding is not None and name in self.sharding.parameters

    def ranges(self, name: str, part: int, replica: tuple[int, int] = (1, 0)) -> Ranges:
        """Where what a holder updates of a parameter lies in the whole; see :meth:`owned`."""
        shape = self.parameters()[name].shape
        ranges = list(whole_ranges(shape) if self.sharding is None else self.sharding.ranges(name, shape, part))
        split = self.states.get(name)
        if split is not None:
            ranges[split.dim] = split_range(split, shape[split.dim], *replica)
        return tuple(ranges)

    def has_partial_gradient(self, name: str) -> bool:
        """Whether a parameter's gradient is the sum of what the workers of the mesh axis compute."""
        return self.sharding is not None and self.sharding.gradients.get(name) == P

    def layout(self, name: str) -> ValueLayout | None:
        """What is known of a value, of each micro-batch; None on a mesh, where workers have parts."""
        return None if self.sharding is not None else layout_of(self.builder.exported, self.graph, name)

    def boxing(self, name: str, *, gradient: bool) -> tuple[Signature, Signature]:
        """From what to what a boxed value of the graph is boxed, or its gradient."""
        assert self.sharding is not None, "only then are values boxed"
        box = self.sharding.boxes[name]
        assert (box.given is not None and box.needed is not None) or not gradient, "only where one flows"
        return (box.given, box.needed) if gradient else (box.source, box.target)  # type: ignore[return-value]

    def boxed_shapes(self, values: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """The shapes of boxed values without the mesh, for these inputs of the graph."""
        return {} if self.sharding is None else self.sharding.whole_shapes(values)

    def as_boxed(self, name: str, value: Any, shapes: Mapping[str, Sequence[int]], *, gradient: bool) -> Any:
        """A value as a boxing leaves it; see :meth:`roundelay.frontend.sharding.Sharding.as_boxed`.

        Args:
            name: of the value.
            value: what the first worker has of it, or of its gradient.
            shapes: those of :meth:`boxed_shapes`.
            gradient: which of the two.
        """
        if self.sharding is None or name not in self.sharding.boxes:
            return value
        return self.sharding.as_boxed(name, value, shapes[name], gradient=gradient)

    def walk(self, micro_batch: Batch, each: Callable[[int, Callable[[], Any]], Any]) -> torch.Tensor:
        """Run the whole model operation by operation, with a tape, on copies of the buffers; returns the loss.

        Args:
            micro_batch: what to run it on.
            each: called with every operation's index and a function that runs it; returns that function's result. The
                loss is the last one.
        """
        return self.builder.walk(self.values(micro_batch), each)


def capture(model: torch.nn.Module, loss: LossFunction, batch: Batch, inputs: Inputs | None = None) -> Captured:
    """Capture a model in training mode, called as it would be called on ``batch``.

    Args:
        model: any exportable module; it is left as it was, in training mode.
        loss: (outputs, batch) -> scalar, or (sum, count).
        batch: a sample micro-batch; a single row is repeated, since export fixes sizes of one.
        inputs: batch -> (args, kwargs).

    Raises:
        CaptureError: the model cannot be exported.
        JobError: batch, call or loss cannot be used.
    """
    train(model)
    batch = twice(batch) if num_rows(batch) == 1 else batch
    # contiguous copies: if a tensor were a view, export would expect the same view in every batch
    sample = batches.replace(batch, lambda _, leaf: leaf.clone(memory_format=torch.contiguous_format))
    call = call_on_sample(model, loss, inputs, sample)
    with torch.random.fork_rng(devices=[]):
        with recording_checkpoints(model) as checkpointed:
            exported = _export(model, loss, call)
        move_buffer_writes_up(exported)
        whole = Rows(sample, call.tensors, num_rows(sample), whole=True)
        steps = row_steps(batch, call, exported, whole)
        cleaned, few = _clean(model, exported, call, steps)
        loss_call, by_loss, few = _observed(model, loss, exported, chain([few], steps), sample)
        by_forward = tuple(path for i in cleaned.inputs if (path := call.fields[i]) is not None)
        refuse_written(by_forward, loss_call.reads.batch, fields(batch))
        loss_call, cleaned = _finish(exported, cleaned, loss_call)
        draws = key_draws(exported)

        def describe(own: Exported) -> Graph:
            return describe_graph(own, cleaned, draws, loss_call.reads, (few, whole))

        graph = describe(exported)
    functions = [("loss", loss), *([] if inputs is None else [("inputs", inputs)])]
    by_model = exported.seen.changed
    own_changes = call.kept | {change.slot.id for change in (*by_model, *by_loss)}
    settings = ExternalMutations(model, own_changes, functions)
    return Captured(
        model,
        graph,
        GraphInputs(graph, exported, call.inputs, call.shape, layout(sample), writes=bool(call.written)),
        StageBuilder(exported, graph, cleaned.mutated, loss_call),
        tuple(checkpointed),
        _sharing(model),
        SideEffects(settings, by_model, by_loss, call.written, by_forward),
        describe,
    )


def _export(model: torch.nn.Module, loss: LossFunction, call: SampleCall) -> Exported:
    """Export the model; if its first forward creates buffers, call it once before.

    Raises:
        CaptureError: later forwards change such a buffer, whose initial value is then not known.
    """
    roots = [("model", model), ("loss", loss)]
    try:
        return export(model, call.shape, call.tensors, roots)
    except LazyBuffer:
        created = first_forward(model, call.shape, call.tensors, roots)
    exported = export(model, call.shape, call.tensors, roots)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        values, _ = run_nodes(exported, call.tensors, keep=exported.roles)
    for name, role in exported.roles.items():
        if role.tensor is not None and id(role.tensor) in created and not torch.equal(role.tensor, values[name]):
            key = role.name.split(".")[-1]
            raise CaptureError(
                f"buffer {role.name!r}, which the first forward creates",
                got="a buffer that later forwards change, so that its initial value is not known",
                expected="a buffer that __init__ initialises, or that only the first forward sets",
                remedy=f'Register it in __init__: self.register_buffer("{key}", torch.zeros(...)).',
            )
    return exported


def _clean(model: torch.nn.Module, exported: Exported, call: SampleCall, steps: Iterator[Rows]) -> tuple[Cleaned, Rows]:
    """Clean the graph, which runs it on values for the first time; export has only seen shapes.

    Returns:
        What cleaning has found, and the rows that it was found on.
    """
    drop_assertions(exported)
    for rows in steps:
        try:
            run = first_run(exported, rows.tensors)
            if rows.whole or same_small_sizes(exported, run.sizes):
                return clean(exported, run), rows
        except RoundelayError:
            raise
        except StateWritten as error:
            raise write_error(error.role, _line_of_write(model, error.role, call)) from None
        except Exception:  # raised by an operation
            if rows.whole:
                refuse_failing(model, call.shape, call.tensors)
                raise
    raise AssertionError("the last step is the whole sample")


def _observed(
    model: torch.nn.Module, loss: LossFunction, exported: Exported, steps: Iterator[Rows], sample: Batch
) -> tuple[LossCall, tuple[Change, ...], Rows]:
    """The loss as a function of what it reads, the slots that it changes, and the rows on which that was observed."""
    nodes = wrap_outputs(exported)
    sizes = [sizes_of(node) for node in nodes]
    for rows in steps:
        try:
            with torch.enable_grad():
                results, _ = run_nodes(exported, rows.tensors, keep={node.name for node in nodes})
            outputs = [results[node.name] for node in nodes]
            others = None if rows.whole else Sample(sample, sizes)
            return (*observe_loss(loss, model, exported.seen, outputs, rows.batch, others), rows)
        except Exception:  # raised by an operation or the loss; the whole sample decides
            if rows.whole:
                raise
    raise AssertionError("the last step is the whole sample")


def _line_of_write(model: torch.nn.Module, role: Role, call: SampleCall) -> str:
    """The line of the forward that writes into one of the model's tensors, whose values are restored."""
    state = ReachableState([("model", model)], torch.nn.Module())
    args, kwargs = call.shape.unflatten([tensor.clone() for tensor in call.tensors])
    slots = [slot for slot in state.slots.values() if slot.kind == "values" and slot.holder is role.tensor]
    try:
        changes = [Change(slot, slot.read(), None) for slot in slots]
        return next((line_of_change(change, lambda: model(*args, **kwargs)) for change in changes), "")
    finally:
        state.restore()


def _finish(exported: Exported, cleaned: Cleaned, loss: LossCall) -> tuple[LossCall, Cleaned]:
    """Reduce the graph's outputs to what the loss reads, with a count of labels where the model computes its loss."""
    reads = loss.reads
    nodes = wrap_outputs(exported, reads.weights)
    together = spans_of_output_buffers(exported, cleaned.mutated)
    results = [nodes[i] for i in reads.outputs]
    if reads.labels is not None and reads.labels.output >= 0:
        if (terms := add_count(exported, nodes[reads.labels.output])) is None:
            loss = replace(loss, reads=replace(reads, labels=None))
        else:
            results.append(terms)
    prune(exported, results, cleaned.writers)
    return loss, replace(cleaned, uncuttable=(*cleaned.uncuttable, *together))


def _sharing(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Parameter, ...]]:
    sharing: dict[str, tuple[torch.nn.Parameter, ...]] = {}
    for other, name in first_of_storages(model).items():
        sharing[name] = (*sharing.get(name, ()), model.get_parameter(other))
    return sharing
