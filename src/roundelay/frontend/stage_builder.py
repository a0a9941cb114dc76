"""Build the functions of stages from the captured graph: ranges of operations as segments, and the loss as the last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.fx

from roundelay.frontend.export.export import Exported
from roundelay.frontend.graph_run import DRAW, run_nodes
from roundelay.frontend.loss import LossCall
from roundelay.frontend.mesh.local_graph import ONLY, MeshRank, take_part
from roundelay.frontend.stages.compiled_segment import CompiledSegment
from roundelay.frontend.stages.keyed_rng import RngKey
from roundelay.frontend.stages.make_segment import Arithmetic, Roles, drawing, loss_segment_of, segment_of
from roundelay.frontend.stages.on_device import on_device
from roundelay.frontend.stages.precision import FULL, autocast
from roundelay.frontend.stages.remat_segment import RematSegment
from roundelay.frontend.stages.retarget_device import CPU, retarget
from roundelay.frontend.stages.segment import Call, Segment
from roundelay.frontend.stages.stage_function import Mode, StageFunction
from roundelay.ir.deduction import Box
from roundelay.ir.graph import BATCH, COUNT, INPUT, LABELS, LOSS, WEIGHT, Graph
from roundelay.ir.sbp import B, Split
from roundelay.ir.stage import SegmentSpec, StageSpec


@dataclass(frozen=True, slots=True)
class StageBuilder:
    """Makes stage functions for one backward mode and precision; sub-graphs and compiled code are kept and shared.

    Args:
        exported: the rewritten model.
        graph: its description.
        mutated: names of buffers that a forward changes.
        loss: the loss.
        mode: the backward mode for which segments are compiled; None: they are not compiled.
        precision: in which segments compute.
        boxes: boxings of a mesh, by the name of the boxed value.
        at: which worker of the mesh runs them.
    """

    exported: Exported
    graph: Graph
    mutated: frozenset[str]
    loss: LossCall
    mode: Mode | None = None
    precision: str = FULL
    boxes: Mapping[str, Box] = field(default_factory=dict)
    at: MeshRank = ONLY
    _pieces: dict[tuple[SegmentSpec, torch.device], torch.fx.GraphModule] = field(default_factory=dict)
    compiled: dict[tuple[SegmentSpec, torch.device, str, bool], CompiledSegment] = field(default_factory=dict)

    def stage(self, spec: StageSpec, device: torch.device, *, halved: bool) -> StageFunction:
        """The functions of one stage; see :meth:`roundelay.frontend.capture.Captured.stage`."""
        segments = [self._segment(part, device, halved=halved) for part in spec.segments]
        segments = [RematSegment.of(part) if i in spec.recomputed else part for i, part in enumerate(segments)]
        inputs, outputs = self.ends(spec)
        if spec.loss_reads:
            segments.append(self.loss_segment(spec, device))
        borders = [i for i, part in enumerate(spec.segments) if self.graph.ops[part.stop - 1].name in self.boxes]
        boxed = [self.boxes[self.graph.ops[spec.segments[i].stop - 1].name] for i in borders]
        narrowed = {
            box.name: partial(take_part, split=astuple(box.needed), at=self.at)
            for box in boxed
            if box.given == B and isinstance(box.needed, Split)
        }
        return StageFunction(tuple(segments), inputs, outputs, tuple(borders), narrowed)

    def ends(self, spec: StageSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the values that a stage receives, and of those that it sends, the loss's among them."""
        outputs = tuple(name for name in spec.outputs if not name.startswith((INPUT, BATCH)))  # those the reader sends
        inputs = spec.inputs
        if spec.stage == 0:  # the data that its own segments read, without what it only passes on
            read = {name for segment in spec.segments for name in segment.inputs} | set(spec.loss_reads)
            inputs = tuple(name for name in (*self.graph.inputs, *self.graph.batch) if name in read)
        return inputs, (*outputs, *self.loss_spec(spec).outputs) if spec.loss_reads else outputs

    def walk(self, values: Mapping[str, torch.Tensor], each: Callable[[int, Callable[[], Any]], Any]) -> torch.Tensor:
        """Run the whole model operation by operation; see :meth:`roundelay.frontend.capture.Captured.walk`."""
        order = {op.name: i for i, op in enumerate(self.graph.ops)}

        def call(node: torch.fx.Node, args: Any, kwargs: Any) -> Any:
            target: Any = node.target
            return each(order[node.name], partial(target, *args, **kwargs))

        with torch.enable_grad(), autocast(self.precision, CPU):
            tensors = [values[name] for name in self.graph.inputs]
            results, _ = run_nodes(self.exported, tensors, call, keep=self.graph.outputs)
            every = {**values, **{name: results[name] for name in self.graph.outputs if name in order}}
            reads = [every[name] for name in (*self.graph.outputs, *self.graph.batch)]
            loss: list[torch.Tensor] = each(len(order), partial(self._loss_call(CPU), *reads, RngKey(0, 0)))
        return loss[0]

    def roles(self, spec: SegmentSpec) -> Roles:
        """What becomes of the values of a segment."""
        trainable = frozenset(n for n in spec.parameters if self.graph.parameters[n].trainable)
        mutated = frozenset(n for n in spec.buffers if n in self.mutated)
        return Roles(trainable, self._differentiable(spec.inputs), mutated)

    def piece(self, spec: SegmentSpec, device: torch.device) -> torch.fx.GraphModule:
        """A segment's graph of parameters, buffers, inputs and the RNG key, on a device."""
        if (spec, device) not in self._pieces:
            self._pieces[spec, device] = retarget(_sub_graph(self.exported, self.graph, spec), device)
        return self._pieces[spec, device]

    def loss_spec(self, spec: StageSpec) -> SegmentSpec:
        """The names of the loss's segment."""
        end = len(self.graph.ops)
        counts = (COUNT,) if self.graph.loss_counts else (LABELS,) if self.graph.labels_per_row else ()
        return SegmentSpec(end, end, (), (), spec.loss_reads, (LOSS, *counts, *self.graph.metrics))

    @property
    def loss_position(self) -> int:
        """The place of a loss that draws random numbers, after the random operations of the graph; else -1."""
        return sum(op.draws >= 0 for op in self.graph.ops) if self.loss.reads.draws else -1

    def _segment(self, spec: SegmentSpec, device: torch.device, *, halved: bool) -> Segment:
        piece, arithmetic = self.piece(spec, device), Arithmetic(device, self.precision)
        call = self._compiled_call(spec, arithmetic, piece)
        return segment_of(piece, spec, self.roles(spec), arithmetic, call, halved=halved)

    def _compiled_call(self, spec: SegmentSpec, arithmetic: Arithmetic, piece: torch.fx.GraphModule) -> Call:
        eager = arithmetic.lowered(piece.forward)
        if self.mode is None:
            return eager
        device = arithmetic.device
        key = (spec, device, self.precision, saves_all := self.mode == "mixed")
        if key not in self.compiled:
            context = partial(autocast, self.precision, device)
            self.compiled[key] = CompiledSegment(piece, eager, context, saves_all=saves_all)
        return self.compiled[key]

    def loss_segment(self, spec: StageSpec, device: torch.device) -> Segment:
        """The loss as a segment of the last stage."""
        part = self.loss_spec(spec)
        return loss_segment_of(
            self._loss_call(device), part, self.roles(part).differentiable, Arithmetic(device, self.precision)
        )

    def _loss_call(self, device: torch.device) -> Call:
        """The loss; if it draws random numbers, as the random operation after the last one of the graph."""
        return drawing(on_device(device, self.loss), self.loss_position, device)

    def _differentiable(self, names: tuple[str, ...]) -> frozenset[str]:
        """Those of the values that want a gradient."""
        weights = {name for name in names if name.startswith(WEIGHT)}
        trained = {name for name in weights if self.graph.parameters[name.removeprefix(WEIGHT)].trainable}
        values = {name for name in names if not name.startswith((INPUT, BATCH))} - weights
        return frozenset(trained | {name for name in values if self.graph.values[name].requires_grad})


def _sub_graph(exported: Exported, graph: Graph, spec: SegmentSpec) -> torch.fx.GraphModule:
    """Operations ``start`` to ``stop`` as a function of parameters, buffers, inputs and the random key."""
    piece = torch.fx.Graph()
    owner = torch.nn.Module()
    inner = {op.name for op in graph.ops[spec.start : spec.stop]}
    nodes = {node.name: node for node in exported.module.graph.nodes}
    places: dict[tuple[str, str], str] = {(r.kind, r.name): name for name, r in reversed(exported.roles.items())}
    env: dict[str, torch.fx.Node] = {}
    sources = [("parameter", n) for n in spec.parameters] + [("buffer", n) for n in spec.buffers]
    read = [places[source] for source in sources]
    read += [name if name in nodes else places[_source(name)] for name in spec.inputs]
    for place in read:  # named as in the whole graph: a parameter's own name may be that of an operation
        env[place] = piece.placeholder(place)
        env[place].meta = dict(nodes[place].meta)  # shapes, which split_backward reads
    env[DRAW] = piece.placeholder(DRAW)
    first_place = {id(exported.roles[p].tensor): p for p in env if p in exported.roles}

    def find(node: torch.fx.Node) -> torch.fx.Node:
        if node.name in env:
            return env[node.name]
        if node.meta.get("helper"):  # of the operation that reads it, on one worker of a mesh
            env[node.name] = piece.node_copy(node, find)
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
        else:  # passed on by an operation at the very end, so that the later readers' gradient is added first
            place = name if name in nodes else places[_source(name)]
            results.append(piece.call_function(pass_on, (env[place],)))
    piece.output(results)
    return torch.fx.GraphModule(owner, piece)


def pass_on(value: Any) -> Any:
    """A value as the result of an operation."""
    return torch.ops.aten.alias.default(value) if isinstance(value, torch.Tensor) else value


def _source(name: str) -> tuple[str, str]:
    if name.startswith(WEIGHT):
        return "parameter", name.removeprefix(WEIGHT)
    return "input", name.removeprefix(INPUT)
