"""Measure stages on the sample micro-batch: seconds, and the bytes that wait for backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from roundelay.frontend.captured import Captured
from roundelay.frontend.compiled import Compiled
from roundelay.frontend.draws import Draw
from roundelay.frontend.placed import CPU
from roundelay.frontend.stage import Mode, StageFunction
from roundelay.ir.graph import LOSS
from roundelay.ir.stage import Partition, StageSpec


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
    captured: Captured,
    partition: Partition,
    micro_batch: Any,
    mode: Mode,
    devices: Sequence[torch.device] | None = None,
    repeats: int = 3,
) -> list[StageProfile]:
    """Run every stage forward and backward on one micro-batch, on copies of the buffers.

    Args:
        captured: the model.
        partition: its stages.
        micro_batch: of the size that will be trained on.
        mode: backward mode.
        devices: where each stage runs; by default the CPU.
        repeats: how often; the first run warms up.
    """
    places = devices or [CPU] * len(partition.stages)
    parameters = captured.parameters()
    functions = [
        _Placed(captured.stage(spec, place), parameters, spec, place)
        for spec, place in zip(partition.stages, places, strict=True)
    ]
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in functions]
    tapes = [0] * len(functions)
    for repeat in range(repeats + 1):
        measured = _once(captured, functions, micro_batch, mode)
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
            update_s=touch(function.parameters.values(), function.now_s),
            tape_bytes=tape,
        )
        for (forward, backward), tape, function in zip(times, tapes, functions, strict=True)
    ]


@final
class _Placed:
    """A stage's functions and weights on its device."""

    def __init__(
        self, function: StageFunction, parameters: Mapping[str, torch.Tensor], spec: StageSpec, place: torch.device
    ) -> None:
        self.function, self.place = function, place
        self.parameters = {n: self.here(parameters[n]) for n in spec.parameters}

    def here(self, value: Any) -> Any:
        """A tensor on the device; what is no tensor as it is."""
        return value.to(self.place) if isinstance(value, torch.Tensor) else value

    def now_s(self) -> float:
        """The time, when the device has done what it was given."""
        if self.place.type == "cuda":
            torch.cuda.synchronize(self.place)
        return time.perf_counter()


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
    plain, parameters = captured.compiling(None), captured.parameters()
    stages = [
        _Placed(
            _learning(captured.stage(spec)) if stage in (None, spec.stage) else plain.stage(spec),
            parameters,
            spec,
            CPU,
        )
        for spec in partition.stages
    ]
    _once(captured, stages, micro_batch, captured.mode)


def _learning(function: StageFunction) -> StageFunction:
    segments = (replace(s, call=s.call.learn) if isinstance(s.call, Compiled) else s for s in function.segments)
    return replace(function, segments=tuple(segments))


def _once(
    captured: Captured, stages: Sequence[_Placed], micro_batch: Any, mode: Mode
) -> list[tuple[float, float, int]]:
    """(seconds forward, seconds backward, bytes on the tape) of each stage."""
    values: dict[str, Any] = dict(captured.values(micro_batch))
    buffers = {n: b.clone() for n, b in captured.buffers().items()}
    tapes, forwards = [], []
    for stage in stages:
        inputs = {n: stage.here(values[n]) for n in stage.function.inputs}
        buffers = {n: stage.here(b) for n, b in buffers.items()}
        start = stage.now_s()
        outputs, tape = stage.function.forward(stage.parameters, buffers, inputs, Draw(0, 0), mode=mode, measure=True)
        forwards.append(stage.now_s() - start)
        values.update(outputs)
        tapes.append(tape)
    grads: dict[str, torch.Tensor] = {LOSS: torch.ones_like(values[LOSS])}
    backwards = []
    for stage, tape in zip(reversed(stages), reversed(tapes), strict=True):
        entering = {n: stage.here(grads.pop(n, None)) for n in stage.function.outputs}
        start = stage.now_s()
        of_inputs, _ = stage.function.backward(tape, entering, stage.parameters)
        grads.update(of_inputs)
        backwards.append(stage.now_s() - start)
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
