"""Trains the plan's stages update by update, as a run does, and compares each update with plain PyTorch's.

The stages are the runtime's, with the loss in the last one and an optimizer each, but there is no pipeline: each
micro-batch passes forward and backward through all stages before the next. Random operations draw from torch's default
generator, with the seed of the plain forward. Every update begins with the same weights and optimizer states: where
gradients are not bit-equal, the stages' optimizers get those of plain PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from roundelay.actor.machine import Run
from roundelay.frontend import Captured, RngKey
from roundelay.frontend.stages.retarget_device import CPU
from roundelay.ir.averages import EMA
from roundelay.ir.graph import COUNT, LABELS, LOSS, METRIC, TERMS
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.ir.program import Instruction
from roundelay.ir.stage import Partition
from roundelay.job import Job
from roundelay.lower.emit import emit
from roundelay.lower.validate_plan import check_plan
from roundelay.lower.work import works_of
from roundelay.proof.fidelity_differences import DifferenceChecker
from roundelay.proof.plain_stepper import MicroBatchPart, Update, generator_now, seed_of
from roundelay.proof.shared_memory_tensors import Index, SharedTensors
from roundelay.runtime.loss_scaler import LossScaler
from roundelay.runtime.loss_seed import lacking_weight, seed
from roundelay.runtime.stage_state import Stage
from roundelay.session.resume import initial

Tensors = dict[str, torch.Tensor]


@final
class CapturedStepper:
    """The stages of a plan, trained on the batches of plain PyTorch.

    Args:
        job: the job; its model is not changed.
        captured: its model, as the plan computes it.
        plan: what to run; clipping by an earlier norm, or by a stage's, must have been left out.
        stages: its stages.
        seed: of the run.
        shared: where plain PyTorch has stored its tensors.
        device: the device of all stages.
        drawn: by which random operations draw in every micro-batch; by default from torch's default generators.
    """

    def __init__(  # noqa: PLR0913
        self,
        job: Job,
        captured: Captured,
        plan: Plan,
        stages: Partition,
        seed: int,
        shared: SharedTensors,
        device: torch.device = CPU,
        drawn: RngKey | None = None,
    ) -> None:
        self._drawn = drawn
        self._captured, self._plan, self._seed, self._shared, self._device = captured, plan, seed, shared, device
        start = initial(captured, None, None)
        reading = check_plan(plan)
        works = works_of(reading, emit(reading))
        homes = [works[plan.worker_of(spec.stage)] for spec in stages.stages]
        self.stages = [
            Stage(captured, spec, job, work, start, device) for spec, work in zip(stages.stages, homes, strict=True)
        ]
        own = captured.model.named_parameters()
        names = {id(p): n for n, p in captured.model.named_parameters()}
        self._sharing = {name: [names[id(p)] for p in others] for name, others in captured.sharing.items()}
        self._untouched: Tensors = {n: t.detach().to(device) for n, t in (*own, *captured.model.named_buffers())}
        rule = plan.loss_scale
        self._scaled, self._scales = rule.on, LossScaler(rule, None)
        self._clip = plan.clip
        self.checker = DifferenceChecker(captured.graph, plan)

    def update(self, parts: Sequence[MicroBatchPart], plain: Update) -> None:
        """Train on one batch, and compare the results with plain PyTorch's.

        Raises:
            FidelityDifference: they differ.
        """
        number, checker = parts[0][0].batch, self.checker
        for i, (header, batch) in enumerate(parts):
            values = {n: v.to(self._device) for n, v in self._captured.values(batch).items()}
            outputs, drawn = self._micro_batch(header, values)
            checker.generator(drawn, plain.generators[i])
            loss = [float(outputs[LOSS]), float(outputs.get(COUNT, 0.0))]
            checker.loss(number, header, loss, plain.losses[i])
            checker.metrics(number, _metrics(outputs), plain.metrics[i])
        theirs = self._sum_shared(self._stored(plain.gradients))
        own = self.gradients()
        differing = checker.gradients(number, own, theirs)
        self._finish_gradients(number, parts[-1][0], plain, {n: theirs[n] for n in differing if n in theirs})
        checker.buffers(number, self.buffers(), self._untouched, self._stored(plain.buffers))
        for stage in self.stages:
            checker.rates(number, [float(group["lr"]) for group in stage.steps.optimizer.param_groups], plain.rates)
        torch.manual_seed(seed_of(self._seed, -1 - number))
        for stage in self.stages:
            stage.update(number)
        shared = {other for others in self._sharing.values() for other in others}
        theirs = {n: t for n, t in self._stored(plain.weights).items() if n not in shared}
        fused, kept = self._updates_many(), self._sharing
        checker.weights(number, self.weights(), self._untouched, theirs, fused=fused, shared=kept)
        checker.updates += 1

    def _sum_shared(self, gradients: Tensors) -> Tensors:
        """Plain PyTorch's gradients, summed over parameters that share memory: in a stage they are one parameter."""
        summed = dict(gradients)
        for name, others in self._sharing.items():
            parts = [summed.pop(other) for other in (name, *others) if other in summed]
            if parts:
                summed[name] = torch.stack(parts).sum(0)
        return summed

    def _stored(self, index: Index) -> Tensors:
        """What plain PyTorch has stored, on the device."""
        return {name: tensor.to(self._device) for name, tensor in self._shared.get_all(index).items()}

    def weights(self) -> Tensors:
        """Every stage's parameters, by name."""
        return {name: tensor.detach() for stage in self.stages for name, tensor in stage.parameters.items()}

    def buffers(self) -> Tensors:
        """Every stage's buffers, by name."""
        return {name: tensor for stage in self.stages for name, tensor in stage.buffers.items()}

    def gradients(self) -> Tensors:
        """The mean gradients of the batch, by name."""
        return {name: grad for stage in self.stages for name, grad in stage.gradients.whole(None).items()}

    def states(self) -> dict[str, dict[str, Any]]:
        """The optimizers' state by parameter name, with averages of the weights."""
        return {name: state for stage in self.stages for name, state in stage.state()[1].items()}

    def averages(self) -> Tensors:
        """The moving averages, by name."""
        return {name: state[EMA] for name, state in self.states().items() if EMA in state}

    def _micro_batch(self, header: MicroBatch, values: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Forward and backward; returns the last stage's outputs, and torch's generator state after the forward."""
        scale = self._scales.give(header) if self._scaled else 1.0
        torch.manual_seed(seed_of(self._seed, header.g))
        key = self._drawn or RngKey.plain(self._seed, header.g)
        outputs: dict[str, Any] = {}
        for stage in self.stages:
            inputs = {name: values[name] for name in stage.function.inputs}
            outputs = stage.forward(self._run(stage, "forward", header), header, inputs, key)
            values.update(outputs)
        drawn = generator_now()
        last = self.stages[-1]
        lacking = lacking_weight(header, float(outputs[LABELS]), last.labels_per_row) if LABELS in outputs else 0.0
        counts = COUNT in last.function.outputs
        grads = seed(header, outputs[LOSS], counts=counts, scale=scale, lacking=lacking)
        for stage in reversed(self.stages):
            entering = {name: grads.pop(name, None) for name in stage.function.outputs}
            of_inputs, _ = stage.backward(self._run(stage, "backward", header), entering, scale)
            grads.update(of_inputs)
            if stage.halved:
                stage.weight_half(header.g, scale)
            stage.gradients.count(float(outputs.get(COUNT, 0.0)) or lacking)
        return outputs, drawn

    def _run(self, stage: Stage, opcode: Any, header: MicroBatch) -> Run:
        k, version = stage.spec.stage, header.batch
        instruction = Instruction(opcode, k, 0, mode=self._plan.backward)
        return Run(instruction, header.g, header, version, version, None, 0, (), (), k)

    def _finish_gradients(self, number: int, header: MicroBatch, plain: Update, replacements: Tensors) -> None:
        """Finish the batch's gradients, and replace those that differ from plain PyTorch's by its own."""
        squares = [stage.gradients.square() for stage in self.stages]
        if self._scaled:
            self._scales.finished(header, sum(squares))
        if self._scaled and not math.isfinite(sum(squares)):
            for stage in self.stages:
                stage.gradients.drop()
            return
        if self._clip.by == "global":
            norm = math.sqrt(sum(squares))
            own = {n: g for stage in self.stages for n, g in stage.gradients.whole(norm).items()}
            theirs = self._stored(plain.clipped)
            self.checker.clipped(number, own, theirs)
            replacements = {name: theirs[name] for name in own if name in theirs}
        for stage in self.stages:
            if mine := {name: replacements[name] for name in stage.parameters if name in replacements}:
                gradients = {
                    name: mine[name].clone() if name in mine else g for name, g in stage.gradients.whole(None).items()
                }
                stage.gradients.clear()
                stage.gradients.add(gradients, g=0)

    def _updates_many(self) -> bool:
        """Whether an optimizer updates many parameters in one call, which may round differently."""
        groups = [group for stage in self.stages for group in stage.steps.optimizer.param_groups]
        return any(group.get("fused") or group.get("foreach") for group in groups)


def _metrics(outputs: Mapping[str, Any]) -> dict[str, list[float]]:
    metrics: dict[str, list[float]] = {}
    for name, value in outputs.items():
        if name.startswith(METRIC):
            metrics.setdefault(name.removeprefix(METRIC), []).insert(0, float(value))
        elif name.startswith(TERMS):
            metrics.setdefault(name.removeprefix(TERMS), []).append(float(value))
    return metrics
