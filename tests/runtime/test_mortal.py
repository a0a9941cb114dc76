"""Forking: the parent knows of its child whatever interrupts it, and hears afterwards what came meanwhile."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from roundelay.runtime.mortal import fork
from tests.runtime.interrupts import bystander, give, handled

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def status(pid: int) -> int:
    """How a child ended: its exit code, or the signal, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def now() -> tuple[set[int], list[Any]]:
    """What is masked in this thread, and who handles each of the signals."""
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, ())), [signal.getsignal(number) for number in ENDING]


@pytest.mark.parametrize("own", [True, False], ids=["this thread", "another thread"])
@pytest.mark.parametrize("number", ENDING)
def test_what_comes_before_the_note_is_handled_behind_it(number: signal.Signals, own: bool) -> None:
    before, noted, handled_at = now(), list[int](), list[int]()

    def note(pid: int) -> None:
        give(threading.main_thread() if own else aside, number)
        noted.append(pid)

    with bystander() as aside, handled(number, lambda number, frame: handled_at.append(len(noted))):
        fork(lambda: None, note)
        assert handled_at == [1]
        signal.raise_signal(number)  # it is handled as ever
        assert handled_at == [1, 1]
    assert now() == before
    assert status(noted[0]) == 0


def test_all_that_come_are_handled() -> None:
    heard, noted = list[int](), list[int]()

    def note(pid: int) -> None:
        for number in ENDING:
            give(aside, number)
        noted.append(pid)

    def hear(number: int, frame: object) -> None:
        heard.append(number)

    with bystander() as aside, handled(ENDING[0], hear), handled(ENDING[1], hear), handled(ENDING[2], hear):
        fork(lambda: None, note)
    assert sorted(heard) == sorted(ENDING)
    assert status(noted[0]) == 0


@pytest.mark.parametrize("nth", range(1, 7))
def test_an_interrupt_while_handlers_are_exchanged_loses_none(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three are put off and three put back; at the `nth` an interrupt is raised before it is done."""
    set_handler, calls, noted = signal.signal, list[int](), list[int]()

    def interrupted(number: int, handler: Any) -> Any:
        calls.append(number)
        if len(calls) == nth:
            raise KeyboardInterrupt
        return set_handler(number, handler)

    masked = now()[0]
    with handled(signal.SIGINT), handled(signal.SIGTERM), handled(signal.SIGALRM):
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", interrupted)
            with pytest.raises(KeyboardInterrupt):
                fork(lambda: None, noted.append)
        assert len(noted) == (nth > 3)
        assert now()[0] == masked
        for number in ENDING:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(number)
    for pid in noted:
        status(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_nobody_handles_stays_so(number: signal.Signals) -> None:
    def ends_by_it() -> None:
        signal.signal(number, signal.SIG_DFL)
        fork(lambda: None, lambda pid: os.kill(os.getpid(), number))
        os._exit(5)  # it came to nobody

    def note(pid: int) -> None:
        os.kill(os.getpid(), number)
        noted.append(pid)

    noted = list[int]()
    fork(ends_by_it, noted.append)
    assert status(noted[0]) == -number
    with handled(number, signal.SIG_IGN):
        fork(lambda: None, note)
        assert signal.getsignal(number) == signal.SIG_IGN
    assert status(noted[1]) == 0


def test_a_child_hears_no_interrupt_and_ends_when_told() -> None:
    noted = list[int]()

    def live() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60.0)

    with handled(signal.SIGTERM):
        fork(live, noted.append)
    assert status(noted[0]) == -signal.SIGTERM


def test_a_child_handles_alarms_as_its_parent_did() -> None:
    """A loader may set one there, for a handler that the job's module has set."""
    noted = list[int]()

    def live() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(60.0)

    with handled(signal.SIGALRM, lambda number, frame: os._exit(7)):
        fork(live, noted.append)
    assert status(noted[0]) == 7


def test_a_child_that_fails_ends_with_one() -> None:
    noted = list[int]()

    def live() -> None:
        raise ZeroDivisionError

    try:
        fork(live, noted.append)
    except ZeroDivisionError:
        os._exit(9)  # the child, which would go on as a second one of us
    assert status(noted[0]) == 1


def test_a_thread_that_handles_no_signals_forks_too() -> None:
    before, noted = now(), list[int]()
    thread = threading.Thread(target=fork, args=(lambda: None, noted.append))
    thread.start()
    thread.join()
    assert status(noted[0]) == 0
    assert now() == before
