"""Measure stages on the sample micro-batch: seconds, and bytes held for the backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch

from roundelay.frontend.capture import Captured
from roundelay.frontend.stages.compiled_segment import CompiledSegment
from roundelay.frontend.stages.keyed_rng import RngKey
from roundelay.frontend.stages.remat_segment import RematTape
from roundelay.frontend.stages.retarget_device import CPU
from roundelay.frontend.stages.segment import Tensors
from roundelay.frontend.stages.stage_function import Mode, StageFunction, StageTape, debt_bytes
from roundelay.ir.graph import LOSS
from roundelay.ir.stage import Partition, StageSpec

BUDGET_S = 1.5
"""Seconds after which no further run begins."""


@dataclass(frozen=True, slots=True)
class StageProfile:
    """Measurements of one stage.

    Args:
        forward_s: median seconds of a forward.
        backward_s: median seconds of a backward, or of its first half; segments that it recomputes included, the
            forward that the mode ``recompute`` repeats not included.
        weights_s: median seconds of the backward's second half; 0 if it is not split.
        update_s: seconds of reading and writing its weights three times, a stand-in for the optimizer.
        add_s: seconds of adding the gradients of its weights to those of micro-batches before.
        tape_bytes: bytes that one forward keeps for its backward, parameters not counted.
        owed_bytes: bytes that the first half of a backward leaves for the second.
        spared_bytes: for each recomputed segment the bytes it would keep in addition to its inputs and outputs.
        unused: names of trained parameters that got no gradient.
    """

    forward_s: float
    backward_s: float
    weights_s: float
    update_s: float
    add_s: float
    tape_bytes: int
    owed_bytes: int
    spared_bytes: tuple[int, ...] = ()
    unused: tuple[str, ...] = ()


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
    """Measure every stage's forward and backward on one micro-batch, with copies of the buffers.

    Args:
        captured: the model.
        partition: its stages.
        micro_batch: of the size that will be trained on.
        mode: backward mode.
        devices: where each stage runs; by default the CPU.
        repeats: runs measured after a warm-up run, at most; :data:`BUDGET_S` may end them earlier.
        halved: split every backward in two halves.
    """
    stage_devices = devices or [CPU] * len(partition.stages)
    parameters = {n: captured.local(n, p.detach(), 0) for n, p in captured.parameters().items()}
    functions = [
        _StageOnDevice(captured.stage(spec, device, halved=halved), parameters, spec, device)
        for spec, device in zip(partition.stages, stage_devices, strict=True)
    ]
    for spec, function in zip(partition.stages, functions, strict=True):
        captured.flatten_recurrent(spec, function.parameters)
    began, once = time.perf_counter(), partial(_once, captured, functions, micro_batch, mode, halved=halved)
    once()
    runs = [once()]
    while len(runs) < repeats and time.perf_counter() - began < BUDGET_S:
        runs.append(once())
    profiles = []
    for k, function in enumerate(functions):
        forward_s = statistics.median(run[k].forward_s for run in runs)
        backward_s = statistics.median(run[k].backward_s for run in runs)
        profiles.append(
            replace(
                runs[-1][k],
                forward_s=forward_s,
                backward_s=max(1e-9, backward_s - (forward_s if mode == "recompute" else 0.0)),
                weights_s=statistics.median(run[k].weights_s for run in runs),
                add_s=min(run[k].add_s for run in runs),
                update_s=time_update(function.parameters.values(), function.now_s),
            )
        )
    return profiles


@final
class _StageOnDevice:
    """A stage's function and weights on its device."""

    def __init__(
        self, function: StageFunction, parameters: Mapping[str, torch.Tensor], spec: StageSpec, device: torch.device
    ) -> None:
        self.function, self.device = function, device
        self.parameters = {n: self.to_device(parameters[n]) for n in spec.parameters}

    def to_device(self, value: Any) -> Any:
        """Move a tensor to the device; return any other value as it is."""
        return value.to(self.device) if isinstance(value, torch.Tensor) else value

    def now_s(self) -> float:
        """The time in seconds, after synchronizing with the device."""
        return synchronized_s(self.device)


def synchronized_s(device: torch.device) -> float:
    """The time in seconds when a device is through with what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def compile_for(captured: Captured, partition: Partition, micro_batch: Any, stages: Collection[int]) -> None:
    """Compile the segments of some stages for the shapes of a micro-batch, unless they are compiled already.

    Args:
        captured: the model, with the mode to compile for.
        partition: its stages.
        micro_batch: of the size that will be trained on.
        stages: numbers of the stages to compile.

    Raises:
        CaptureError: a stage cannot be compiled.
    """
    assert captured.mode is not None
    plain, parameters = captured.compiling(None), captured.parameters()
    functions = [
        _StageOnDevice(
            _compiling(captured.stage(spec)) if spec.stage in stages else plain.stage(spec),
            parameters,
            spec,
            CPU,
        )
        for spec in partition.stages
    ]
    _once(captured, functions, micro_batch, captured.mode, halved=False)


def _compiling(function: StageFunction) -> StageFunction:
    segments = (
        replace(s, call=s.call.compile) if isinstance(s.call, CompiledSegment) else s for s in function.segments
    )
    return replace(function, segments=tuple(segments))


def _once(
    captured: Captured, stages: Sequence[_StageOnDevice], micro_batch: Any, mode: Mode, *, halved: bool
) -> list[StageProfile]:
    """Run forward and backward through all stages once, and measure all but the update."""
    values: dict[str, Any] = dict(captured.values(micro_batch))
    shapes = captured.boxed_shapes(values)
    buffers = {n: b.clone() for n, b in captured.buffers().items()}
    forwards = []
    for stage in stages:
        buffers = {n: stage.to_device(b) for n, b in buffers.items()}
        forwards.append(_forward(partial(captured.as_boxed, shapes=shapes), stage, buffers, values, mode))
    grads: dict[str, torch.Tensor | None] = {LOSS: torch.ones_like(values[LOSS])}
    profiles = []
    for stage, (forward_s, tapes) in zip(reversed(stages), reversed(forwards), strict=True):
        spared_bytes = tuple(part.saved_bytes for tape in tapes for part in tape.tapes if isinstance(part, RematTape))
        backward_s, of_parameters = _backward(partial(captured.as_boxed, shapes=shapes), stage, tapes, grads)
        debt = [owed for tape in tapes for owed in tape.debt]
        owed_bytes = debt_bytes(debt)
        start = stage.now_s()
        of_parameters |= stage.function.backward_weights(debt)
        weights_s = stage.now_s() - start if halved else 0.0
        for tape in tapes:
            tape.debt.clear()
        trained = (n for n in stage.parameters if captured.graph.parameters[n].trainable)
        unused = tuple([n for n in trained if n not in of_parameters])
        held, add_s = sum(tape.num_bytes for tape in tapes), _add_s(stage, of_parameters)
        profiles.append(
            StageProfile(forward_s, backward_s, weights_s, 0.0, add_s, held, owed_bytes, spared_bytes, unused)
        )
    return profiles[::-1]


def _forward(
    as_boxed: Callable[..., Any], stage: _StageOnDevice, buffers: Tensors, values: dict[str, Any], mode: Mode
) -> tuple[float, list[StageTape]]:
    """Run a stage's forward, adding what it computes to ``values``; returns its seconds and tapes."""
    seconds, tapes = 0.0, []
    for part in stage.function.parts:
        inputs = {n: stage.to_device(values[n]) for n in part.inputs}
        start = stage.now_s()
        outputs, tape = part.forward(stage.parameters, buffers, inputs, RngKey(0, 0), mode=mode, measure=True)
        seconds += stage.now_s() - start
        tapes.append(tape)
        values.update(outputs)
        values.update({n: as_boxed(n, outputs[n], gradient=False) for n in outputs if n not in part.inputs})
    return seconds, tapes


def _backward(
    as_boxed: Callable[..., Any],
    stage: _StageOnDevice,
    tapes: Sequence[StageTape],
    grads: dict[str, torch.Tensor | None],
) -> tuple[float, Tensors]:
    """Run a stage's backward on the gradients that are known, and add its own; returns seconds and parameters'."""
    seconds, of_parameters = 0.0, {}
    for part, tape in zip(reversed(stage.function.parts), reversed(tapes), strict=True):
        taken = {n: stage.to_device(grads.pop(n, None)) for n in part.outputs}
        boxed = {n: g for n, g in taken.items() if n not in part.inputs and g is not None}
        taken |= {n: as_boxed(n, g, gradient=True) for n, g in boxed.items()}
        start = stage.now_s()
        of_inputs, own = part.backward(tape, taken, stage.parameters)
        seconds += stage.now_s() - start
        grads.update(of_inputs)
        of_parameters.update(own)
    return seconds, of_parameters


def _add_s(stage: _StageOnDevice, gradients: Tensors) -> float:
    """Seconds of adding gradients to sums."""
    sums = [gradient.clone() for gradient in gradients.values()]
    start = stage.now_s()
    for own, gradient in zip(sums, gradients.values(), strict=True):
        own.add_(gradient)
    return stage.now_s() - start


def time_update(parameters: Iterable[torch.Tensor], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of copying some parameters three times, a stand-in for an update."""
    own = [parameter.detach() for parameter in parameters]
    start = clock()
    for _ in range(3):
        for parameter in own:
            parameter.clone()
    return clock() - start
