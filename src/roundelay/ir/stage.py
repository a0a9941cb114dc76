"""A stage as data: its segments, and what it receives and sends.

Created by ``lower.partition`` from a graph and a plan's cuts; read by capture (which builds the functions), by the
lowering (which emits programs), by the runtime and by the reference.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """A contiguous piece of the graph: operations ``start`` to ``stop - 1``.

    Args:
        start: first operation.
        stop: one past the last operation.
        parameters: parameters that it owns.
        buffers: buffers it reads or writes.
        inputs: values it reads from outside: numbers, activations, inputs, weights of other stages.
        outputs: values that later segments read, in graph order; ``weight.NAME`` for parameters of its own.
    """

    start: int
    stop: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """The values that one stage sends to a later one for every micro-batch, and the gradients that come back.

    Args:
        source: the earlier stage.
        target: the later stage.
        values: names of the values sent forward, in order of production.
        gradients: the names among them whose gradient is sent back.
    """

    source: int
    target: int
    values: tuple[str, ...]
    gradients: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage: its segments in order, and the loss if it is the last one.

    Args:
        stage: number k, from 0.
        segments: in order of execution of the forward; the backward runs them in reverse.
        loss_reads: what the loss segment reads; empty unless this is the last stage.
        sends: edges to later stages.
        receives: edges from earlier stages, in order of their source.
        recomputed: numbers of the segments that keep only their inputs and that the backward recomputes.
    """

    stage: int
    segments: tuple[SegmentSpec, ...]
    loss_reads: tuple[str, ...]
    sends: tuple[Edge, ...]
    receives: tuple[Edge, ...]
    recomputed: tuple[int, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that this stage owns, in order of first use."""
        return tuple(dict.fromkeys(name for segment in self.segments for name in segment.parameters))

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that this stage reads or writes."""
        return tuple(dict.fromkeys(name for segment in self.segments for name in segment.buffers))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that this stage receives from other stages."""
        return tuple(dict.fromkeys(name for edge in self.receives for name in edge.values))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that this stage sends to other stages."""
        return tuple(dict.fromkeys(name for edge in self.sends for name in edge.values))


@dataclass(frozen=True, slots=True)
class Partition:
    """All stages of one run."""

    stages: tuple[StageSpec, ...]

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All edges, ordered by source, then target."""
        return tuple(edge for stage in self.stages for edge in stage.sends)
