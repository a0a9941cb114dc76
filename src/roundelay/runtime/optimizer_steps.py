"""The steps of the job's optimizer and scheduler on what one holder of a stage updates."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch.optim import optimizer as torch_optimizer

from roundelay.frontend.export.gradient_hooks import call_hooks, hooks_of
from roundelay.frontend.worker_model import WorkerModel
from roundelay.ir.averages import EMA
from roundelay.ir.work import Settings
from roundelay.job import Job
from roundelay.runtime.initial_state import Initial
from roundelay.runtime.optimizer.optimizer_state import OptimizerState
from roundelay.runtime.optimizer.stage_optimizer import (
    RateTable,
    build_optimizer,
    build_scheduler,
    choose_alike,
    narrow,
    no_group_empty,
    per_update_scheduler,
    without_gradients,
)
from roundelay.runtime.optimizer.weight_averages import WeightAverages
from roundelay.runtime.owned_weights import OwnedWeights


@final
class OptimizerSteps:
    """Optimizer, scheduler and moving averages of one holder's weights. Not thread-safe.

    Args:
        captured: the model.
        job: has the optimizer and scheduler.
        settings: has the decay of the averages.
        initial: the state to start from.
        owned: what the holder updates.
        first: whether it is the first of the stage's holders, which shows gradients to the hooks on them.

    Raises:
        JobError: optimizer or scheduler cannot be used.
    """

    def __init__(
        self, captured: WorkerModel, job: Job, settings: Settings, initial: Initial, owned: OwnedWeights, *, first: bool
    ) -> None:
        self._hooks = hooks_of(captured.model) if first else {}
        self._weights = owned.weights
        state = {
            n: owned.state(n, entries, initial.parameters[n].shape) if n in initial.parameters else entries
            for n, entries in initial.optimizer.items()
        }
        named = [(n, self._weights.get(n, p)) for n, p in captured.model.named_parameters()]
        self.optimizer = build_optimizer(job.optimizer, named)
        choose_alike(self.optimizer, settings.devices)
        self._leaves_gradients = _leaves_gradients(self.optimizer)  # asked before a scheduler wraps its step
        self._kept_state = OptimizerState(self.optimizer, named)
        narrow(self.optimizer, self._weights, named)
        #: stepped by every update; None if none is
        self.scheduler = per_update_scheduler(build_scheduler(job.scheduler, self.optimizer), initial.numbers)
        self.rates = RateTable(job.optimizer, job.scheduler, without_gradients(captured.model), initial.numbers)
        for _ in range(initial.updates if self.scheduler is not None else 0):
            with no_group_empty(self.optimizer):
                self.optimizer.step()  # changes nothing, as there are no gradients; schedulers expect it
            self.scheduler.step()  # type: ignore[union-attr]
        self._kept_state.restore(self._weights, state)
        self._averages = WeightAverages(settings.ema, self._weights, state)
        self._known_state = False

    def give(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Put gradients into the weights' ``grad``: copies, if the optimizer may write to them.

        Args:
            gradients: by name; others may read the same memory, in other processes too.
        """
        for name, gradient in gradients.items():
            self._weights[name].grad = gradient if self._leaves_gradients else gradient.clone()

    def step(self, watched: AbstractContextManager[None]) -> None:
        """One step with the gradients in the weights' ``grad``, which are cleared.

        Args:
            watched: within it the optimizer steps; it sees weights, gradients and rates before and after.

        Raises:
            JobError: the user's program has changed a learning rate or another option of the optimizer.
        """
        self.rates.check()
        call_hooks(self._hooks, self._weights)
        with watched, self._kept_state.stepping(), no_group_empty(self.optimizer):
            self.optimizer.step()
        if not self._known_state:  # so that state that cannot be saved is an error now, not at the first checkpoint
            self.live()
            self._known_state = True
        self._averages.update()
        for parameter in self._weights.values():
            parameter.grad = None
        if self.scheduler is not None:
            self.scheduler.step()
            self._kept_state.accept_options()

    def entries(self) -> dict[str, dict[str, Any]]:
        """Copies of the optimizer's state and the averages, by name, on the CPU."""
        state = self._kept_state.entries(self._weights)
        for name, entries in self._averages.entries(self.optimizer).items():
            state[name] = state.get(name, {}) | entries
        return state

    def live(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state and the moving averages themselves, by name; they must not be modified."""
        state = self._kept_state.entries(self._weights, copied=False)
        for name, average in self._averages.moving.items():
            state[name] = {**state.get(name, {}), EMA: average}
        return state


_LEAVING = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_OF_ALL_OPTIMIZERS = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)


def _leaves_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known not to write to gradients, as torch's `foreach` steps and many others do."""
    if type(optimizer) not in _LEAVING or "step" in vars(optimizer):
        return False
    apart = all(
        group.get("fused") or not (group.get("foreach") or any(weight.is_cuda for weight in group["params"]))
        for group in optimizer.param_groups
    )
    hooks = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, *_OF_ALL_OPTIMIZERS]
    return apart and not any(hooks)
