"""Replays a run whose order was free, from what each stage wrote down of it: one letter for each action.

``F`` is a forward, ``B`` a backward, with the update if it ends its batch. A stage's channels are queues, so letters
need no numbers. They say in full what was computed: a forward reads the weights after the updates before it, a backward
those of its forward. Between stages order matters only where a value or a gradient has to be there.

The replay has an optimizer for each stage. From a digest of a stage's state after so many letters it knows whether the
run computed the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch

from roundelay.ir.averages import EMA
from roundelay.ir.graph import COUNT, LABELS, LOSS, METRIC, TERMS
from roundelay.ir.micro_batch import MicroBatch
from roundelay.reference.gradients import clipped
from roundelay.reference.mesh import Each, backward, forward, local
from roundelay.reference.run_inputs import Audit, Named, ReferenceResult, ReferenceStage, Setting, Tensors
from roundelay.reference.trainer import Recipe, step_once

FORWARD, BACKWARD = "F", "B"

States = Callable[[torch.optim.Optimizer, Named], dict[str, dict[str, Any]]]
"""The state that an optimizer has of some parameters, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStage:
    """One stage, and what is known of its run.

    Args:
        stage: its functions.
        letters: of its actions, those of ``flight`` first.
        digests: of its state, by the number of these letters before.
        before: the stages from which values come.
        behind: the stages from which gradients come.
        flight: by micro-batch, the weights of forwards that had run at the start, which are run again.
    """

    stage: ReferenceStage
    letters: str
    digests: Mapping[int, str]
    before: tuple[int, ...]
    behind: tuple[int, ...]
    flight: Mapping[int, Tensors] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay has found.

    Args:
        result: what it has computed.
        letters: how many it has replayed.
        digests: how many it has compared.
        differing: (stage, number of letters) of those that differ, in the order of the replay.
        stuck: (stage, number of letters) where a letter stands that nothing allows, or one is missing; causes first.
    """

    result: ReferenceResult
    letters: int
    digests: int
    differing: tuple[tuple[int, int], ...]
    stuck: tuple[tuple[int, int], ...]


def replay(  # noqa: PLR0913  a run has this many inputs, and callers have them separately
    setting: Setting,
    stages: Sequence[ReplayedStage],
    named: Named,
    buffers: Tensors,
    stream: Iterator[Sequence[tuple[MicroBatch, dict[str, Any]]]],
    recipe: Recipe,
    draw: Callable[[int], Any],
    digest: Callable[[Mapping[str, object]], str],
    states: States,
    first: tuple[int, int] = (0, 0),
    *,
    audit: Audit | None = None,
    whole: bool = True,
) -> Replayed:
    """Compute what the letters say.

    Args:
        setting: how the run updates.
        stages: in order.
        named: every parameter of the model, copies that are updated in place.
        buffers: by name; replaced, not modified.
        stream: headers and values by name, from the first micro-batch on.
        recipe: how to create an optimizer over ``named``.
        draw: a micro-batch's number to the key of its random numbers.
        digest: of tensors by name.
        states: the state that an optimizer has of some parameters.
        first: the first micro-batch, and the updates before it.
        audit: as of :func:`roundelay.reference.run.run_reference`.
        whole: whether the letters are all to the run's end; else the replay ends where they do.
    """
    with torch.no_grad():
        own = [_Stage(number, given, named, recipe, first) for number, given in enumerate(stages)]
        for stage in own if setting.ema else ():
            stage.start_averages(setting.ema_at or {})
        silent: Audit = lambda kind, stage, replica, number, tensors: None  # noqa: E731
        running = _Replay(setting, own, dict(buffers), stream, draw, (digest, states), audit or silent)
        result = running.run(whole=whole)
    result.result.parameters = {name: parameter.detach() for name, parameter in named}
    return result


@final
class _Stage:
    """The state of one stage."""

    def __init__(self, number: int, given: ReplayedStage, named: Named, recipe: Recipe, first: tuple[int, int]) -> None:
        self.number, self.given, self.stage = number, given, given.stage
        self.done = 0  # letters
        self.forwards = self.backwards = first[0]  # the next micro-batch of either
        self.updates = first[1]
        self.named = [(name, parameter) for name, parameter in named if name in given.stage.parameters]
        given.stage.use_threads()
        self.optimizer, self._scheduler = recipe.build(named)
        self.weights = self._weights()
        self.gradients: Tensors = {}
        self.averages: Tensors = {}
        #: by micro-batch: the weights that its forward has read, and its tapes
        self.passes: dict[int, tuple[Tensors, list[list[Any]]]] = {}

    def _weights(self) -> Tensors:
        return {name: parameter.detach().clone() for name, parameter in self.named}

    def start_averages(self, known: Mapping[str, torch.Tensor]) -> None:
        """Begin moving averages: from known ones, or from the weights."""
        trained = {name: parameter.detach() for name, parameter in self.named if parameter.requires_grad}
        self.averages = {name: known.get(name, own).to(own.device, copy=True) for name, own in trained.items()}

    def add(self, gradients: Tensors) -> None:
        """Add a micro-batch's gradients to those of its batch."""
        for name, gradient in gradients.items():
            self.gradients[name] = self.gradients[name] + gradient if name in self.gradients else gradient

    def update(self, gradients: Tensors, ema: float) -> None:
        """Step the optimizer."""
        for name, parameter in self.named:
            parameter.grad = gradients[name].clone() if name in gradients else None
        step_once(self.optimizer, self._scheduler)
        for _, parameter in self.named:
            parameter.grad = None
        self.weights, self.gradients, self.updates = self._weights(), {}, self.updates + 1
        self.averages = {n: torch.lerp(own, self.weights[n], 1.0 - ema) for n, own in self.averages.items()}


@final
class _Replay:
    """The state of one replay."""

    def __init__(
        self,
        setting: Setting,
        stages: Sequence[_Stage],
        buffers: Tensors,
        stream: Iterator[Sequence[tuple[MicroBatch, dict[str, Any]]]],
        draw: Callable[[int], Any],
        looks: tuple[Callable[[Mapping[str, object]], str], States],
        audit: Audit,
    ) -> None:
        self._setting, self._stages, self._buffers, self._stream = setting, stages, buffers, stream
        self._draw, (self._digest, self._states), self._audit = draw, looks, audit
        self._headers: dict[int, MicroBatch] = {}
        self._values: dict[int, Each] = {}
        self._gradients: dict[int, Each] = {}
        self._divisors: dict[int, tuple[float, float]] = {}  # by micro-batch: summed terms, missing weight
        self._result = ReferenceResult()
        self._compared, self._differing = 0, list[tuple[int, int]]()

    def run(self, *, whole: bool) -> Replayed:
        """Replay letters as long as one of them is possible."""
        for own in self._stages:
            self._compare(own)
        ready = True
        while ready:
            ready = False
            for own in reversed(self._stages):
                while self._is_possible(own):
                    self._act(own)
                    self._compare(own)
                    ready = True
        stuck = self._unfinished() if whole else self._impossible()
        stuck.sort(key=lambda own: own.done < len(own.given.letters) and bool(self._missing(own)))  # causes first
        places = tuple((own.number, own.done) for own in stuck)
        letters = sum(own.done for own in self._stages)
        return Replayed(self._results(), letters, self._compared, tuple(self._differing), places)

    def _unfinished(self) -> list[_Stage]:
        """The stages that have not done all of the run."""
        furthest = max(own.forwards for own in self._stages)
        return [o for o in self._stages if o.done < len(o.given.letters) or {o.forwards, o.backwards} != {furthest}]

    def _impossible(self) -> list[_Stage]:
        """The stages whose next letter no further letters of others would allow, nor further data."""
        left = [own for own in self._stages if own.done < len(own.given.letters)]
        while able := [own for own in left if self._may_go_on(own, {other.number for other in left})]:
            left = [own for own in left if own not in able]
        return left

    def _may_go_on(self, own: _Stage, left: Collection[int]) -> bool:
        """Whether a stage waits for data, or for a stage that is not one of ``left``."""
        missing = {*self._missing(own)}
        if own.given.letters[own.done] == FORWARD:
            return not missing or bool(missing - {*left})
        return own.backwards < own.forwards and bool(missing - {*left})

    def _missing(self, own: _Stage) -> list[int]:
        """The stages from which something is missing for a stage's next letter."""
        if own.given.letters[own.done] == FORWARD:
            return [j for j in own.given.before if self._stages[j].forwards <= own.forwards]
        return [j for j in own.given.behind if self._stages[j].backwards <= own.backwards]

    def _is_possible(self, own: _Stage) -> bool:
        """Whether what a stage's next letter needs is there."""
        if own.done == len(own.given.letters):
            return False
        if self._missing(own):
            return False
        return self._known(own.forwards) if own.given.letters[own.done] == FORWARD else own.backwards < own.forwards

    def _known(self, g: int) -> bool:
        """Whether there is a micro-batch of this number; it is read if it is the next one."""
        if g not in self._headers and (dealt := next(self._stream, None)) is not None:
            (header, values), *_ = dealt
            self._headers[header.g], self._values[header.g] = header, [dict(values)]
        return g in self._headers

    def _act(self, own: _Stage) -> None:
        own.stage.use_threads()
        if own.given.letters[own.done] == FORWARD:
            self._forward(own, self._headers[own.forwards])
            own.forwards += 1
        else:
            self._backward(own, self._headers[own.backwards])
            own.backwards += 1
        own.done += 1

    def _forward(self, own: _Stage, header: MicroBatch) -> None:
        """x_{k+1} = f_k(x_k; W, rng(k, g)) with the newest weights, or those of the run where it was in flight."""
        stage, known = own.stage, self._values[header.g]
        read = own.given.flight.get(header.g, own.weights)
        buffers = [{name: self._buffers[name] for name in stage.buffers}]
        key = self._draw(header.number)
        tapes = forward(stage, [local(stage, read, 0)], buffers, known, key, self._setting.mode)
        self._buffers.update(buffers[0])
        own.passes[header.g] = read, tapes
        outputs = {name: known[0][name] for name in stage.functions[0].outputs}
        tensors = {n: v for n, v in outputs.items() if isinstance(v, torch.Tensor)}
        self._audit("forward", own.number, 0, header.g, tensors)
        if own is self._stages[-1]:
            self._gradients_of(header)[0][LOSS] = self._loss_gradient(header, known[0])

    def _gradients_of(self, header: MicroBatch) -> Each:
        """The gradients of a micro-batch's values; a stage that gets none may run its backward before there are any."""
        return self._gradients.setdefault(header.g, [{}])

    def _loss_gradient(self, header: MicroBatch, values: Mapping[str, Any]) -> torch.Tensor:
        """The gradient of the loss: its weight in the batch's mean, or 1 if the update divides by the count."""
        loss = values[LOSS]
        self._result.losses[header.number] = float(loss)
        self._result.metrics[header.number] = {
            name[len(METRIC) :]: (float(value), float(values.get(TERMS + name[len(METRIC) :], 0.0)))
            for name, value in values.items()
            if name.startswith(METRIC)
        }
        if LABELS in values and not header.whole:
            present = float(values[LABELS]) / (header.rows * self._setting.labels_per_row)
            self._divisors[header.g] = 0.0, header.weight * (1.0 - present)
            return torch.full_like(loss, header.weight - self._divisors[header.g][1])
        if COUNT not in values:
            return torch.full_like(loss, header.weight)
        self._divisors[header.g] = float(values[COUNT]), 0.0
        return torch.ones_like(loss)

    def _backward(self, own: _Stage, header: MicroBatch) -> None:
        """d_k, gamma = VJP(f_k; x_k, W of its forward)(d_{k+1}), and the update if it ends its batch."""
        stage, known = own.stage, self._gradients_of(header)
        read, tapes = own.passes.pop(header.g)
        (of_parameters,) = backward(stage, [local(stage, read, 0)], tapes, known)
        of_inputs = {f"d {n}": known[0][n] for n in stage.functions[0].inputs if known[0].get(n) is not None}
        self._audit("backward", own.number, 0, header.g, {**of_inputs, **of_parameters})
        own.add(of_parameters)
        if header.ends_batch:
            self._update(own, header)
        if all(other.backwards > header.g for other in self._stages if other is not own):
            self._forget(header)

    def _update(self, own: _Stage, header: MicroBatch) -> None:
        batch = range(header.g - header.index, header.g + 1)
        terms = [self._divisors[g] for g in batch if g in self._divisors]
        summed, missing = sum(count for count, _ in terms), sum(weight for _, weight in terms)
        divisor = 1.0 - missing if missing else summed if terms else None
        gradients = {n: torch.div(g, divisor) if divisor else g for n, g in own.gradients.items()}
        if self._setting.clip.by == "stage" and gradients:
            gradients = clipped(gradients, self._setting.clip)
        own.update(gradients, self._setting.ema)
        self._audit("update", own.number, 0, header.batch, own.weights)

    def _forget(self, header: MicroBatch) -> None:
        """Drop what all stages are done with; what divides a batch's gradients is needed until it ends."""
        for kept in (self._values, self._gradients):
            del kept[header.g]
        for g in [g for g in self._headers if g < header.g] if header.ends_batch else ():
            del self._headers[g]
            self._divisors.pop(g, None)

    def _compare(self, own: _Stage) -> None:
        expected = own.given.digests.get(own.done)
        if expected is not None:
            self._compared += 1
            if self._digest(self._state(own)) != expected:
                self._differing.append((own.number, own.done))

    def _state(self, own: _Stage) -> dict[str, object]:
        """What a digest is of: weights, buffers, and the optimizer's state."""
        state = self._states(own.optimizer, own.named)
        for name, average in own.averages.items():
            state[name] = {**state.get(name, {}), EMA: average}
        entries = {f"{name} {key}": value for name, of in state.items() for key, value in of.items()}
        return {**own.weights, **{name: self._buffers[name] for name in own.stage.buffers}, **entries}

    def _results(self) -> ReferenceResult:
        result = self._result
        result.buffers, result.updates = [self._buffers], min(own.updates for own in self._stages)
        for own in self._stages:
            for name, state in self._states(own.optimizer, own.named).items():
                result.optimizer_state[name] = state
            for name, average in own.averages.items():
                result.optimizer_state.setdefault(name, {})[EMA] = average
        return result
