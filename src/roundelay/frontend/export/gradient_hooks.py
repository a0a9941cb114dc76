"""Hooks on parameters that only look at gradients, as loggers of norms and histograms do.

A stage's backward runs no user code. A hook that changes nothing need not run in it: it is called with the whole
batch's gradient, before the update. One that returns a gradient, or writes into the one that it gets, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from roundelay.errors import JobError
from roundelay.reach.reachable_state import ReachableState
from roundelay.reach.slot_values import same_values

Hook = Callable[[torch.Tensor], Any]


def hooks_of(model: torch.nn.Module) -> dict[str, tuple[Hook, ...]]:
    """The hooks on gradients of a model's parameters, by first name; none for a parameter without."""
    found = {name: tuple((p._backward_hooks or {}).values()) for name, p in model.named_parameters()}
    return {name: hooks for name, hooks in found.items() if hooks}


@contextmanager
def uncalled(model: torch.nn.Module) -> Iterator[None]:
    """Within the block the hooks are off: what is computed is not the training."""
    kept = [(parameter, parameter._backward_hooks) for parameter in model.parameters() if parameter._backward_hooks]
    for parameter, _ in kept:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        for parameter, hooks in kept:
            parameter._backward_hooks = hooks


def only_looks(hook: Hook, parameter: torch.Tensor) -> bool:
    """Whether a hook leaves two gradients of a parameter as they are; what it changes elsewhere is restored."""
    state = ReachableState([("hook", hook)])
    draws = torch.Generator().manual_seed(0)
    try:
        for scale in (0.0, 1.0):
            gradient = scale * torch.randn(parameter.shape, generator=draws).to(parameter.dtype)
            if _changes(hook, gradient):
                return False
    except Exception:  # the user's code
        return False
    finally:
        state.restore()
    return True


def _changes(hook: Hook, gradient: torch.Tensor) -> bool:
    given = gradient.clone()
    return hook(given) is not None or not same_values(given, gradient)


def call_hooks(hooks: Mapping[str, tuple[Hook, ...]], weights: Mapping[str, torch.Tensor]) -> None:
    """Show the gradients that are about to be used to the hooks.

    Raises:
        JobError: one has changed a gradient.
    """
    for name, own in hooks.items():
        gradient = weights[name].grad if name in weights else None
        version = 0 if gradient is None else gradient._version
        for hook in own:
            if gradient is not None and (hook(gradient) is not None or gradient._version != version):
                raise JobError(
                    f"parameter {name!r}",
                    got="a hook on its gradient that changes it",
                    expected="one that only looks at it, as when the model was captured",
                    remedy="Put what it does into the loss, or into the optimizer's step.",
                )
