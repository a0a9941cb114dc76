"""Measure stages on the sample micro-batch: seconds, and the bytes that wait for backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from roundelay.frontend.capture import Captured
from roundelay.frontend.compiled_segment import CompiledSegment
from roundelay.frontend.keyed_rng import RngKey
from roundelay.frontend.remat_segment import RematTape
from roundelay.frontend.retarget_device import CPU
from roundelay.frontend.stage_function import Mode, StageFunction, debt_bytes
from roundelay.ir.graph import LOSS
from roundelay.ir.stage import Partition, StageSpec


@dataclass(frozen=True, slots=True)
class StageProfile:
    """One stage, measured.

    Args:
        forward_s: median seconds of a forward.
        backward_s: median seconds of a backward, with segments that it runs again, without a forward that the mode
            ``recompute`` repeats; of its first half where it has two.
        weights_s: median seconds of its second half; 0 where it is whole.
        update_s: seconds of reading and writing its weights three times, a stand-in for the optimizer.
        tape_bytes: bytes that one forward leaves for its backward, parameters not counted.
        owed_bytes: bytes that the first half of a backward leaves for the second.
        spared_bytes: for each segment that is run again, what it would keep beside its inputs and outputs.
    """

    forward_s: float
    backward_s: float
    weights_s: float
    update_s: float
    tape_bytes: int
    owed_bytes: int
    spared_bytes: tuple[int, ...] = ()


def profile(
    captured: Captured,
    partition: Partition,
    micro_batch: Any,
    mode: Mode,
    devices: Sequence[torch.device] | None = None,
    repeats: int = 3,
    *,
    halved: bool = False,
) -> list[StageProfile]:
    """Run every stage forward and backward on one micro-batch, on copies of the buffers.

    Args:
        captured: the model.
        partition: its stages.
        micro_batch: of the size that will be trained on.
        mode: backward mode.
        devices: where each stage runs; by default the CPU.
        repeats: how often; the first run warms up.
        halved: run every backward in two halves.
    """
    places = devices or [CPU] * len(partition.stages)
    parameters = captured.parameters()
    functions = [
        _Placed(captured.stage(spec, place, halved=halved), parameters, spec, place)
        for spec, place in zip(partition.stages, places, strict=True)
    ]
    runs = [_once(captured, functions, micro_batch, mode) for _ in range(repeats + 1)][1:]
    profiles = []
    for k, function in enumerate(functions):
        mine = [run[k] for run in runs]
        forward_s, backward_s, weights_s = (statistics.median(one.seconds[i] for one in mine) for i in range(3))
        again = forward_s if mode == "recompute" else 0.0
        profiles.append(
            StageProfile(
                forward_s=forward_s,
                backward_s=max(1e-9, backward_s - again),
                weights_s=weights_s if halved else 0.0,
                update_s=touch(function.parameters.values(), function.now_s),
                tape_bytes=mine[-1].tape_bytes,
                owed_bytes=mine[-1].owed_bytes,
                spared_bytes=mine[-1].spared_bytes,
            )
        )
    return profiles


@dataclass(slots=True)
class _Measured:
    """One pass of a stage: seconds of its forward, its backward and that one's second half; bytes that have waited."""

    seconds: list[float]
    tape_bytes: int
    owed_bytes: int = 0
    spared_bytes: tuple[int, ...] = ()


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


def compile_for(captured: Captured, partition: Partition, micro_batch: Any, stages: Collection[int]) -> None:
    """Compile the segments of some stages for the shapes of a micro-batch; what is compiled already stays.

    Args:
        captured: the model, with the mode to compile for.
        partition: its stages.
        micro_batch: of the size that will be trained on.
        stages: their numbers.

    Raises:
        CaptureError: a stage cannot be compiled.
    """
    assert captured.mode is not None
    plain, parameters = captured.compiling(None), captured.parameters()
    functions = [
        _Placed(
            _learning(captured.stage(spec)) if spec.stage in stages else plain.stage(spec),
            parameters,
            spec,
            CPU,
        )
        for spec in partition.stages
    ]
    _once(captured, functions, micro_batch, captured.mode)


def _learning(function: StageFunction) -> StageFunction:
    segments = (replace(s, call=s.call.learn) if isinstance(s.call, CompiledSegment) else s for s in function.segments)
    return replace(function, segments=tuple(segments))


def _once(captured: Captured, stages: Sequence[_Placed], micro_batch: Any, mode: Mode) -> list[_Measured]:
    """Forward and backward through all stages."""
    values: dict[str, Any] = dict(captured.values(micro_batch))
    buffers = {n: b.clone() for n, b in captured.buffers().items()}
    tapes, measured = [], []
    for stage in stages:
        inputs = {n: stage.here(values[n]) for n in stage.function.inputs}
        buffers = {n: stage.here(b) for n, b in buffers.items()}
        start = stage.now_s()
        outputs, tape = stage.function.forward(stage.parameters, buffers, inputs, RngKey(0, 0), mode=mode, measure=True)
        spared = tuple(part.spared for part in tape.tapes if isinstance(part, RematTape))
        measured.append(_Measured([stage.now_s() - start], tape.num_bytes, spared_bytes=spared))
        values.update(outputs)
        tapes.append(tape)
    grads: dict[str, torch.Tensor] = {LOSS: torch.ones_like(values[LOSS])}
    for stage, tape, one in zip(reversed(stages), reversed(tapes), reversed(measured), strict=True):
        entering = {n: stage.here(grads.pop(n, None)) for n in stage.function.outputs}
        start = stage.now_s()
        of_inputs, _ = stage.function.backward(tape, entering, stage.parameters)
        middle = stage.now_s()
        grads.update(of_inputs)
        one.owed_bytes = debt_bytes(tape.debt)
        second = stage.now_s()
        stage.function.weights(tape.debt)
        one.seconds += [middle - start, stage.now_s() - second]
        tape.debt.clear()
    return measured


def touch(parameters: Iterable[torch.Tensor], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of three passes over some parameters, a stand-in for an update."""
    own = [parameter.detach() for parameter in parameters]
    start = clock()
    for _ in range(3):
        for parameter in own:
            parameter.clone()
    return clock() - start
