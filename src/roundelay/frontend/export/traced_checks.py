"""Branches of a forward on a tensor's value that a graph can follow: assertions, and tests for numbers that are finite.

A graph has one branch. Where the other one only raises (``assert mask.any()``, ``if x.isnan().any(): raise ...``), or
is for numbers that are not finite (``if torch.isinf(h).any(): h = h.clamp(...)``), the graph takes the usual one, and
every call of the loss checks the value: where it is another, the run stops and names the line.
"""

from __future__ import annotations

import dis
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from roundelay.errors import UserCodeError
from roundelay.reach.reachable_state import StateSlot
from roundelay.reach.source_lines import is_user_code, users_line


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

    def is_asked(self, name: str, args: Sequence[Any]) -> bool:
        """Whether a torch function asks for the truth of a tensor, as ``item()`` of a test for finite numbers does."""
        if name != "item":
            return name == "__bool__"
        return args[0].dtype is torch.bool and args[0] in self._finite

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
    """With which truth of the tensor that is now asked for the code goes on, where with the other it raises."""
    if frame is None or any(step.opname == "CHECK_EXC_MATCH" for step in dis.get_instructions(frame.f_code)):
        return None  # what it raises may be caught
    code = {step.offset: step for step in dis.get_instructions(frame.f_code) if step.opname not in _EMPTY}
    order = sorted(code)
    after = dict(itertools.pairwise(order))
    step, negated = code.get(frame.f_lasti), False
    while step is not None and step.opname in ("TO_BOOL", "UNARY_NOT"):
        negated ^= step.opname == "UNARY_NOT"
        step = code.get(after.get(step.offset, -1))
    jumps = None if step is None or not step.opname.startswith("POP_JUMP") else _jumps_if(step.opname)
    if step is None or jumps is None:
        return None
    jumped, passed = (_raises(code, after, offset) for offset in (step.argval, after.get(step.offset, -1)))
    return None if jumped == passed else (jumps != jumped) != negated


_EMPTY = {"CACHE", "EXTENDED_ARG", "NOT_TAKEN"}


def _jumps_if(name: str) -> bool | None:
    """For which truth a conditional jump is taken; None if it tests something else."""
    return True if name.endswith("IF_TRUE") else False if name.endswith("IF_FALSE") else None


def _raises(code: Mapping[int, dis.Instruction], after: Mapping[int, int], offset: int) -> bool:
    """Whether the code from an offset on raises whatever happens."""
    seen = set[int]()
    while offset in code and offset not in seen:
        seen.add(offset)
        step = code[offset]
        if step.opname in ("RAISE_VARARGS", "LOAD_ASSERTION_ERROR") or step.argrepr == "AssertionError":
            return True
        if step.opname == "JUMP_FORWARD":
            offset = step.argval
        elif "JUMP" in step.opname or step.opname.startswith(("RETURN", "FOR_ITER", "SEND", "STORE")):
            return False
        else:
            offset = after.get(offset, -1)
    return False


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
                    remedy="The graph has one branch. If it depends on the number of rows, give --micro-batches 1; "
                    "if numbers are not finite, look at the loss before: a lower learning rate or --clip helps.",
                )
        return self._loss(outputs, batch)
