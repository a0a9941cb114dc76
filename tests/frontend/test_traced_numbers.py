"""``int`` and ``float`` keep what is traced only where a module does nothing else with them."""

from __future__ import annotations

import types

from roundelay.frontend.export.traced_numbers import _codes, _only_calls


def calls(x: object) -> int:
    return int(x) + int(float(x)) if isinstance(x, (int, float)) else 0  # type: ignore[arg-type]


def compares(x: object) -> bool:
    return type(x) is int


def gives(x: object) -> object:
    return {int: 1, float: 2}[type(x)]  # type: ignore[index]


def inside(x: object) -> object:
    return [one for one in (1, 2) if type(one) is int]


def test_calls_and_isinstance_may_be_traced() -> None:
    assert _only_calls(calls.__code__)


def test_anything_else_may_not() -> None:
    for function in (compares, gives, inside):
        space = {"f": types.FunctionType(function.__code__, space_of := {}, function.__name__)}
        space_of.update(space)
        assert not all(map(_only_calls, _codes(space_of)))
