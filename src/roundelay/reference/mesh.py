"""What the workers of a mesh have of a stage's tensors, and what they exchange, on one process: all of them in a list.

::

    S(d) -> B:  the parts side by side along d        P -> B:     x_0 + x_1 + ... , in the order of the workers
    B -> S(d):  part w of dimension d                 P -> S(d):  part w of that sum
    P(max) -> B: the largest of x_0, x_1, ...

A split reads its dimension as (outer, m, unit) and divides m in balanced parts, the first ones longer by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from roundelay.ir.rule import Mode
from roundelay.ir.sbp import P_MAX, B, Broadcast, Signature, Split
from roundelay.reference.run_inputs import ReferenceStage, StageFunctions, Tensors

Each = list[dict[str, Any]]
"""Values or gradients by name, of every worker."""


def part_of(whole: torch.Tensor, split: Split, workers: int, worker: int) -> torch.Tensor:
    """One worker's part, in memory of its own."""
    parts = torch.tensor_split(_opened(whole, split), workers, split.dim + 1)
    return parts[worker].flatten(split.dim, split.dim + 2).clone(memory_format=torch.contiguous_format)


def _all_parts(whole: torch.Tensor, split: Split, workers: int) -> list[torch.Tensor]:
    return [part_of(whole, split, workers, worker) for worker in range(workers)]


def joined(parts: Sequence[torch.Tensor], split: Split) -> torch.Tensor:
    """The whole of all workers' parts."""
    return torch.cat([_opened(part, split) for part in parts], split.dim + 1).flatten(split.dim, split.dim + 2)


def summed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of what all workers have, in their order."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _opened(tensor: torch.Tensor, split: Split) -> torch.Tensor:
    count = tensor.shape[split.dim] // (split.outer * split.unit)
    opened: torch.Tensor = tensor.unflatten(split.dim, (split.outer, count, split.unit))
    return opened


def _boxed(parts: Sequence[torch.Tensor], source: Signature, target: Signature) -> Sequence[torch.Tensor]:
    """What every worker has afterwards."""
    if source in (B, target):  # a worker takes its part of what it has by itself
        return parts
    if isinstance(source, Split):
        whole = joined(parts, source)
    else:
        whole = torch.stack(list(parts)).amax(0) if source == P_MAX else summed(parts)
    if isinstance(target, Broadcast):
        return [whole] * len(parts)
    assert isinstance(target, Split), "nothing is boxed to a partial tensor"
    return _all_parts(whole, target, len(parts))


def forward(
    stage: ReferenceStage, weights: Sequence[Tensors], buffers: Sequence[Tensors], values: Each, key: Any, mode: Mode
) -> list[list[Any]]:
    """Run the forward of all workers, adding outputs to their values; returns the tapes, by part and worker."""
    tapes: list[list[Any]] = []
    for parts in zip(*(function.parts for function in stage.functions), strict=True):
        tapes.append([])
        for part, own, at, known in zip(parts, weights, buffers, values, strict=True):
            inputs = {name: on(stage.device, known[name]) for name in part.inputs}
            outputs, tape = part.forward(own, at, inputs, key, mode=mode)
            known.update(outputs)
            tapes[-1].append(tape)
        for name in stage.boxes.keys() & _made(parts[0]):
            box = stage.boxes[name]
            after = _boxed([known[name] for known in values], box.source, box.target)
            for known, value in zip(values, after, strict=True):
                known[name] = value
    return tapes


def backward(
    stage: ReferenceStage, weights: Sequence[Tensors], tapes: list[list[Any]], gradients: Each
) -> list[Tensors]:
    """Run the backward of all workers, taking the gradients of their values and adding those of the inputs.

    Returns:
        Gradients of the parameters, of every worker.
    """
    of_parameters: list[Tensors] = [{} for _ in weights]
    each = list(zip(*(function.parts for function in stage.functions), strict=True))
    for parts, taped in zip(reversed(each), reversed(tapes), strict=True):
        for name in stage.boxes.keys() & _made(parts[0]):
            box = stage.boxes[name]
            if box.given is not None and box.needed is not None and gradients[0].get(name) is not None:
                after = _boxed([known[name] for known in gradients], box.given, box.needed)
                for known, gradient in zip(gradients, after, strict=True):
                    known[name] = gradient
        for worker, (part, tape) in enumerate(zip(parts, taped, strict=True)):
            known = gradients[worker]
            grad_outputs = {name: on(stage.device, known.pop(name, None)) for name in part.outputs}
            of_inputs, own = part.backward(tape, grad_outputs, weights[worker])
            known.update(of_inputs)
            of_parameters[worker].update(own)
    return of_parameters


def _made(part: StageFunctions) -> set[str]:
    """What a part does not only pass on."""
    return {*part.outputs} - {*part.inputs}


def local(stage: ReferenceStage, whole: Mapping[str, torch.Tensor], worker: int) -> Tensors:
    """What one worker has of a stage's parameters, or of what has their shapes."""
    workers = len(stage.functions)
    return {
        name: part_of(tensor, stage.split[name], workers, worker) if name in stage.split else tensor
        for name, tensor in whole.items()
    }


@dataclass(frozen=True, slots=True)
class Division:
    """How holders divide a parameter of which each updates a part: along a mesh, over replicas, or both.

    A part is updated as a tensor of its own: kernels may round its last elements otherwise than amid the whole.

    Args:
        split: along the mesh; None if each of its workers has all.
        workers: of the mesh.
        state: of what a worker has, over the replicas; None if each of them updates all.
        replicas: how many there are of these, or in a group of them.
    """

    split: Split | None
    workers: int
    state: Split | None
    replicas: int

    def parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Each holder's part, by workers and then replicas."""
        each = [whole] if self.split is None else _all_parts(whole, self.split, self.workers)
        return each if self.state is None else [p for one in each for p in _all_parts(one, self.state, self.replicas)]

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole of all parts."""
        if self.state is not None:
            size = self.replicas
            parts = [joined(parts[at : at + size], self.state) for at in range(0, len(parts), size)]
        return parts[0] if self.split is None else joined(parts, self.split)


def divisions(stages: Sequence[ReferenceStage], shards: int) -> dict[str, Division]:
    """Those of the parameters of which holders update parts, by name."""
    return {
        name: Division(stage.split.get(name), len(stage.functions), stage.states.get(name), shards)
        for stage in stages
        for name in stage.parameters
        if name in stage.split or name in stage.states
    }


def counted(
    stage: ReferenceStage, whole: Mapping[str, torch.Tensor], worker: int, replica: int, shards: int
) -> Tensors:
    """Those that count in a norm: the first holder's, and of the others what is split."""

    def counts(name: str) -> bool:
        first = replica < (shards if name in stage.states else 1)
        return name in whole and (not worker or name in stage.split) and first

    own = local(stage, {name: whole[name] for name in stage.parameters if counts(name)}, worker)
    return updated(stage, own, replica, shards)


def updated(stage: ReferenceStage, own: Mapping[str, torch.Tensor], replica: int, shards: int) -> Tensors:
    """What one replica updates of what a worker has of parameters, or of what has their shapes."""
    return {
        name: part_of(tensor, stage.states[name], shards, replica % shards) if name in stage.states else tensor
        for name, tensor in own.items()
    }


def whole_gradients(stages: Sequence[ReferenceStage], gradients: Sequence[Tensors]) -> Tensors:
    """The gradients of whole parameters, of what every worker has."""
    result: Tensors = {}
    for stage in stages:
        for name in stage.parameters:
            each = [own[name] for own in gradients if name in own]
            if not each:
                continue
            if name in stage.split:
                result[name] = joined(each, stage.split[name])
            else:
                result[name] = summed(each) if name in stage.partial else each[0]
    return result


def on(device: torch.device, value: Any) -> Any:
    """Return a tensor on the device, and other values unchanged."""
    return value.to(device) if isinstance(value, torch.Tensor) else value
