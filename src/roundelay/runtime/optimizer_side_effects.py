"""What a job's optimizer function does to the parameters that it is given, beside making an optimizer of them.

A stage's gradients come from its tape and are laid into ``grad`` when the batch is whole. So autograd calls no hook of
a parameter, adds into no ``grad`` that was there before, and knows no parameter that is frozen after capture.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from roundelay.errors import JobError
from roundelay.job import Named


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """What can be seen of one parameter."""

    hooks: tuple[Any, ...]
    behind: tuple[Any, ...]
    gradient: torch.Tensor | None
    address: int
    version: int
    trained: bool

    @staticmethod
    def at(parameter: torch.nn.Parameter) -> _Look:
        hooks, behind = (
            tuple((getattr(parameter, name, None) or {}).values())
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
        )
        version = 0 if parameter.is_inference() else parameter._version
        address = 0 if parameter.is_meta else parameter.data_ptr()
        return _Look(hooks, behind, parameter.grad, address, version, parameter.requires_grad)


@final
class ParameterSnapshot:
    """The parameters before the job's optimizer function is called.

    Args:
        named: what it will be given.
    """

    def __init__(self, named: Named) -> None:
        self._before = [(name, parameter, _Look.at(parameter)) for name, parameter in named]

    def check(self) -> None:
        """Refuse what the function has done to a parameter.

        Raises:
            JobError: naming the parameter, and the file and line of a hook.
        """
        for name, parameter, before in self._before:
            _check(name, before, _Look.at(parameter))


def _check(name: str, before: _Look, now: _Look) -> None:
    added = [hook for hook in now.hooks if not any(hook is other for other in before.hooks)]
    if added:
        raise _refused(
            name,
            f"a gradient hook, {place_of(added[0])}",
            "no hook: gradients come from a stage's tape, which calls none",
            "Let the optimizer do to the gradient what the hook does: a subclass whose step() begins with it; to clip "
            "by norm, use --clip.",
        )
    added = [hook for hook in now.behind if not any(hook is other for other in before.behind)]
    if added:
        raise _refused(
            name,
            f"a hook that is called when its gradient is accumulated, {place_of(added[0])}",
            "no hook: an update is made of the whole batch's gradient, when it is due",
            "Return one optimizer over all parameters, and leave register_post_accumulate_grad_hook out: stages step "
            "it, and keep no gradient behind the step.",
        )
    if now.gradient is not before.gradient:
        raise _refused(
            name,
            "a gradient that the function has laid there, such as a view of one flat tensor",
            "grad = None: a stage lays the batch's gradient there itself",
            "Leave p.grad alone.",
        )
    if now.trained != before.trained:
        raise _refused(
            name,
            f"requires_grad = {now.trained}, set by the function",
            f"{before.trained}, as when the model was captured",
            "Freeze parameters in job(), before the model is given to Job.",
        )
    if (now.address, now.version) != (before.address, before.version):
        raise _refused(
            name,
            "other values or another memory than before the function was called, such as a view of one flat tensor",
            "the parameter as it was: the function is called for every stage",
            "Change weights in job(), before the model is given to Job.",
        )


def _refused(name: str, got: str, expected: str, remedy: str) -> JobError:
    return JobError(f"Job(optimizer=...), parameter {name!r}", got=got, expected=expected, remedy=remedy)


def place_of(function: Callable[..., Any]) -> str:
    """A function's name with file and line, for people; the name alone where Python knows no more."""
    inner: Any = inspect.unwrap(function)
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(inner.func)
    code = getattr(inner, "__code__", None) or getattr(getattr(type(inner), "__call__", None), "__code__", None)  # noqa: B004
    if code is None:
        return f"`{getattr(function, '__name__', type(function).__name__)}`"
    return f"`{code.co_name}` at {code.co_filename}:{code.co_firstlineno}"
