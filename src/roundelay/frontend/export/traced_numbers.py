"""``int(tensor)`` and ``float(tensor)`` in a forward, which Python would turn into a constant that a trace has not.

``tensor.item()`` can be traced: it gives a number of torch's own. Python's ``int`` and ``float`` only give Python's. So
where export fails at such a call, the names are given a meaning of their own in the module of the function that calls
them, until the trace has ended.
"""

from __future__ import annotations

import builtins
import dis
import types
from collections.abc import Iterator
from typing import Any, final

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from roundelay.reach.source_lines import is_user_code


class _AsPython(type):
    """A class that passes for the Python class of its name, and keeps what is traced."""

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, getattr(builtins, cls.__name__))

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], (torch.Tensor, torch.SymInt, torch.SymFloat)):
            value: Any = args[0].item() if isinstance(args[0], torch.Tensor) else args[0]
            if isinstance(value, (torch.SymInt, torch.SymFloat)):
                return torch.sym_int(value) if cls.__name__ == "int" else torch.sym_float(value)
        return getattr(builtins, cls.__name__)(*args, **kwargs)


def _codes(names: dict[str, Any]) -> Iterator[types.CodeType]:
    """The code of a module's functions and methods."""
    held = [*names.values()]
    held += [value for kind in names.values() if isinstance(kind, type) for value in vars(kind).values()]
    waiting = [value.__code__ for value in held if isinstance(value, types.FunctionType) and value.__globals__ is names]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


_NEAR = 8
"""Steps of bytecode within which ``isinstance`` is loaded before its classes."""


def _only_calls(code: types.CodeType) -> bool:
    """Whether a function only calls ``int`` and ``float``, or gives them to ``isinstance``."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    loads = [i for i, step in enumerate(steps) if step.opname == "LOAD_GLOBAL" and step.argval in _SHADOWS]
    others = [i for i in loads if "NULL" not in steps[i].argrepr]
    return all(any(step.argval == "isinstance" for step in steps[max(0, i - _NEAR) : i]) for i in others)


_SHADOWS: dict[str, type] = {name: _AsPython(name, (getattr(builtins, name),), {}) for name in ("int", "float")}


@final
class TracedNumbers:
    """The modules in which ``int`` and ``float`` keep what is traced, within a block."""

    def __init__(self) -> None:
        self._shadowed: list[dict[str, Any]] = []

    def __enter__(self) -> TracedNumbers:
        return self

    def add(self, error: Exception) -> bool:
        """Add the module whose function has failed to make a number of a tensor; False if that is not what failed."""
        frame = error.__traceback__
        names: dict[str, Any] | None = None
        while frame is not None:
            code = frame.tb_frame.f_code
            if is_user_code(code.co_filename):
                names = frame.tb_frame.f_globals if {*code.co_names} & {*_SHADOWS} else None
            frame = frame.tb_next
        if not isinstance(error, GuardOnDataDependentSymNode) or names is None or {*names} & {*_SHADOWS}:
            return False
        if not all(map(_only_calls, _codes(names))):
            return False
        names.update(_SHADOWS)
        self._shadowed.append(names)
        return True

    def __exit__(self, *_: object) -> None:
        for names in self._shadowed:
            for name in _SHADOWS:
                names.pop(name, None)
