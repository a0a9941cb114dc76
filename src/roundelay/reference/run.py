"""The reference loop, one micro-batch after the other.

::

    for g = 0..G-1:
        for r = 0..R-1:
            x_0 = X_{g,r}
            for k up:    A = forward_weights(k, g);  x_{k+1} = f_k(x_k; A, rng(k, gR + r))
            for k down:  d_k, gamma = VJP_mode(f_k; x_k, A, B = backward_weights(k, g))(d_{k+1});  acc_{k,r} += gamma
        if g ends its batch:  W[t+1], S[t+1] = Opt(W[t], S[t], acc_0 + ... + acc_{R-1}, lr(t));  acc = 0

Each of the R replicas has weights in common with the others, and buffers of its own. One micro-batch at a time is
enough, because every version that g reads is at most the number of its own batch, and so is complete once the
micro-batches before g are done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import Any, final

import torch

from roundelay.errors import InternalError
from roundelay.ir.averages import EMA
from roundelay.ir.clip import EPSILON
from roundelay.ir.graph import COUNT, LABELS, LOSS, METRIC, TERMS
from roundelay.ir.micro_batch import MicroBatch
from roundelay.reference.gradients import ScaleTable, clipped, norm_of, whole_norm
from roundelay.reference.mesh import Each, backward, counted, divisions, forward, local, on, updated
from roundelay.reference.predict import Ahead, distance, predict
from roundelay.reference.replica import Replica, add_made, in_order, total_divisor, total_gradients
from roundelay.reference.run_inputs import (
    Audit,
    Named,
    OptimizerFactory,
    ReferenceResult,
    ReferenceStage,
    SchedulerFactory,
    Setting,
    Tensors,
)
from roundelay.reference.trainer import Recipe, Trainer
from roundelay.schedules import schedule_named

Pass = tuple[Tensors, list[list[Any]]]
"""The weights that a stage's forward read, and the tapes of its parts on every worker of the mesh."""


def run_reference(  # noqa: PLR0913  a run has this many inputs, and callers have them separately
    setting: Setting,
    stages: Sequence[ReferenceStage],
    named: Named,
    buffers: Sequence[Tensors],
    stream: Iterable[Sequence[tuple[MicroBatch, dict[str, Any]]]],
    optimizer: OptimizerFactory,
    scheduler: SchedulerFactory | None,
    draw: Callable[[int], Any],
    *,
    audit: Audit | None = None,
    start: Callable[[torch.optim.Optimizer], None] | None = None,
) -> ReferenceResult:
    """Train in one process, literally by the formulas of the rule.

    Args:
        setting: rule, predictor, backward mode and so on.
        stages: in order; the last one returns ``loss``, and ``loss.count`` if the loss returns (sum, count).
        named: every parameter of the model, copies that are updated in place, each on the device of its stage.
        buffers: of each replica, by name; replaced, not modified.
        stream: headers and values by name, those of all replicas together, in order of g. The first header defines the
            start of the run: its g, and the version, which is the number of its batch.
        optimizer: creates an optimizer over ``named``; called again to look ahead in the learning rate schedule.
        scheduler: creates a scheduler that is stepped after every update, or None.
        draw: a micro-batch's number among those of all replicas, to the key of its random numbers.
        audit: called with (``forward``, k, h, g, outputs), (``backward``, k, h, g, gradients: those of inputs under
            ``d NAME``) and (``update``, k, h, t, weights after it) of every holder h, in causal order.
        start: loads the state at the start into an optimizer, after its scheduler has reached that version.

    Returns:
        Losses, and the state at the end.

    Raises:
        PlanError: the rule predicts and the predictor setting is unknown.
        InternalError: the batches of the stream are not numbered consecutively, or no stage took a gradient.
    """
    headers = iter(stream)
    first = next(headers, None)
    with torch.no_grad():
        version = first[0][0].batch if first else 0
        recipe = Recipe(optimizer, scheduler, start, version, setting.numbers)
        threads = {name: stage.threads for stage in stages for name in stage.parameters}
        trainer = Trainer(recipe, named, divisions(stages, setting.shards or len(buffers)), threads)
        run = _Run(
            setting, stages, trainer, buffers, draw, audit or (lambda kind, stage, replica, number, tensors: None)
        )
        for dealt in chain([first] if first else [], headers):
            run.micro_batches(dealt)
        return run.result()


@final
class _Run:
    """The state of one reference run."""

    def __init__(
        self,
        setting: Setting,
        stages: Sequence[ReferenceStage],
        trainer: Trainer,
        buffers: Sequence[Tensors],
        draw: Callable[[int], Any],
        audit: Audit,
    ) -> None:
        self._setting = setting
        self._stages = stages
        self._trainer = trainer
        self._draw = draw
        self._audit = audit
        self._flushes = schedule_named(setting.rule.schedule).window == "batch"
        self._start = trainer.live
        self._done = 0  # micro-batches of this run that are done; while one runs, its number i = g - g_start
        self._batch_ends: list[int] = []  # micro-batches of this run up to the end of each finished batch
        self._gradients: Tensors = {}  # of the batch that is being updated
        self._workers = range(len(stages[0].functions))  # of the mesh
        self._replicas = [Replica(r, own, len(self._workers)) for r, own in enumerate(buffers)]
        self._shards = setting.shards or len(self._replicas)
        self._counting = len(self._replicas) if any(stage.states for stage in stages) else 1
        self._norms: dict[int, float | None] = {}  # of the whole model's gradient, by batch
        self._scales = ScaleTable(setting.loss_scale, setting.loss_scale_at, trainer.live)
        self._result = ReferenceResult()
        averages = setting.ema_at or {}
        self._averages = {
            n: averages.get(n, weight).to(weight.device, copy=True) for n, weight in self._trained() if setting.ema
        }

    def micro_batches(self, dealt: Sequence[tuple[MicroBatch, dict[str, Any]]]) -> None:
        """Run forward and backward of a micro-batch of each replica, and the update if they end their batch."""
        last = dealt[-1][0]
        self._check_number(last)
        newest = self._version(0) - 1  # the last batch that stage 0 had finished before this forward
        scale = self._scales.enter(newest)
        for replica, (header, values) in zip(self._replicas, dealt, strict=False):
            if header.rows:
                self._micro_batch(replica, header, dict(values), scale)
        for first in range(0, len(self._replicas), self._shards):
            add_made(self._replicas[first : first + self._shards])
        self._done += 1
        for replica, (header, _) in zip(self._replicas, dealt, strict=False):
            replica.note(self._done, header)
        if last.ends_batch:
            self._update(last, newest)
        for replica in self._replicas:
            replica.begun.pop(self._done - len(self._stages), None)
        self._trainer.forget(min(self._trainer.live - 1, *(self._version(k) for k in range(len(self._stages)))))

    def _micro_batch(self, replica: Replica, header: MicroBatch, values: dict[str, Any], scale: float) -> None:
        """Run forward and backward of one micro-batch."""
        each: Each = [dict(values) for _ in self._workers]
        passes = self._forward(replica, header, each)
        values = each[0]
        self._result.losses[header.number] = float(values[LOSS])
        self._result.metrics[header.number] = {
            name[len(METRIC) :]: (float(value), float(values.get(TERMS + name[len(METRIC) :], 0.0)))
            for name, value in values.items()
            if name.startswith(METRIC)
        }
        if self._setting.loss_scale.on:
            self._result.scales[header.number] = scale
        self._backward(replica, header, passes, self._loss_gradient(replica, header, values) * scale, scale)

    def result(self) -> ReferenceResult:
        """Return the results, with the state at the end."""
        self._result.parameters = self._trainer.parameters()
        self._result.optimizer_state = self._trainer.state()
        self._trainer.rejoin()
        for name, average in self._averages.items():
            self._result.optimizer_state.setdefault(name, {})[EMA] = average
        self._result.updates = self._trainer.live
        self._result.loss_scale = self._scales.last()
        self._result.buffers = [replica.buffers for replica in self._replicas]
        return self._result

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        """Return every parameter that a stage trains, with its current weights."""
        owned = {name for stage in self._stages for name in stage.parameters}
        return [(name, weight) for name, weight in self._trainer.trained() if name in owned]

    def _version(self, stage: int) -> int:
        """Return U, the updates that the stage had done before this forward, which runs ``lag`` micro-batches ahead."""
        if self._flushes or self._setting.staggered:
            return self._trainer.live
        lag = len(self._stages) - 1 - stage
        backwards = max(0, self._done - lag)
        return self._start + sum(1 for end in self._batch_ends if end <= backwards)

    def _forward_weights(self, replica: Replica, header: MicroBatch, stage: int) -> Tensors:
        newest = self._version(stage)
        if not self._setting.rule.predicts:
            return self._weights(stage, self._version_read(header, stage, newest))
        s = self._distance(header, stage, newest, len(self._stages) - 1 - stage)
        return self._predicted_weights(replica, stage, newest, s)

    def _version_read(self, header: MicroBatch, stage: int, newest: int) -> int:
        """Return the version that the rule states, or the newest if the stage does not have it yet (short batches)."""
        rule, staggered = self._setting.rule, self._setting.staggered
        if rule.versions == "entry":
            return self._version(0)
        number = header.index * header.replicas + header.replica if staggered else header.index
        if rule.fresh is None or rule.is_fresh(number + 1, stage + 1, len(self._stages), staggered):
            return newest
        return min(newest, max(self._start, header.batch - 1))

    def _backward_weights(self, replica: Replica, header: MicroBatch, stage: int) -> Tensors:
        """Return the weights of a backward that does not read those of its forward."""
        live = self._trainer.live
        if self._setting.rule.backward_reads(self._setting.mode) == "live":
            return self._weights(stage, live)
        return self._predicted_weights(replica, stage, live, self._distance(header, stage, live, 0))

    def _distance(self, header: MicroBatch, stage: int, version: int, lag: int) -> int:
        """Return the number of updates between a version and the moment for which weights are predicted."""
        rule, predictor = self._setting.rule, self._setting.predictor
        if rule.target == "next":
            return 1
        size = len(self._stages)
        s = distance(predictor, size - 1 - lag, size, self._trainer.live - version)
        if rule.target == "backward":
            return s
        if predictor == "paper":
            return s + stage // 2
        # until stage 0's backward this stage runs the backwards of stage // 2 further micro-batches
        return s + sum(1 for n in range(1, stage // 2 + 1) if (header.index + n) % header.count == 0)

    def _predicted_weights(self, replica: Replica, stage: int, version: int, s: int) -> Tensors:
        weights = self._weights(stage, version)
        begun = self._partial_gradients(replica, stage) if self._setting.predictor == "partial" else {}
        return {name: self._predicted(name, weight, version, s, begun.get(name)) for name, weight in weights.items()}

    def _partial_gradients(self, replica: Replica, stage: int) -> Tensors:
        """Return mean gradients of the unfinished batch, as far as this replica's stage had summed them by then."""
        sums, divisor = replica.begun.get(self._done - (len(self._stages) - 1 - stage), ({}, 1.0))
        means = {n: torch.div(sums[n], divisor) for n in self._stages[stage].parameters if n in sums}
        if self._setting.loss_scale.on and not math.isfinite(norm_of(means.values())):
            return {}
        return self._clipped(means)

    def _predicted(
        self, name: str, weight: torch.Tensor, version: int, s: int, begun: torch.Tensor | None
    ) -> torch.Tensor:
        past = self._trainer.versions[version].pasts.get(name)
        if past is None:  # a parameter that the optimizer does not have
            return weight
        if begun is not None:
            past = replace(past, begun=begun)
        ahead = Ahead(s, lambda i: self._trainer.rate(name, version, i))
        return predict(self._setting.predictor, weight, past, ahead)

    def _weights(self, stage: int, version: int) -> Tensors:
        weights = self._trainer.versions[version].weights
        return {name: weights[name] for name in self._stages[stage].parameters}

    def _forward(self, replica: Replica, header: MicroBatch, values: Each) -> list[Pass]:
        """Run the forwards of all stages and add their outputs to every worker's ``values``."""
        passes = []
        for k, stage in enumerate(self._stages):
            stage.use_threads()
            read = self._forward_weights(replica, header, k)
            own = self._holding(replica, header, stage)
            shared = own.buffers if stage.updater is None else self._replicas[0].buffers
            buffers = [{name: on(stage.device, shared[name]) for name in stage.buffers} for _ in values]
            key, weights = self._draw(header.number), self._local(stage, read)
            tapes = forward(stage, weights, buffers, values, key, self._setting.mode)
            shared.update(buffers[0])
            for worker, known in enumerate(values):
                outputs = {name: known[name] for name in stage.functions[worker].outputs}
                tensors = {n: v for n, v in outputs.items() if isinstance(v, torch.Tensor)}
                self._audit("forward", k, self._holder(own, worker), header.g, tensors)
            passes.append((read, tapes))
        return passes

    def _holding(self, replica: Replica, header: MicroBatch, stage: ReferenceStage) -> Replica:
        """The replica that a micro-batch has on a stage: where holders take turns, the one whose turn it is."""
        return self._replicas[header.g % stage.turns] if stage.turns else replica

    def _local(self, stage: ReferenceStage, whole: Tensors) -> list[Tensors]:
        """What every worker has of a stage's weights."""
        return [local(stage, whole, worker) for worker in self._workers]

    def _holder(self, replica: Replica, worker: int) -> int:
        return replica.number * len(self._workers) + worker

    def _loss_gradient(self, replica: Replica, header: MicroBatch, values: dict[str, Any]) -> torch.Tensor:
        """Return the gradient of the loss: its weight in the batch's mean, or 1 if the update divides by the count."""
        loss = values[LOSS]
        if LABELS in values and not header.whole:  # weighted by labels; the update divides by the sum of the weights
            present = float(values[LABELS]) / (header.rows * self._setting.labels_per_row)
            missing = header.weight * (1.0 - present)
            for k, stage in enumerate(self._stages):
                sums = self._holding(replica, header, stage).missing
                sums[k] = sums.get(k, 0.0) + missing
            return torch.full_like(loss, header.weight - missing)
        if COUNT not in values:
            return torch.full_like(loss, header.weight)
        count = float(values[COUNT])
        self._result.counts[header.number] = count
        for k, stage in enumerate(self._stages):
            sums = self._holding(replica, header, stage).counts
            sums[k] = sums[k] + count if k in sums else count
        return torch.ones_like(loss)

    def _backward(
        self, replica: Replica, header: MicroBatch, passes: list[Pass], loss_gradient: torch.Tensor, scale: float
    ) -> None:
        """Run the backwards of all stages; gradients follow the chain of a value's readers, so none is summed here."""
        gradients: Each = [{LOSS: loss_gradient} for _ in self._workers]
        for k in reversed(range(len(self._stages))):
            stage, (read, tapes) = self._stages[k], passes[k]
            stage.use_threads()
            holding = self._holding(replica, header, stage)
            if self._setting.rule.backward_reads(self._setting.mode) != "forward":
                read = self._backward_weights(replica, header, k)
            of_parameters = backward(stage, self._local(stage, read), tapes, gradients)
            if self._setting.loss_scale.on:
                of_parameters = [{n: gradient / scale for n, gradient in own.items()} for own in of_parameters]
            for worker, own in enumerate(of_parameters):
                inputs, known = stage.functions[worker].inputs, gradients[worker]
                of_inputs = {f"d {n}": known[n] for n in inputs if known.get(n) is not None}
                self._audit("backward", k, self._holder(holding, worker), header.g, {**of_inputs, **own})
            holding.add(of_parameters, stage.made)
        if left := [name for own in gradients for name in own]:
            raise InternalError(
                f"the reference's backward of micro-batch {header.g}",
                got=f"gradients of {', '.join(left)} that no stage took",
                expected="every gradient to be that of an output of an earlier stage",
                remedy="Report this as a bug: the stages' inputs and outputs do not match.",
            )

    def _update(self, last: MicroBatch, newest: int) -> None:
        batch = last.batch
        self._gradients = total_gradients(self._replicas, self._stages, last.g, self._shards)
        divisors = [total_divisor(in_order(self._replicas, s, last.g), k) for k, s in enumerate(self._stages)]
        norms = self._norms_of_workers(divisors[0])  # the same of all stages, unless holders take turns
        whole = self._norms[batch] = whole_norm(norms)
        if self._setting.loss_scale.on:
            self._scales.end(batch, math.isfinite(whole))
            self._skip(batch, norms)
        # if the losses of the batch summed no terms, the count is 0 and so are the gradients
        gradients = {
            n: torch.div(self._gradients[n], divisor) if divisor else self._gradients[n]
            for stage, divisor in zip(self._stages, divisors, strict=True)
            for n in stage.parameters
            if n in self._gradients
        }
        bound_by = {"previous": newest, "global": batch}.get(self._setting.clip.by)
        clipped = self._clipped(gradients) if bound_by is None else self._bounded(gradients, self._norms.get(bound_by))
        self._trainer.step(clipped)
        self._averages = {
            n: torch.lerp(self._averages[n], weight, 1.0 - self._setting.ema)
            for n, weight in self._trained()
            if self._setting.ema
        }
        self._batch_ends.append(self._done)
        self._gradients = {}
        for replica in self._replicas:
            replica.begin_batch()
            replica.begun[self._done] = {}, 1.0
            for k, stage in reversed([*enumerate(self._stages)]):
                if not _updates(stage, replica.number):
                    continue
                for worker, own in enumerate(self._local(stage, self._weights(k, self._trainer.live))):
                    its = updated(stage, own, replica.number, self._shards)
                    self._audit("update", k, self._holder(replica, worker), batch, its)

    def _clipped(self, gradients: Tensors) -> Tensors:
        """Return every stage's gradients times min(1, bound / (their norm + epsilon)) if the plan clips by stage."""
        clip = self._setting.clip
        if clip.by != "stage":
            return gradients
        result: Tensors = {}
        for stage in self._stages:
            stage.use_threads()
            own = {name: gradients[name] for name in stage.parameters if name in gradients}
            if own:
                result |= clipped(own, clip)
        return result

    def _norms_of_workers(self, divisor: float | None) -> list[float]:
        """Return the norm of the gradients that every stage's workers have, if clipping or the loss scale needs it."""
        if not (self._setting.clip.whole or self._setting.loss_scale.on):
            return []
        norms = []
        for stage in self._stages:
            stage.use_threads()
            for replica, worker in product(range(self._counting), self._workers):
                own = counted(stage, self._gradients, worker, replica, self._shards)
                norms.append(norm_of(own.values()))
        return [norm / divisor for norm in norms] if divisor else norms

    def _skip(self, batch: int, norms: list[float]) -> None:
        """Discard gradients of stages where they are not finite; of all stages if the rule flushes."""
        size = len(self._workers) * self._counting
        of_stages = [norms[start : start + size] for start in range(0, len(norms), size)]
        infinite = [not all(map(math.isfinite, own)) for own in of_stages]
        if any(infinite):
            self._norms[batch] = self._norms.get(batch - 1)
        for stage, skipped in zip(self._stages, infinite, strict=True):
            if skipped or (self._flushes and any(infinite)):
                self._gradients = {n: g for n, g in self._gradients.items() if n not in stage.parameters}

    def _bounded(self, gradients: Tensors, norm: float | None) -> Tensors:
        """Return every gradient times min(1, bound / (norm + epsilon)), if a norm is known."""
        if norm is None or self._setting.clip.norm / (norm + EPSILON) > 1.0:
            return gradients
        return {name: gradient * (self._setting.clip.norm / (norm + EPSILON)) for name, gradient in gradients.items()}

    def _check_number(self, header: MicroBatch) -> None:
        if header.batch != self._trainer.live:
            raise InternalError(
                f"micro-batch {header.g} of the reference's stream",
                got=f"batch {header.batch}",
                expected=f"batch {self._trainer.live}, the number of updates done",
                remedy="Report this as a bug: batches must be numbered consecutively, and each must end.",
            )


def _updates(stage: ReferenceStage, replica: int) -> bool:
    """Whether a replica makes a stage's updates: all do, or those that take turns, or one."""
    if stage.updater is not None:
        return replica == stage.updater
    return not stage.turns or replica < stage.turns
