"""A stage as data: its segments, and what it receives and sends.

Made by ``lower.partition`` from a graph and a plan's cuts; read by capture (which builds the functions), by the
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
        parameters: parameters it reads as its own.
        buffers: buffers it reads or writes.
        inputs: values it reads from outside: numbers, activations, inputs, weights of other stages.
        outputs: values that something behind it reads, in graph order; ``weight.NAME`` for parameters it lends.
    """

    start: int
    stop: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """What one stage sends to a later one with every micro-batch, and what comes back.

    Args:
        source: the earlier stage.
        target: the later stage.
        values: names that travel forward, in sorted order of production.
        gradients: the names among them whose gradient travels back.
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
        segments: executed in order forward, in reverse backward.
        loss_reads: what the loss segment reads; empty unless this is the last stage.
        sends: edges to later stages.
        receives: edges from earlier stages, in order of their source.
        recomputed: numbers of the segments that keep their inputs only, and are run again by the backward.
    """

    stage: int
    segments: tuple[SegmentSpec, ...]
    loss_reads: tuple[str, ...]
    sends: tuple[Edge, ...]
    receives: tuple[Edge, ...]
    recomputed: tuple[int, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that this stage owns, without repetition, in order of first use."""
        return tuple(dict.fromkeys(name for segment in self.segments for name in segment.parameters))

    @property
    def buffers(self) -> tuple[str, ...]:
        """Names of the buffers that this stage reads or writes, without repetition."""
        return tuple(dict.fromkeys(name for segment in self.segments for name in segment.buffers))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that reach this stage from other stages, without repetition."""
        return tuple(dict.fromkeys(name for edge in self.receives for name in edge.values))

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that this stage sends to others, without repetition."""
        return tuple(dict.fromkeys(name for edge in self.sends for name in edge.values))


@dataclass(frozen=True, slots=True)
class Partition:
    """All stages of one run."""

    stages: tuple[StageSpec, ...]

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Every edge, ordered by source, then target."""
        return tuple(edge for stage in self.stages for edge in stage.sends)
