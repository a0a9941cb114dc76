"""Signals are handled after critical sections: the recording of a pid, a clean-up, torch.export."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from roundelay.deferred_signals import DeferredSignals, inside_torch
from roundelay.frontend import capture
from tests.frontend.cutting import sample
from tests.runtime.interrupts import bystander, give, handled
from tests.zoo import ZOO

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


@pytest.mark.parametrize("own", [True, False], ids=["this thread", "another thread"])
@pytest.mark.parametrize("number", ENDING)
def test_a_signal_waits_whichever_thread_takes_it(number: signal.Signals, own: bool) -> None:
    heard = list[str]()
    with bystander() as aside, handled(number, lambda number, frame: heard.append("handled")):
        with DeferredSignals() as interrupts:
            give(threading.main_thread() if own else aside, number)
            heard.append("open")
            interrupts.open()
            give(aside, number)
            interrupts.held = True
            give(aside, number)
            heard.append("end")
        signal.raise_signal(number)
    assert heard == ["open", "handled", "handled", "end", "handled", "handled"]


def test_each_that_waits_comes_once_and_one_that_raises_keeps_no_other_from_it() -> None:
    heard = list[int]()

    def hear(number: int, frame: object) -> None:
        heard.append(number)

    def strike() -> None:
        with DeferredSignals():
            for number in (*ENDING, *ENDING):
                signal.raise_signal(number)
            heard.append(0)

    with handled(ENDING[0]), handled(ENDING[1], hear), handled(ENDING[2], hear):
        with pytest.raises(KeyboardInterrupt):
            strike()
        assert heard == [0, *ENDING[1:]]
        assert signal.getsignal(ENDING[0]) == signal.default_int_handler


def test_what_python_does_not_handle_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To exchange it would lose it for good: Python does not know of a handler in C."""
    exchanged, set_handler = list[int](), signal.signal

    def watched(number: int, handler: Any) -> Any:
        exchanged.append(number)
        return set_handler(number, handler)

    with handled(ENDING[0]), handled(ENDING[1], signal.SIG_IGN), handled(ENDING[2], signal.SIG_DFL):
        monkeypatch.setattr(signal, "signal", watched)
        with DeferredSignals():
            pass
        assert exchanged == [ENDING[0]] * 2


@pytest.mark.parametrize("nth", range(1, 7))
def test_an_interrupt_while_handlers_are_exchanged_leaves_none_to_wait(
    nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three are put in place and three put back; at the `nth` an interrupt is raised before it is done."""
    set_handler, calls = signal.signal, list[int]()

    def interrupted(number: int, handler: Any) -> Any:
        calls.append(number)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return set_handler(number, handler)

    with handled(ENDING[0]), handled(ENDING[1]), handled(ENDING[2]):
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", interrupted)
            with pytest.raises(KeyboardInterrupt), DeferredSignals():
                pass
        assert [signal.getsignal(number) for number in ENDING] == [signal.default_int_handler] * 3


def test_two_interrupts_while_handlers_are_exchanged_leave_none_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first comes when all have been exchanged, the second before any can be put back."""
    put_in_place = DeferredSignals._put_in_place

    def first(interrupts: DeferredSignals, before: Mapping[int, object]) -> None:
        put_in_place(interrupts, before)
        raise KeyboardInterrupt

    def second(interrupts: DeferredSignals, *raised: object) -> None:
        raise KeyboardInterrupt

    with handled(ENDING[0]), handled(ENDING[1]), handled(ENDING[2]):
        with monkeypatch.context() as patch:
            patch.setattr(DeferredSignals, "_put_in_place", first)
            patch.setattr(DeferredSignals, "__exit__", second)
            with pytest.raises(KeyboardInterrupt), DeferredSignals():
                pass
        for number in ENDING:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    """The command's own sets one for SIGALRM, which would end the process if it were put back."""

    def other(number: int, frame: object) -> None:
        """One that a time limit in the person's forward has set."""

    with handled(signal.SIGALRM):
        with DeferredSignals():
            signal.signal(signal.SIGALRM, other)
        assert signal.getsignal(signal.SIGALRM) is other


def test_a_handler_that_another_sets_waits_too() -> None:
    """The command's own sets an alarm, by which an interrupt is raised again that somebody has dropped."""
    heard = list[str]()

    def sets_one(number: int, frame: object) -> None:
        signal.signal(signal.SIGALRM, again)

    def again(number: int, frame: object) -> None:
        heard.append("again")

    with handled(signal.SIGINT, sets_one), handled(signal.SIGALRM, signal.SIG_DFL):
        with DeferredSignals() as interrupts:
            interrupts.open()
            signal.raise_signal(signal.SIGINT)
            interrupts.held = True
            signal.raise_signal(signal.SIGALRM)
            heard.append("end")
        assert heard == ["end", "again"]
        assert signal.getsignal(signal.SIGALRM) is again


def test_one_inside_another_passes_on_what_comes() -> None:
    """As where a callback of a run captures another model."""
    heard = list[int]()

    def hear(number: int, frame: object) -> None:
        heard.append(number)

    with handled(signal.SIGINT, hear):
        with DeferredSignals() as outer:
            outer.open()
            with DeferredSignals() as inner:
                inner.open()
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is hear
    assert heard == [signal.SIGINT] * 4


def test_in_a_forked_child_nothing_waits() -> None:
    with handled(signal.SIGALRM, lambda number, frame: os._exit(7)), DeferredSignals():
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGALRM)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_another_thread_leaves_handlers_as_they_are() -> None:
    def enter() -> None:
        with DeferredSignals():
            entered.append(signal.getsignal(signal.SIGINT))

    entered = list[object]()
    with handled(signal.SIGINT):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert entered == [signal.default_int_handler]


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
        (["my_model", "torch.fx", "namedtuple_Pair"], True),
        (["my_model", "torch.fx", "sympy.core", "mpmath"], True),
    ],
)
def test_what_strikes_inside_torch_waits(modules: list[str], waits: bool) -> None:
    heard = list[str]()
    with handled(signal.SIGINT, lambda number, frame: heard.append("handled")):
        with DeferredSignals(inside_torch) as interrupts:
            called_in(modules, signal.raise_signal)(signal.SIGINT)
            heard.append("next")
            interrupts.handle()
            heard.append("end")
        signal.raise_signal(signal.SIGINT)
    assert heard == (["next", "handled"] if waits else ["handled", "next"]) + ["end", "handled"]


def test_inside_torch_a_second_one_comes_at_once() -> None:
    heard, strike = list[object](), called_in(["torch"], signal.raise_signal)

    def hear(number: int, frame: object) -> None:
        heard.append(number)

    with handled(signal.SIGINT, hear), handled(signal.SIGTERM, hear), DeferredSignals(inside_torch):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            strike(number)
        heard.append("end")
    assert heard == [signal.SIGINT, "end", signal.SIGINT, signal.SIGTERM]


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
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs by `&`
            monkeypatch.setattr(FakeTensorMode, "dispatch", struck)
            capture(entry.build(0), entry.loss, batch, entry.inputs)
        except KeyboardInterrupt:
            soon = nth <= len(called) < nth + 25  # of 93 in all
            again = capture(entry.build(0), entry.loss, batch, entry.inputs)
            os._exit(0 if again.graph.cuts and soon else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
