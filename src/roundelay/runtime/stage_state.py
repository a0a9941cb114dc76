"""The state of one stage during training: weights, optimizer, tapes, gradients. Not thread-safe."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from roundelay.actor.machine import Run
from roundelay.checkpoint.in_flight_state import StageInFlight, Weights
from roundelay.checkpoint.shards import Shard
from roundelay.frontend import Mode, RngKey, StageFunction, StageTape
from roundelay.frontend.stages.retarget_device import CPU
from roundelay.frontend.stages.segment import Leaves, storages_of
from roundelay.frontend.stages.stage_function import Debt, debt_bytes
from roundelay.frontend.worker_model import WorkerModel
from roundelay.ir.exchange import WEIGHT_GRADIENT, ExchangePlan, all_reduce
from roundelay.ir.mesh import COPIES, REPLICAS
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.stage import StageSpec
from roundelay.ir.work import Settings, StageWork, Work
from roundelay.job import Job
from roundelay.observe.state_digest import Sums, sums_of
from roundelay.runtime.forward_replay import ResumeState, kept_at, last_steps
from roundelay.runtime.gradient_bucket import GradientBucket
from roundelay.runtime.gradients import Gradients
from roundelay.runtime.initial_state import Initial
from roundelay.runtime.moving_state import Carried, MovingState
from roundelay.runtime.older_versions import OlderVersions
from roundelay.runtime.optimizer_steps import OptimizerSteps
from roundelay.runtime.owned_weights import OwnedWeights
from roundelay.runtime.predicted_weights import PredictedWeights
from roundelay.transport.endpoint import Value
from roundelay.weight_prediction import LastStep

HELD = "weights", "gradients", "states", "gathered"
"""Kinds of tensors: weights in all versions, but for those whole that are gathered before use, which are the last."""


class Stage:
    """The state of one stage, and the passes and updates that change it.

    Args:
        captured: the model.
        spec: the stage as data.
        job: has the optimizer and scheduler.
        work: of its worker.
        initial: the state to start from, on the CPU; copied.
        device: the device where it computes and keeps its tensors.
    """

    def __init__(
        self,
        captured: WorkerModel,
        spec: StageSpec,
        job: Job,
        work: Work,
        initial: Initial,
        device: torch.device = CPU,
    ) -> None:
        self.spec, self.device = spec, device
        own, settings = work.stage(spec.stage), work.settings
        #: its number among the holders of the stage, which of the replicas it is of, and its place in the mesh
        self.holder, self.replica, self.part = holder, replica, part = own.holder, own.replica, own.place
        self._moves = own.moves
        if not own.updates:
            initial = replace(initial, optimizer={})
        self.halved = work.program.halved
        self.function = captured.stage(spec, device, halved=self.halved, part=part)
        self._parts = {"": self.function}
        self.clip = settings.clip
        whole = {
            n: _parameter(captured, n, captured.local(n, initial.parameters[n].detach(), part), device)
            for n in spec.parameters
        }
        captured.flatten_recurrent(spec, whole)
        self.parameters = dict(whole)
        of_segments = [segment.parameters for segment in spec.segments]
        self.owned = OwnedWeights(captured, own, settings.shards, self.parameters, of_segments)
        flight = initial.flight_of(spec.stage, self.holder)
        self.buffers = {n: initial.buffers_of(replica)[n].to(device, copy=True) for n in spec.buffers}
        self.steps = OptimizerSteps(captured, job, settings, initial, self.owned, first=holder == 0)
        #: by micro-batch, the tapes of the parts of its forward
        self.tapes: dict[int, list[StageTape]] = {}
        #: by micro-batch, the weights that its forward has read, where its backward reads them and its tape has none
        self._read: dict[int, Weights] = {}
        #: by micro-batch, what the first half of a backward leaves for :meth:`weight_half`
        self.debts: dict[int, Debt] = {}
        #: weights that the next forward reads in place of the rule's; set only to tamper with a run
        self.forward_weights: Mapping[str, torch.Tensor] | None = None
        #: gradients of the current batch
        self.gradients = _gradients(captured, own, settings, self.owned, whole)
        #: labels of a row, where the loss is a mean over labels; else 0
        self.labels_per_row = captured.graph.labels_per_row
        resumed = [n for n, p in self.parameters.items() if p.requires_grad and initial.updates]
        last = {n: LastStep(rate=0.0, displacement=None, gradient=None) for n in resumed}
        if flight is not None:
            last = last_steps(flight, device)
        self._predictions = PredictedWeights(
            settings.predictor, self.steps.optimizer, self.owned.weights, self.steps.rates, self.gradients, last
        )
        anew = work.program.over == "slots"
        self.in_flight = ResumeState(flight, device, anew=anew)
        self._older = OlderVersions(kept_at(flight, device), saves_before=anew and own.reads_older)
        carried = Carried(self._older.kept, self.in_flight.recorded)
        self._moving = MovingState(self.parameters, self.buffers, self.gradients, carried)
        #: the weights that the last forward has read, and the autograd leaves made of them; until the next update
        self._leaves: tuple[Mapping[str, torch.Tensor], dict[str, Sequence[Leaves]]] | None = None
        self._tape_bytes: dict[str, dict[tuple[Any, ...], int]] = {}  # by part of the forward, and shapes
        self._owed_bytes = 0
        #: the most bytes of each kind of tensors so far, each storage counted once
        self.held_bytes = dict.fromkeys(HELD, 0)
        self._batches = 0

    def part_of(self, run: Run) -> StageFunction:
        """What an instruction runs: all of the stage, or the segments between two boxings."""
        segments = run.instruction.segments
        if segments not in self._parts:
            start, stop = map(int, segments.split(":"))
            self._parts[segments] = self.function.part(start, stop)
        return self._parts[segments]

    def forward(self, run: Run, header: MicroBatch, inputs: Mapping[str, Any], draw: RngKey) -> dict[str, Any]:
        """Run the forward of one micro-batch, keep its tape for :meth:`backward`, and return its outputs by name.

        Args:
            run: the instruction, with the version that it reads and the distance of the prediction.
            header: header of the micro-batch.
            inputs: the inputs of :meth:`part_of` by name.
            draw: key of the random numbers.
        """
        mode: Mode = run.instruction.mode  # type: ignore[assignment]
        key = tuple([v.shape for v in inputs.values() if isinstance(v, torch.Tensor)])
        weights = self.forward_weights or self.weights(run)
        whole = {**weights, **self.owned.gathered} if self.owned.gathered else weights
        known = self._tape_bytes.setdefault(run.instruction.segments, {})
        kept = self._leaves_of(weights, run.instruction.segments) if mode == "stash" else ()  # others hold no weights
        outputs, tape = self.part_of(run).forward(
            whole, self.buffers, inputs, draw, mode=mode, measure=key not in known, cached_leaves=kept
        )
        tape.num_bytes = known.setdefault(key, tape.num_bytes)
        self.tapes.setdefault(header.g, []).append(tape)
        if run.instruction.runs_last:
            self._older.hold_from(run.keep)
            self._note(run, header, weights)
            self.in_flight.record_buffers(header, self.buffers)
        self._count_bytes()
        self.owned.drop()
        return outputs

    def pass_over(self, run: Run, header: MicroBatch) -> None:
        """Do what the forward or backward of a micro-batch without rows must do."""
        self.owned.drop()
        if run.instruction.opcode == "forward" and run.instruction.runs_last:
            if self.owned.stored:  # others have rows, and gather the same weights again
                self._note(run, header, self.weights(run))
            self._older.hold_from(run.keep)
            self.in_flight.record_buffers(header, self.buffers)
        elif run.instruction.opcode == "backward" and run.instruction.runs_first:
            self._read.pop(run.g, None)

    def _note(self, run: Run, header: MicroBatch, weights: Mapping[str, torch.Tensor]) -> None:
        """Keep the weights of a forward for its backward, and for a checkpoint, where they need them."""
        self.in_flight.record_forward(run, header, weights)
        if run.instruction.weights:
            self._read[run.g] = {name: weight.detach() for name, weight in weights.items()}

    def backward(
        self, run: Run, grads: Mapping[str, torch.Tensor | None], scale: float = 1.0
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Run the backward of one micro-batch, or its first half, and add its gradients to the batch's.

        Args:
            run: the instruction.
            grads: gradients of the outputs of :meth:`part_of`, by name.
            scale: loss scale of the micro-batch, by which its parameters' gradients are divided.

        Returns:
            Gradients of the inputs, still scaled, and of the parameters, by name.
        """
        tape, weights = self.tapes[run.g].pop(), {**self.weights(run), **self.owned.gathered}
        of_inputs, of_parameters = self.part_of(run).backward(tape, grads, weights)
        self._count_bytes()
        self.owned.drop()
        of_parameters = _unscaled(of_parameters, scale)
        self.gradients.add(of_parameters, run.g)
        self._count_bytes()
        if self.halved:
            self.debts.setdefault(run.g, []).extend(tape.debt)
        if run.instruction.runs_first:
            del self.tapes[run.g]
            self._read.pop(run.g, None)
            if self.halved:
                self._owed_bytes = self._owed_bytes or debt_bytes(self.debts[run.g])
            if run.header is not None:
                self.gradients.note(run.header)
        return of_inputs, of_parameters

    def weight_half(self, g: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """Run the second half of a backward, add its gradients of parameters to the batch's, and return them by name.

        Args:
            g: micro-batch.
            scale: its loss scale, by which they are divided.
        """
        of_parameters = _unscaled(self.function.backward_weights(self.debts.pop(g)), scale)
        self.gradients.add(of_parameters, g)
        return of_parameters

    def update(self, version: int, norm: float | None = None, *, saved: bool = False) -> None:
        """Run one optimizer step with the batch's gradients.

        Weights that a tape holds or a later forward will read are not modified: the step then works on a copy, and the
        old tensors live as long as they are referenced.

        Args:
            version: updates made before.
            norm: 2-norm of the whole model's gradient to clip by, if the plan says so and one is known.
            saved: whether a checkpoint follows.

        Raises:
            JobError: the user's program has changed a learning rate or another option of the optimizer.
        """
        self.steps.give(self.gradients.whole(norm))
        self._count_bytes(updating=True)
        if self._moves:
            self._older.release(version)
        self._older.keep(version, self.parameters, saved=saved)
        held, self._leaves = self._held(), None
        for parameter in self.parameters.values():
            if parameter.data_ptr() in held:
                parameter.data = parameter.data.clone()
        self.steps.step(self._predictions.watching())
        self.gradients.updated()
        self._predictions.clear()
        self._count_bytes(updating=True)
        self._batches += 1

    def _leaves_of(self, weights: Mapping[str, torch.Tensor], segments: str) -> Sequence[Leaves]:
        """Return autograd leaves of the weights, shared by all forwards that read these before the next update."""
        if self._leaves is None or self._leaves[0] is not weights:
            self._leaves = weights, {}
        if segments not in self._leaves[1]:
            self._leaves[1][segments] = self._parts[segments].leaves(weights)
        return self._leaves[1][segments]

    def _held(self) -> set[int]:
        """Return the addresses of weights that will be read again; predicted weights are copies and do not count."""
        read = {weight.data_ptr() for weights in self._read.values() for weight in weights.values()}
        on_tapes = {leaf.data_ptr() for _, leaf in self._stashed()}
        return self._older.addresses() | self.in_flight.held_addresses() | read | on_tapes

    def _stashed(self) -> list[tuple[str, torch.Tensor]]:
        """Return the weights that tapes hold, with their names."""
        tapes = [tape for of_parts in self.tapes.values() for tape in of_parts if tape.mode == "stash"]
        return [named for tape in tapes for part in tape.tapes for named in part.parameters.items()]

    def _count_bytes(self, *, updating: bool = False) -> None:
        """Note what is held in the first batch, the second, the fourth and so on, as a tensor takes a microsecond."""
        if self._batches & (self._batches - 1):
            return
        updated = self.owned.weights.values()
        held: dict[str, list[Any]] = {"gathered": [*self.owned.gathered.values()]}
        held["gradients"] = [*self.gradients.held(), *(weight.grad for weight in updated if updating)]
        if updating:
            predicted, of_steps = self._predictions.held()
            older = (*self._older.kept.values(), *predicted, *self._read.values())
            read = [weight for _, weight in self._stashed()]
            held["weights"] = [*updated, *self.parameters.values(), *read, *(w for of in older for w in of.values())]
            held["states"] = [*of_steps, *(value for state in self.steps.live().values() for value in state.values())]
        for kind, tensors in held.items():
            self.held_bytes[kind] = max(self.held_bytes[kind], sum(storages_of(tensors).values()))

    def leave_state(self) -> None:
        """Have no weights at the beginning: another holder has the stage's state."""
        self._moving.leave()

    def pass_state(self, version: int) -> tuple[Value, ...]:
        """Hand on the stage's state, after so many updates, as a message."""
        return self._moving.pass_on(version, awaited=bool(self.tapes))

    def take_state(self, version: int, message: tuple[Value, ...]) -> None:
        """Take the stage's state from such a message."""
        self._moving.take(version, message)
        self._leaves = None

    def live(self) -> Mapping[str, torch.Tensor]:
        """Return the newest weights; they must not be modified."""
        return self.parameters

    def weights(self, run: Run) -> Mapping[str, torch.Tensor]:
        """Return the weights that a forward or backward reads: the newest, older ones, or predicted ones.

        Of those that are gathered before use, its parts.
        """
        for_forward = run.instruction.reads_forward
        if not for_forward and run.g in self._read:
            return self._read[run.g]
        if self.in_flight.left and (again := self.in_flight.replayed_weights(run)) is not None:
            return again
        if run.reads != run.version:
            return self._older.kept[run.reads]
        if run.distance <= 0:
            return self.live()
        return self._predictions.weights("forward" if for_forward else "backward", run.version, run.distance)

    def tape_bytes(self) -> int:
        """Return the most bytes that one forward has left for its backward, without parameters."""
        return sum(max(known.values()) for known in self._tape_bytes.values())

    def owed_bytes(self) -> int:
        """Return the bytes that the first half of a backward leaves for the second."""
        return self._owed_bytes

    def state(self, updates: int = -1) -> tuple[Weights, dict[str, dict[str, Any]], Weights]:
        """Return copies of weights, optimizer state with averages of weights, and buffers, by name, on the CPU.

        The buffers are those after the last forward of the first ``updates`` batches, if a header announced that this
        state would be needed; else the current ones.
        """
        weights = {n: p.detach().to(CPU, copy=True) for n, p in self.owned.weights.items()}
        return weights, self.steps.entries(), self.own_buffers(updates)

    def own_buffers(self, updates: int = -1) -> Weights:
        """Return copies of the buffers as :meth:`state` does."""
        recorded = self.in_flight.buffers(updates)
        buffers = self.buffers if recorded is None else recorded
        return {n: b.to(CPU, copy=True) for n, b in buffers.items()}

    def state_sums(self, names: Collection[str]) -> Sums:
        """The sums of what this holder reports of its newest state, with the buffers of these names."""
        found = sums_of("buffer", {n: b for n, b in self.buffers.items() if n in names and not self.replica})
        for name, entries in self.steps.live().items():
            weight = self.owned.weights.get(name)
            if weight is None:
                found |= sums_of(name, entries)
            elif name in self.owned.names:
                held = {"weight": weight} if weight.numel() else {}  # another holder may have the stage's state
                found |= sums_of(name, {**held, **entries}, Shard(self.owned.ranges(name), weight))
        return found

    def state_tensors(self) -> dict[str, Any]:
        """Return the newest weights, buffers and entries of the optimizer's state by name; none may be modified."""
        entries = {f"{name} {key}": value for name, own in self.steps.live().items() for key, value in own.items()}
        return {**self.parameters, **self.buffers, **entries}

    def flight(self, updates: int) -> StageInFlight:
        """Return what is in flight after ``updates`` updates, unaffected by later forwards and updates."""
        older = self._older.checkpointed(updates, copied=self._moves)
        return self.in_flight.hand_over(updates, *older, self._predictions.last)


def _gradients(
    captured: WorkerModel, own: StageWork, settings: Settings, owned: OwnedWeights, whole: Mapping[str, torch.Tensor]
) -> Gradients:
    """The sums of a stage's gradients on a holder, with how they are exchanged with others."""
    trained = {n: p for n, p in whole.items() if p.requires_grad}

    def bucket(exchange: ExchangePlan) -> GradientBucket:
        over_replicas = exchange.axis == REPLICAS
        names = [n for n in trained if (n not in owned.split if over_replicas else captured.has_partial_gradient(n))]
        device = next((weight.device for weight in whole.values()), CPU)
        return GradientBucket.of([(n, trained[n]) for n in names if n not in exchange.unused], device)

    return Gradients(
        list(whole),
        settings.clip,
        scaled=settings.loss_scale.on,
        shares=not captured.graph.loss_counts,
        buckets={
            exchange.axis: bucket(exchange)
            for exchange in own.exchanges
            if exchange.kind == WEIGHT_GRADIENT and exchange.phases in ((), all_reduce()) and exchange.axis != COPIES
        },
        counted=owned.names,
        due=owned.due,
        made=owned.made,
        copied=owned.copied,
        shard=own.replica % settings.shards,
    )


def _parameter(captured: WorkerModel, name: str, weight: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
    return torch.nn.Parameter(weight.to(device, copy=True), captured.graph.parameters[name].trainable)


def _unscaled(gradients: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    return gradients if scale == 1.0 else {name: torch.div(grad, scale) for name, grad in gradients.items()}
