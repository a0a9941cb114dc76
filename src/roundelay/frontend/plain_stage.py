"""A stage as data, and a stage again from data: for machines that have none of the person's Python.

::

    plain = plain_stage(captured, spec)                 where the job is: refused by name if something cannot travel
    data = roundelay.ir.plain_bytes.encoded(plain)      bytes
    plain = roundelay.ir.plain_bytes.decoded(data)      elsewhere: checked, as bytes from outside
    rebuilt(plain, device, halved=...)                  the same StageFunction, bit for bit

Weights and buffers are not part of it.
"""

from __future__ import annotations

import torch
import torch.fx

from roundelay.frontend.capture import Captured
from roundelay.frontend.plain_loss import plain_loss, rebuilt_loss
from roundelay.frontend.plain_pieces import cannot_travel, plain_graph, torch_graph
from roundelay.frontend.stages.make_segment import Arithmetic, Roles, segment_of
from roundelay.frontend.stages.precision import DTYPES, FULL
from roundelay.frontend.stages.remat_segment import RematSegment
from roundelay.frontend.stages.retarget_device import CPU, retarget
from roundelay.frontend.stages.segment import Segment
from roundelay.frontend.stages.stage_function import StageFunction
from roundelay.ir.plain_bytes import encoded
from roundelay.ir.plain_graph import LIMITS, Limits, PlainSegment, PlainStage, refused
from roundelay.ir.stage import SegmentSpec, StageSpec


def plain_stage(captured: Captured, spec: StageSpec) -> PlainStage:
    """A stage as data.

    Args:
        captured: the model, in the precision of the plan.
        spec: which operations.

    Raises:
        CaptureError: a part of it cannot travel; naming the operation and its module, or the line of the loss.
        PlanError: it is larger than anybody takes.
    """
    if captured.sharding is not None:
        raise cannot_travel("a stage on the workers of a mesh", "parts of operations", "stages of one worker each")
    if captured.mode is not None:
        raise cannot_travel("--compile", "compiled stages", "stages that are not compiled")
    builder = captured.builder
    inputs, outputs = builder.ends(spec)
    plain = PlainStage(
        spec.stage,
        captured.precision,
        tuple(_plain_segment(captured, part, recomputed=i in spec.recomputed) for i, part in enumerate(spec.segments)),
        plain_loss(captured, spec) if spec.loss_reads else None,
        inputs,
        outputs,
    )
    encoded(plain)
    for part in plain.segments:
        torch_graph(part.graph)  # as whoever gets it does
    return plain


def rebuilt(plain: PlainStage, device: torch.device = CPU, *, halved: bool, limits: Limits = LIMITS) -> StageFunction:
    """The functions of a stage from data, which was checked as :func:`roundelay.ir.plain_bytes.decoded` does.

    Args:
        plain: the stage.
        device: where it runs.
        halved: its backward leaves weight gradients for later.
        limits: what it may need.

    Raises:
        PlanError: an operation's arguments do not fit it, or it would make a tensor beyond the limits.
    """
    if plain.precision not in (FULL, *DTYPES):
        raise refused(f"stage {plain.stage}", f"precision {plain.precision!r}", f"one of {FULL}, {', '.join(DTYPES)}")
    arithmetic = Arithmetic(device, plain.precision)
    segments = [_segment(part, arithmetic, limits, halved=halved) for part in plain.segments]
    if plain.loss is not None:
        segments.append(rebuilt_loss(plain.loss, arithmetic, limits))
    return StageFunction(tuple(segments), plain.inputs, plain.outputs)


def _plain_segment(captured: Captured, part: SegmentSpec, *, recomputed: bool) -> PlainSegment:
    graph, roles = captured.graph, captured.builder.roles(part)
    modules = {op.name: op.module for op in graph.ops}

    def where(node: torch.fx.Node) -> str:
        module = modules.get(node.name, "")
        return f"operation {node.name!r} ({node.target}) of {f'module {module!r}' if module else 'the model'}"

    return PlainSegment(
        plain_graph(captured.builder.piece(part, CPU), where),
        part.start,
        part.stop,
        part.parameters,
        part.buffers,
        part.inputs,
        part.outputs,
        tuple(sorted(roles.trainable)),
        tuple(sorted(roles.differentiable)),
        tuple(sorted(roles.mutated)),
        recomputed,
    )


def _segment(part: PlainSegment, arithmetic: Arithmetic, limits: Limits, *, halved: bool) -> Segment:
    piece = retarget(torch_graph(part.graph, limits), arithmetic.device)
    spec = SegmentSpec(part.start, part.stop, part.parameters, part.buffers, part.inputs, part.outputs)
    roles = Roles(frozenset(part.trainable), frozenset(part.differentiable), frozenset(part.mutated))
    segment = segment_of(piece, spec, roles, arithmetic, halved=halved)
    return RematSegment.of(segment) if part.recomputed else segment
