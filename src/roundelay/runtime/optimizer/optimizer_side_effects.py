"""Refuses what a job's optimizer function does to its parameters in addition to making an optimizer.

A stage's gradients come from its tape and are put into ``grad`` when the batch is complete. So autograd calls no hook
of a parameter, does not add to an existing ``grad``, and does not know which parameters were frozen after capture.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch

from roundelay.errors import JobError
from roundelay.job import Named


@dataclass(frozen=True, slots=True, eq=False)
class _Observed:
    """Everything of one parameter that the function must not change."""

    hooks: tuple[Any, ...]
    accumulate_hooks: tuple[Any, ...]
    gradient: torch.Tensor | None
    address: int
    version: int
    trained: bool

    @staticmethod
    def at(parameter: torch.nn.Parameter) -> _Observed:
        hooks, accumulate_hooks = (
            tuple((getattr(parameter, name, None) or {}).values())
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        )
        version = 0 if parameter.is_inference() else parameter._version
        address = 0 if parameter.is_meta else parameter.data_ptr()
        return _Observed(hooks, accumulate_hooks, parameter.grad, address, version, parameter.requires_grad)


@final
class ParameterSnapshot:
    """The parameters before the job's optimizer function is called.

    Args:
        named: with which it will be called.
    """

    def __init__(self, named: Named) -> None:
        self._before = [(name, parameter, _Observed.at(parameter)) for name, parameter in named]

    def check(self) -> None:
        """Refuse what the function has done to a parameter.

        Raises:
            JobError: naming the parameter, and the file and line of a hook.
        """
        for name, parameter, before in self._before:
            for got, expected, remedy in _changes(before, _Observed.at(parameter)):
                raise JobError(f"Job(optimizer=...), parameter {name!r}", got=got, expected=expected, remedy=remedy)


def _changes(before: _Observed, now: _Observed) -> Iterator[tuple[str, str, str]]:
    """(got, expected, remedy) of everything that the function has changed in a parameter."""
    for hook in _new(before.hooks, now.hooks):
        yield (
            f"a gradient hook, {source_location(hook)}",
            "no hook: gradients come from a stage's tape, which calls no hooks",
            "Let the optimizer do to the gradient what the hook does: a subclass whose step() begins with it; to clip "
            "by norm, use --clip.",
        )
    for hook in _new(before.accumulate_hooks, now.accumulate_hooks):
        yield (
            f"a hook that is called when its gradient is accumulated, {source_location(hook)}",
            "no hook: an update is made from the whole batch's gradient, when it is due",
            "Return one optimizer over all parameters, and leave register_post_accumulate_grad_hook out: stages step "
            "it, and keep no gradient after the step.",
        )
    if now.gradient is not before.gradient:
        yield (
            "a gradient that the function has set, such as a view of one flat tensor",
            "grad = None: a stage sets the batch's gradient itself",
            "Do not set p.grad.",
        )
    if now.trained != before.trained:
        yield (
            f"requires_grad = {now.trained}, set by the function",
            f"{before.trained}, as when the model was captured",
            "Freeze parameters in job(), before the model is given to Job.",
        )
    if (now.address, now.version) != (before.address, before.version):
        yield (
            "other values or another memory than before the function was called, such as a view of one flat tensor",
            "unchanged parameters: the function is called for every stage",
            "Change weights in job(), before the model is given to Job.",
        )


def _new(before: tuple[Any, ...], now: tuple[Any, ...]) -> list[Any]:
    return [hook for hook in now if not any(hook is other for other in before)]


def source_location(function: Callable[..., Any]) -> str:
    """A function's name with file and line, for messages; the name alone if it has no Python code."""
    inner: Any = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    code = getattr(inner, "__code__", None) or getattr(getattr(type(inner), "__call__", None), "__code__", None)  # noqa: B004
    if code is None:
        return f"`{getattr(function, '__name__', type(function).__name__)}`"
    return f"`{code.co_name}` at {code.co_filename}:{code.co_firstlineno}"
