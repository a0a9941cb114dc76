"""An interrupt that meets torch's export is raised between two operations: within one it ends the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from roundelay.frontend import capture
from roundelay.frontend.interrupts import Interrupts
from tests.frontend.cutting import sample
from tests.runtime.interrupts import handled
from tests.zoo import ZOO


def called_in(modules: Sequence[str], inner: Callable[..., Any]) -> Callable[..., Any]:
    """`inner`, called by a function of the last module, which one of the module before it calls, and so on."""
    for name in reversed(modules):
        names = {"inner": inner} | ({"__name__": name} if name else {})
        inner = eval("lambda *given: inner(*given)", names)
    return inner


@pytest.mark.parametrize(
    ("modules", "waits"),
    [
        (["my_model"], False),
        (["torch.nn.modules.module", "my_model"], False),
        (["torch.nn.modules.module", "my_model", "subprocess"], False),
        (["torch.nn.modules.module", "my_model", ""], False),
        (["my_model", "torch.functional"], True),
        (["my_model", "torch._ops", "contextlib"], True),
        (["my_model", "torch.fx", "", "weakref"], True),
        (["my_model", "torch.fx", "sympy.core", "mpmath"], True),
    ],
)
def test_what_strikes_inside_torch_waits(modules: list[str], waits: bool) -> None:
    heard = list[str]()
    with handled(signal.SIGINT, lambda number, frame: heard.append("handled")):
        with Interrupts() as interrupts:
            called_in(modules, signal.raise_signal)(signal.SIGINT)
            heard.append("next")
            interrupts.come()
            heard.append("end")
        signal.raise_signal(signal.SIGINT)
    assert heard == (["next", "handled"] if waits else ["handled", "next"]) + ["end", "handled"]


def test_a_second_one_comes_at_once_and_what_waits_comes_at_the_end() -> None:
    heard, strike = list[object](), called_in(["torch"], signal.raise_signal)

    def hear(number: int, frame: object) -> None:
        heard.append(number)

    with handled(signal.SIGINT, hear), handled(signal.SIGTERM, hear), Interrupts():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            strike(number)
        heard.append("end")
    assert heard == [signal.SIGINT, "end", signal.SIGINT, signal.SIGTERM]


def test_one_that_raises_keeps_no_other_from_coming() -> None:
    heard = list[int]()

    def strike() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)

    with handled(signal.SIGINT), handled(signal.SIGTERM, lambda number, frame: heard.append(number)):
        with pytest.raises(KeyboardInterrupt), Interrupts():
            FunctionType(strike.__code__, {"__name__": "torch", "signal": signal})()
        assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


@pytest.mark.parametrize("nth", range(1, 7))
def test_an_interrupt_while_handlers_are_exchanged_leaves_none_to_wait(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_handler, calls = signal.signal, list[int]()

    def interrupted(number: int, handler: Any) -> Any:
        calls.append(number)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return set_handler(number, handler)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    with handled(numbers[0]), handled(numbers[1]), handled(numbers[2]):
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", interrupted)
            with pytest.raises(KeyboardInterrupt), Interrupts():
                pass
        for number in numbers:
            with pytest.raises(KeyboardInterrupt):
                called_in(["torch"], signal.raise_signal)(number)


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    def other(number: int, frame: object) -> None:
        """One that a time limit in the person's forward has set."""

    with handled(signal.SIGALRM):
        with Interrupts():
            signal.signal(signal.SIGALRM, other)
        assert signal.getsignal(signal.SIGALRM) is other


@pytest.mark.parametrize("nth", [1, 4, 33, 65])
def test_an_interrupt_of_a_capture_does_not_end_the_process(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It strikes where C++ calls a mode of torch's: at these operations it did end the process, by SIGABRT."""
    entry, batch, called = ZOO["mlp"], sample("mlp"), list[object]()
    dispatch = FakeTensorMode.dispatch

    def struck(*given: Any, **named: Any) -> Any:
        called.append(None)
        if len(called) == nth:
            called_in(["torch"], signal.raise_signal)(signal.SIGINT)
        return dispatch(*given, **named)

    capture(entry.build(0), entry.loss, batch, entry.inputs)  # torch keeps what it finds, and calls less afterwards
    child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr(FakeTensorMode, "dispatch", struck)
            capture(entry.build(0), entry.loss, batch, entry.inputs)
        except KeyboardInterrupt:
            soon = nth <= len(called) < nth + 25  # of 93 in all
            again = capture(entry.build(0), entry.loss, batch, entry.inputs)
            os._exit(0 if again.graph.cuts and soon else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
