"""The state of one stage while it trains: weights, optimizer, tapes, gradients. One object, one thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from roundelay.actor.machine import Run
from roundelay.frontend import Captured, Draw, Mode, StageTape
from roundelay.frontend.placed import CPU
from roundelay.ir.clip import EPSILON, Clip
from roundelay.ir.graph import COUNT, LOSS
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.ir.rule import NO_PREDICTOR
from roundelay.ir.stage import StageSpec
from roundelay.job import Job
from roundelay.runtime.optimizer import (
    RateTable,
    build_optimizer,
    build_scheduler,
    groups_of,
    narrow,
    restore_state,
    state_of,
    without_gradients,
)
from roundelay.weights import LastStep, Outlook, needs_displacement, needs_gradient, predict


@dataclass(frozen=True, slots=True)
class Initial:
    """Where a stage starts: the model's own tensors, or a checkpoint's.

    Args:
        parameters: by name.
        buffers: by name.
        optimizer: state by parameter name; empty at a cold start.
        updates: updates made before.
    """

    parameters: Mapping[str, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Mapping[str, Any]]
    updates: int


class Stage:
    """One stage.

    Args:
        captured: the model.
        spec: which part of it.
        job: optimizer and scheduler.
        plan: its predictor and its clipping.
        initial: where it starts, on the CPU; copied.
        place: where it computes, and keeps all that is its own.
    """

    def __init__(
        self,
        captured: Captured,
        spec: StageSpec,
        job: Job,
        plan: Plan,
        initial: Initial,
        place: torch.device = CPU,
    ) -> None:
        self.spec = spec
        self.function = captured.stage(spec, place)
        self.predictor, self._clip = plan.predictor, Clip.parse(plan.clip)
        self.parameters = {
            n: torch.nn.Parameter(
                initial.parameters[n].detach().to(place, copy=True), captured.graph.parameters[n].trainable
            )
            for n in spec.parameters
        }
        self.buffers = {n: initial.buffers[n].to(place, copy=True) for n in spec.buffers}
        named = [(n, self.parameters.get(n, p)) for n, p in captured.model.named_parameters()]
        self.optimizer = build_optimizer(job.optimizer, named)
        narrow(self.optimizer, self.parameters, named)
        self.scheduler = build_scheduler(job.scheduler, self.optimizer)
        self._rates = RateTable(job.optimizer, job.scheduler, without_gradients(captured.model))
        for _ in range(initial.updates if self.scheduler is not None else 0):
            self.optimizer.step()  # no gradient is there yet: only the schedule moves
            self.scheduler.step()  # type: ignore[union-attr]
        restore_state(self.optimizer, self.parameters, initial.optimizer)
        self.tapes: dict[int, StageTape] = {}
        #: weights that the next forward reads whatever the rule says; set only to break a run on purpose
        self.forward_weights: Mapping[str, torch.Tensor] | None = None
        self._gradients: dict[str, torch.Tensor] = {}
        self._summed: set[str] = set()  # of these the gradient is a sum of our own, which may be added to in place
        self._count = 0.0
        self._rows = 0  # of the micro-batches whose gradients are summed
        self._share = 0.0  # theirs of the batch's
        resumed = [n for n, p in self.parameters.items() if p.requires_grad and initial.updates]
        self._last: dict[str, LastStep] = {n: LastStep(rate=0.0, displacement=None, gradient=None) for n in resumed}
        self._at_epoch_end: dict[str, torch.Tensor] | None = None
        self._predicted: dict[str, tuple[tuple[int, int, int], dict[str, torch.Tensor]]] = {}
        self._kept: dict[int, dict[str, torch.Tensor]] = {}  # older versions that a later forward may read
        self._keep: int | None = None  # the oldest of them
        self._tape_bytes: dict[tuple[Any, ...], int] = {}

    def forward(self, run: Run, header: MicroBatch, inputs: Mapping[str, Any], draw: Draw) -> dict[str, Any]:
        """Forward of one micro-batch; its tape waits for :meth:`backward`.

        Args:
            run: the instruction: which version it reads, how far it predicts, what its backward will read.
            header: of the micro-batch.
            inputs: the stage's inputs by name.
            draw: key of the random numbers.
        """
        mode: Mode = run.instruction.mode  # type: ignore[assignment]
        key = tuple([v.shape for v in inputs.values() if isinstance(v, torch.Tensor)])
        weights = self.forward_weights or self.weights(run)
        measure = key not in self._tape_bytes
        outputs, tape = self.function.forward(weights, self.buffers, inputs, draw, mode=mode, measure=measure)
        tape.num_bytes = self._tape_bytes.setdefault(key, tape.num_bytes)
        self.tapes[header.g] = tape
        if self._keep is not None or run.keep is not None:
            self._keep = run.keep
            self._forget()
        if header.ends_epoch and header.ends_batch:  # later forwards replace buffers, they do not write them
            self._at_epoch_end = dict(self.buffers)
        return outputs

    def backward(
        self, run: Run, grads: Mapping[str, torch.Tensor | None]
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Backward of one micro-batch; its gradients are added to the batch's.

        Returns:
            Gradients of the stage's inputs and of its parameters, by name.
        """
        tape = self.tapes.pop(run.g)
        of_inputs, of_parameters = self.function.backward(tape, grads, self.weights(run))
        self._add(of_parameters)
        if run.header is not None:
            self._rows += run.header.rows
            self._share = self._rows / run.header.batch_rows
        return of_inputs, of_parameters

    def _add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add a micro-batch's gradients to the batch's; the first may be somebody else's too and are not written."""
        for name, gradient in gradients.items():
            if name in self._summed:
                self._gradients[name].add_(gradient)
            elif name in self._gradients:
                self._gradients[name] = torch.add(self._gradients[name], gradient)
                self._summed.add(name)
            else:
                self._gradients[name] = gradient

    def seed(self, header: MicroBatch, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """The gradient with which the last stage's backward begins: the micro-batch's share of the batch's mean."""
        return {LOSS: torch.full_like(loss, 1.0 if COUNT in self.function.outputs else header.weight)}

    def count(self, count: float) -> None:
        """Add the number of terms that a micro-batch's loss has summed."""
        self._count += count

    def update(self, version: int) -> None:
        """One optimizer step with the batch's gradients, the one after ``version`` others.

        Weights that a tape still holds, or a later forward will read, are left as they are: the step then works on a
        copy, and the old tensors live exactly as long as somebody needs them.
        """
        before = self._hand_over_gradients()
        consumed = self._consumed()
        if self._keep is not None and self._keep <= version:
            self._kept[version] = {n: p.detach() for n, p in self.parameters.items()}
        held = self._held()
        for parameter in self.parameters.values():
            if parameter.data_ptr() in held:
                parameter.data = parameter.data.clone()
        self.optimizer.step()
        self._remember(before, consumed)
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.scheduler is not None:
            self.scheduler.step()
        self._gradients, self._count, self._predicted = {}, 0.0, {}
        self._rows, self._share = 0, 0.0
        self._summed.clear()

    def _held(self) -> set[int]:
        """Addresses of weights that somebody will read again; a prediction's are copies already."""
        stashed = [part for tape in self.tapes.values() if tape.mode == "stash" for part in tape.tapes]
        kept = {weight.data_ptr() for weights in self._kept.values() for weight in weights.values()}
        return kept | {leaf.data_ptr() for part in stashed for leaf in part.parameters.values()}

    def _forget(self) -> None:
        """Let versions go that no later forward reads."""
        if self._kept:
            self._kept = {v: w for v, w in self._kept.items() if self._keep is not None and v >= self._keep}

    def live(self) -> Mapping[str, torch.Tensor]:
        """The newest weights; to be read only."""
        return self.parameters

    def weights(self, run: Run) -> Mapping[str, torch.Tensor]:
        """The weights that a pass reads: the newest, older ones, or predicted ones.

        Predicted ones are kept until the update; by ``partial``, until there is more to predict them from.
        """
        if run.reads != run.version:
            return self._kept[run.reads]
        if run.distance <= 0:
            return self.live()
        seen = self._rows if self.predictor == "partial" else 0
        opcode, asked = run.instruction.opcode, (run.version, run.distance, seen)
        if opcode not in self._predicted or self._predicted[opcode][0] != asked:
            other = [made for key, made in self._predicted.values() if key == asked]  # the other pass's
            self._predicted[opcode] = asked, other[0] if other else self._predict(run.version, run.distance)
        return self._predicted[opcode][1]

    def tape_bytes(self) -> int:
        """Most bytes that one forward has left for its backward; parameters are not counted."""
        return max(self._tape_bytes.values(), default=0)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]], dict[str, torch.Tensor]]:
        """Copies of weights, optimizer state and buffers, by name, on the CPU.

        At an epoch's end the buffers are those behind its last forward, whatever forwards have been run since.
        """
        weights = {n: p.detach().to(CPU, copy=True) for n, p in self.parameters.items()}
        buffers = self.buffers if self._at_epoch_end is None else self._at_epoch_end
        self._at_epoch_end = None
        return weights, state_of(self.optimizer, self.parameters), {n: b.to(CPU, copy=True) for n, b in buffers.items()}

    def _hand_over_gradients(self) -> dict[str, torch.Tensor]:
        """Hand the batch's gradients to the optimizer; returns copies of weights whose displacement will be needed."""
        for name, gradient in self._gradients.items():
            self.parameters[name].grad = torch.div(gradient, self._count) if self._count else gradient
        if self._clip.by == "stage":
            grads = {n: grad for n in self.spec.parameters if (grad := self.parameters[n].grad) is not None}
            for name, grad in self._clipped(grads).items():
                self.parameters[name].grad = grad
        if self.predictor == NO_PREDICTOR:
            return {}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return {
            names[id(p)]: p.detach().clone()
            for _, group, p in groups_of(self.optimizer)
            if needs_displacement(self.optimizer, group, self.predictor)
        }

    def _clipped(self, grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The stage's gradients, scaled to a common norm of at most the plan's; none is written."""
        if not grads:
            return {}
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float32) for grad in grads.values()]
        scale = torch.clamp(self._clip.norm / (torch.linalg.vector_norm(torch.stack(norms)) + EPSILON), max=1.0)
        return {name: grad * scale for name, grad in grads.items()}

    def _begun(self) -> dict[str, torch.Tensor]:
        """The mean gradients that the batch shows so far, clipped as its update will clip; empty behind an update."""
        if self.predictor != "partial":
            return {}
        over = self._count or self._share
        means = {n: torch.div(self._gradients[n], over) for n in self.spec.parameters if n in self._gradients}
        return self._clipped(means) if self._clip.by == "stage" else means

    def _consumed(self) -> dict[str, torch.Tensor]:
        """Copies of the gradients that a later prediction reads, taken before a step that may write into them."""
        if self.predictor == NO_PREDICTOR:
            return {}
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        return {
            names[id(p)]: p.grad.clone()
            for _, group, p in groups_of(self.optimizer)
            if p.grad is not None and needs_gradient(self.optimizer, group, self.predictor)
        }

    def _remember(self, before: Mapping[str, torch.Tensor], consumed: Mapping[str, torch.Tensor]) -> None:
        """Keep what a later prediction needs to know of this step."""
        if self.predictor == NO_PREDICTOR:
            return
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for _, group, p in groups_of(self.optimizer):
            name = names[id(p)]
            if p.grad is None:
                continue
            self._last[name] = LastStep(
                rate=float(group["lr"]),
                displacement=before[name] - p.detach() if name in before else None,
                gradient=consumed.get(name),
            )

    def _predict(self, version: int, distance: int) -> dict[str, torch.Tensor]:
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        predicted = dict(self.live())
        with torch.no_grad():
            begun = self._begun()
            for index, group, p in groups_of(self.optimizer):
                outlook, name = Outlook(self._rates.rates(index, version, distance)), names[id(p)]
                predicted[name] = predict(
                    self.optimizer, group, p,
                    setting=self.predictor, outlook=outlook, last=self._last.get(name), begun=begun.get(name),
                )  # fmt: skip
        return predicted
