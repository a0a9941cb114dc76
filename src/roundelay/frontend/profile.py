"""Measure stages on the sample micro-batch: seconds, and the bytes that wait for backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from roundelay.frontend.captured import Captured
from roundelay.frontend.compiled import Compiled
from roundelay.frontend.draws import Draw
from roundelay.frontend.stage import Mode, StageFunction
from roundelay.ir.graph import LOSS
from roundelay.ir.stage import Partition


@dataclass(frozen=True, slots=True)
class StageProfile:
    """One stage, measured.

    Args:
        forward_s: median seconds of a forward.
        backward_s: median seconds of a backward, without a repeated forward.
        update_s: seconds of reading and writing its weights three times, a stand-in for the optimizer.
        tape_bytes: bytes that one forward leaves for its backward, parameters not counted.
    """

    forward_s: float
    backward_s: float
    update_s: float
    tape_bytes: int


def profile(
    captured: Captured, partition: Partition, micro_batch: Any, mode: Mode, repeats: int = 3
) -> list[StageProfile]:
    """Run every stage forward and backward on one micro-batch, on copies of the buffers.

    Args:
        captured: the model.
        partition: its stages.
        micro_batch: of the size that will be trained on.
        mode: backward mode.
        repeats: how often; the first run warms up.
    """
    functions = [captured.stage(spec) for spec in partition.stages]
    parameters = captured.parameters()
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in functions]
    tapes = [0] * len(functions)
    for repeat in range(repeats + 1):
        measured = _once(captured, partition, functions, micro_batch, mode)
        for k, (forward_s, backward_s, num_bytes) in enumerate(measured):
            tapes[k] = num_bytes
            if repeat:
                times[k][0].append(forward_s)
                times[k][1].append(backward_s)
    return [
        StageProfile(
            forward_s=statistics.median(forward),
            backward_s=max(
                1e-9, statistics.median(backward) - (statistics.median(forward) if mode == "recompute" else 0.0)
            ),
            update_s=touch(parameters[name] for name in spec.parameters),
            tape_bytes=tape,
        )
        for (forward, backward), tape, spec in zip(times, tapes, partition.stages, strict=True)
    ]


def compile_for(captured: Captured, partition: Partition, micro_batch: Any, stage: int | None = None) -> None:
    """Compile the segments of one stage, or of all, for the shapes of a micro-batch; what is compiled already stays.

    Args:
        captured: the model, with the mode to compile for.
        partition: its stages.
        micro_batch: of the size that will be trained on.
        stage: its number; None for all.

    Raises:
        CaptureError: a stage cannot be compiled.
    """
    assert captured.mode is not None
    plain = captured.compiling(None)
    functions = [
        _learning(captured.stage(spec)) if stage in (None, spec.stage) else plain.stage(spec)
        for spec in partition.stages
    ]
    _once(captured, partition, functions, micro_batch, captured.mode)


def _learning(function: StageFunction) -> StageFunction:
    segments = (replace(s, call=s.call.learn) if isinstance(s.call, Compiled) else s for s in function.segments)
    return replace(function, segments=tuple(segments))


def _once(
    captured: Captured, partition: Partition, functions: Sequence[StageFunction], micro_batch: Any, mode: Mode
) -> list[tuple[float, float, int]]:
    """(seconds forward, seconds backward, bytes on the tape) of each stage."""
    parameters = captured.parameters()
    values: dict[str, Any] = dict(captured.values(micro_batch))
    buffers = {n: b.clone() for n, b in captured.buffers().items()}
    tapes, forwards = [], []
    for spec, function in zip(partition.stages, functions, strict=True):
        start = time.perf_counter()
        inputs = {n: values[n] for n in function.inputs}
        own = {n: parameters[n] for n in spec.parameters}
        outputs, tape = function.forward(own, buffers, inputs, Draw(0, 0), mode=mode, measure=True)
        forwards.append(time.perf_counter() - start)
        values.update(outputs)
        tapes.append(tape)
    grads: dict[str, torch.Tensor] = {LOSS: torch.ones_like(values[LOSS])}
    backwards = []
    for spec, function, tape in zip(reversed(partition.stages), reversed(functions), reversed(tapes), strict=True):
        start = time.perf_counter()
        entering = {n: grads.pop(n, None) for n in function.outputs}
        of_inputs, _ = function.backward(tape, entering, {n: parameters[n] for n in spec.parameters})
        grads.update(of_inputs)
        backwards.append(time.perf_counter() - start)
    sizes = [tape.num_bytes for tape in tapes]
    return list(zip(forwards, reversed(backwards), sizes, strict=True))


def touch(parameters: Iterable[torch.Tensor], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of three passes over some parameters, a stand-in for an update."""
    own = [parameter.detach() for parameter in parameters]
    start = clock()
    for _ in range(3):
        for parameter in own:
            parameter.clone()
    return clock() - start
