"""Branches of a forward on a tensor's value that a graph can follow: assertions, and tests for numbers that are finite.

A graph has one branch. Where the other one only raises (``assert mask.any()``, ``if x.isnan().any(): raise ...``), or
is for numbers that are not finite (``if torch.isinf(h).any(): h = h.clamp(...)``), the graph takes the usual one, and
every call of the loss checks the value: where it is another, the run stops and names the line.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from roundelay.errors import UserCodeError
from roundelay.frontend.reachable_state import StateSlot
from roundelay.frontend.source_lines import is_user_code, users_line


@dataclass(frozen=True, slots=True)
class Check:
    """The truth of a value of the forward that the graph takes for given, and the line that asks for it."""

    expected: bool
    where: str


_FINITE = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
"""What torch's tests of numbers give where all are finite."""

_NOT = {"logical_not", "__invert__", "bitwise_not"}
_KEPT = {
    "all",
    "any",
    "item",
    "squeeze",
    "flatten",
    "reshape",
    "view",
    "bool",
    "detach",
    "sum",
    "max",
    "min",
    "to",
    "cpu",
}
_BOTH: dict[str, Callable[[bool, bool], bool]] = {
    **dict.fromkeys(("logical_and", "__and__", "bitwise_and", "__rand__"), lambda one, two: one and two),
    **dict.fromkeys(("logical_or", "__or__", "bitwise_or", "__ror__"), lambda one, two: one or two),
}


@final
class TruthValues:
    """Answers for the truth of tensors during a trace, and what was taken for given."""

    def __init__(self) -> None:
        #: the values that the graph relies on
        self.checks: list[tuple[torch.Tensor, Check]] = []
        self._finite: Any = WeakIdKeyDictionary()

    def follow(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Note the result of a torch function, if it says whether numbers are finite."""
        if not isinstance(result, torch.Tensor):
            return
        if name in _FINITE:
            self._finite[result] = _FINITE[name]
            return
        known = [self._finite.get(arg) for arg in args if isinstance(arg, torch.Tensor)]
        if not known or any(value is None for value in known):
            return
        if name in _NOT:
            self._finite[result] = not known[0]
        elif name in _KEPT and len(known) == 1:
            self._finite[result] = known[0]
        elif name in _BOTH and len(known) == 2:
            self._finite[result] = _BOTH[name](*known)

    def truth(self, value: torch.Tensor) -> bool | None:
        """What a traced forward may take for the truth of a tensor; None if it must not be known."""
        expected: bool | None = self._finite.get(value)
        if expected is None:
            expected = _passing(_users_frame())
        if expected is not None:
            self.checks.append((value, Check(expected, users_line().removeprefix(", "))))
        return expected


def _users_frame() -> types.FrameType | None:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _passing(frame: types.FrameType | None) -> bool | None:
    """With which truth of the tensor that is now asked for the statement goes on, where with the other it raises."""
    if frame is None or (span := _span(frame)) is None:
        return None
    for node in ast.walk(_parsed(frame.f_code)):
        if isinstance(node, ast.Assert):
            test, wanted = node.test, True
        elif isinstance(node, ast.If) and not node.orelse and isinstance(node.body[-1], ast.Raise):
            test, wanted = node.test, False
        else:
            continue
        if (found := _truth_for(test, wanted, span)) is not None:
            return found
    return None


def _truth_for(test: ast.expr, wanted: bool, span: tuple[int, int, int, int]) -> bool | None:
    """Which truth of the part of a test at ``span`` makes the test what is wanted; None if that does not decide."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _truth_for(test.operand, not wanted, span)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And if wanted else ast.Or):
        return next((t for part in test.values if (t := _truth_for(part, wanted, span)) is not None), None)
    own = (test.lineno, test.end_lineno, test.col_offset, test.end_col_offset)
    return wanted if own == span else None


def _parsed(code: types.CodeType) -> ast.AST:
    """The syntax of a function, with the positions that it has in its file."""
    try:
        lines, first = inspect.getsourcelines(code)
        indent = len(lines[0]) - len(lines[0].lstrip())
        parsed = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, IndentationError):
        return ast.Module([], [])
    for node in ast.walk(parsed):
        if hasattr(node, "lineno"):
            node.lineno += first - 1
            node.end_lineno += first - 1  # type: ignore[attr-defined]
            node.col_offset += indent  # type: ignore[attr-defined]
            node.end_col_offset += indent  # type: ignore[attr-defined]
    return parsed


def _span(frame: types.FrameType) -> tuple[int, int, int, int] | None:
    """Where the expression stands whose truth the frame asks for."""
    positions = list(frame.f_code.co_positions())
    at = positions[frame.f_lasti // 2]
    return None if None in at else (at[0], at[1], at[2], at[3])  # type: ignore[return-value]


_IGNORED: ContextVar[bool] = ContextVar("ignored", default=False)


@contextmanager
def ignoring_checks() -> Iterator[None]:
    """Within the block checks pass: it computes with weights of its own, on purpose."""
    token = _IGNORED.set(True)
    try:
        yield
    finally:
        _IGNORED.reset(token)


@final
class CheckedLoss:
    """A loss that checks what its graph takes for given before it is called.

    The values come by slots of :attr:`values`, as what a forward leaves for its loss does.

    Args:
        loss: the person's loss.
        checks: what the forward has asked for.
    """

    def __init__(self, loss: Callable[[Any, Any], Any], checks: Sequence[Check]) -> None:
        self._loss, self._checks = loss, checks
        #: each check's value
        self.values: dict[int, Any] = dict.fromkeys(range(len(checks)))

    def slots(self) -> list[StateSlot]:
        """Where each value is put."""
        return [StateSlot(self.values, "item", i, check.where) for i, check in enumerate(self._checks)]

    def __call__(self, outputs: Any, batch: Any) -> Any:
        """The loss.

        Raises:
            UserCodeError: a value is not what it was taken for.
        """
        for i, check in enumerate(self._checks):
            if bool(self.values[i]) != check.expected and not _IGNORED.get():
                raise UserCodeError(
                    check.where,
                    got=f"{not check.expected}",
                    expected=f"{check.expected}, for which the model was captured",
                    remedy="In plain PyTorch the other branch is taken here. Look at the loss before this update; a "
                    "lower learning rate or --clip keeps numbers finite.",
                )
        return self._loss(outputs, batch)
