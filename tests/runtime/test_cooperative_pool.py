"""Short instructions run in one thread at a time, long ones side by side, and no worker waits for ever."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import roundelay
from roundelay.actor.machine import Run
from roundelay.errors import DeadlineError
from roundelay.ir.micro_batch import MicroBatch
from roundelay.launching import cooperative_pool as pool_module
from roundelay.launching.cooperative_pool import CooperativePool
from roundelay.runtime.handlers import Context, Handler, do_forward
from roundelay.runtime.workload import Loop, Wrap
from roundelay.session.training import Length, Session
from roundelay.transport.endpoint import Arrived, Granted, Message
from roundelay.transport.memory import MemoryEndpoint, memory_endpoints
from tests.api.jobs import make

FAR_S = 60.0
Make = Callable[[MemoryEndpoint, Callable[[Any, Any], Any]], Loop]


def play(loops: list[Make], act: Callable[[Any, Any], Any], deadline_s: float = FAR_S) -> list[threading.Thread]:
    """Run loops that do ``act`` between what they send and receive, to their end; all threads."""
    pool = CooperativePool(len(loops), deadline_s)
    endpoints = memory_endpoints(len(loops), pool.wake)
    made = [loop(end, pool.yielding({"act": act})["act"]) for loop, end in zip(loops, endpoints, strict=True)]
    threads = pool.threads(endpoints, made)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    pool.stop()
    assert not any(thread.is_alive() for thread in threads)
    return threads


def around(times: int, *, first: bool = False) -> Make:
    """Passes what comes from the worker before on to the one behind; the first begins."""

    def loop(end: MemoryEndpoint, act: Callable[[Any, Any], Any]) -> Loop:
        behind = (end.worker + 1) % (len(end._others) + 1)
        for n in range(times):
            if not (first and n == 0):
                yield from wait_for(end)
            act(end.worker, None)
            end.send(behind, Message(0, (n,), ()))

    return loop


def alone(times: int) -> Make:
    """Acts without waiting for anybody."""

    def loop(end: MemoryEndpoint, act: Callable[[Any, Any], Any]) -> Loop:
        for _ in range(times):
            act(end.worker, None)
        yield from ()

    return loop


@pytest.mark.parametrize("long_s", [0.0, math.inf])
def test_what_is_sent_around_arrives(long_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LONG_S", long_s)
    acted: list[int] = []
    play([around(2000, first=k == 0) for k in range(4)], lambda worker, _: acted.append(worker))
    assert acted == [0, 1, 2, 3] * 2000


def test_short_instructions_run_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LONG_S", math.inf)
    monkeypatch.setattr(pool_module, "WATCH_S", FAR_S / 10)  # longer than all of it takes
    threads: list[int] = []

    def act(*_: object) -> None:
        time.sleep(0.0001)  # another thread could go on meanwhile
        threads.append(threading.get_ident())

    play([around(500, first=True) for _ in range(4)], act)
    changes = sum(a != b for a, b in itertools.pairwise(threads))
    assert len(threads) == 2000
    assert changes <= 20  # until every thread has ended its first turn


def test_long_instructions_run_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LONG_S", 0.0)
    monkeypatch.setattr(pool_module, "WATCH_S", FAR_S / 10)
    together = threading.Barrier(3)

    def hub(end: MemoryEndpoint, act: Callable[[Any, Any], Any]) -> Loop:
        for n in range(20):
            for to in (1, 2, 3):
                end.send(to, Message(0, (n,), ()))
            for _ in range(3):
                yield from wait_for(end)

    def spoke(end: MemoryEndpoint, act: Callable[[Any, Any], Any]) -> Loop:
        for n in range(20):
            yield from wait_for(end)
            act(end.worker, None)  # waits until all three are at it
            end.send(0, Message(0, (n,), ()))

    play([hub, spoke, spoke, spoke], lambda *_: together.wait(10.0))
    assert not together.broken


def test_nobody_waits_long_behind_an_instruction_that_was_expected_to_be_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others go on meanwhile as if the thread that is in it were not there."""
    monkeypatch.setattr(pool_module, "LONG_S", math.inf)
    gone_on = threading.Event()
    heard: list[bool] = []

    def blocks(end: MemoryEndpoint, act: Callable[[Any, Any], Any]) -> Loop:
        yield from wait_for(end)  # all have begun, and threads are parked
        end.send(1, Message(0, (), ()))
        act(end.worker, None)

    def answers(end: MemoryEndpoint, act: Callable[[Any, Any], Any]) -> Loop:
        end.send(0, Message(0, (), ()))
        for n in range(3000):
            yield from wait_for(end)
            end.send(2, Message(0, (n,), ()))
        gone_on.set()

    def echoes(end: MemoryEndpoint, act: Callable[[Any, Any], Any]) -> Loop:
        for n in range(2999):
            yield from wait_for(end)
            end.send(1, Message(0, (n,), ()))

    play([blocks, answers, echoes], lambda *_: heard.append(gone_on.wait(10.0)))
    assert heard == [True]


def test_what_was_quick_once_is_soon_known_to_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was slow once is not."""
    monkeypatch.setattr(pool_module, "RECENT", 3)
    pool = CooperativePool(1, FAR_S)
    pool._state_of_thread[threading.get_ident()] = pool._states[0]
    left: list[int] = []
    monkeypatch.setattr(CooperativePool, "_leave", lambda pool, seat: left.append(1))

    def leaves(seconds: list[float]) -> list[int]:
        """Whether it was left to another thread to go on, by execution."""
        clock = itertools.accumulate(value for each in seconds for value in (0.0, each))
        monkeypatch.setattr(pool_module.time, "perf_counter", lambda: next(clock))
        found = []
        run = pool.yielding({"act": lambda *_: None})["act"]
        for _ in seconds:
            left.clear()
            run(None, None)  # type: ignore[arg-type]
            found.append(len(left))
        return found

    slow = 4 * pool_module.LONG_S
    assert leaves([slow, slow, 0.0, slow, slow, slow, slow]) == [1, 1, 1, 0, 0, 0, 1]
    assert leaves([0.0, slow, 0.0, 0.0]) == [1, 0, 0, 0]


def waits() -> Loop:
    """For ever."""
    while True:
        yield False


def wait_for(end: MemoryEndpoint) -> Loop:
    """Until there is a message, which is taken; as a worker does, who looks for no reason why it was carried on."""
    yield False
    assert isinstance(end.receive(1.0, False), Arrived)


def until(ready: Callable[[], object]) -> None:
    """Wait for it to hold, or for long."""
    deadline = time.monotonic() + 20.0
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.005)


def test_a_credit_resumes_only_who_wants_one() -> None:
    resumed: list[bool] = []
    pool = CooperativePool(2, FAR_S)
    ends = memory_endpoints(2, pool.wake)

    def taker(wanted: bool) -> Loop:
        while not ends[1].has_delivery(wanted):
            yield wanted
            resumed.append(wanted)

    def both() -> Loop:
        yield from taker(False)
        assert isinstance(ends[1].receive(1.0, False), Arrived)
        assert [credit.channel for credit in ends[1].credits()] == [5]
        yield from taker(True)
        assert ends[1].receive(1.0, True) == Granted(0, 6)

    threads = pool.threads(ends, [waits(), both()])
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    ends[0].grant(1, 5)
    time.sleep(0.05)
    assert resumed == []
    ends[0].send(1, Message(0, (), ()))
    until(lambda: resumed)
    assert resumed == [False]
    ends[0].grant(1, 6)
    until(lambda: resumed[1:])
    assert resumed == [False, True]
    pool.stop()
    for thread in threads:
        thread.join(10.0)


def test_a_wake_up_with_nothing_left_to_see_resumes_nobody() -> None:
    """A sender puts a message down; the receiver, at work, takes it and pauses again; only then the sender tells it."""
    resumed: list[bool] = []
    pool = CooperativePool(2, FAR_S)
    ends = memory_endpoints(2, pool.wake)

    def taker() -> Loop:
        yield from wait_for(ends[1])
        resumed.append(True)
        yield from waits()

    threads = pool.threads(ends, [waits(), taker()])
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    pool.wake(1, False)
    time.sleep(0.05)
    assert resumed == []
    ends[0].send(1, Message(0, (), ()))
    until(lambda: resumed)
    assert resumed == [True]
    pool.stop()
    for thread in threads:
        thread.join(10.0)


def test_a_worker_that_nobody_was_told_of_is_carried_on_at_the_next_look() -> None:
    """A thread that counted as away for a moment, outside of its instructions, tells nobody what it sends."""
    gone_on = threading.Event()
    pool = CooperativePool(2, FAR_S)
    ends = memory_endpoints(2, lambda worker, credit: None)

    def taker() -> Loop:
        yield from wait_for(ends[1])
        gone_on.set()
        yield from waits()

    threads = pool.threads(ends, [waits(), taker()])
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    ends[0].send(1, Message(0, (), ()))
    pool._resume(1)
    assert gone_on.wait(20.0)
    pool.stop()
    for thread in threads:
        thread.join(10.0)


def test_what_comes_while_a_worker_becomes_idle_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[bool] = []
    has_delivery = MemoryEndpoint.has_delivery

    def late(end: MemoryEndpoint, credits: bool) -> bool:
        """The pool looks, and finds nothing; a message comes before it has noted that the worker is idle."""
        found = has_delivery(end, credits)
        if end.worker == 1 and not looked:
            looked.append(found)
            end._endpoints[0].send(1, Message(0, (), ()))
        return found

    monkeypatch.setattr(MemoryEndpoint, "has_delivery", late)

    def taker(end: MemoryEndpoint, act: Callable[[Any, Any], Any]) -> Loop:
        yield False
        assert isinstance(end.receive(1.0, False), Arrived)

    play([alone(1), taker], lambda *_: None)
    assert looked == [False]


def test_a_worker_that_nothing_comes_for_is_told() -> None:
    told: list[float] = []

    def silent(end: MemoryEndpoint, act: Callable[[Any, Any], Any]) -> Loop:
        began = time.monotonic()
        yield False
        with pytest.raises(DeadlineError):
            end.receive(0.2, False)
        told.append(time.monotonic() - began)

    play([silent, alone(1)], lambda *_: None, deadline_s=0.2)
    assert len(told) == 1
    assert told[0] >= 0.2


def test_threads_that_wait_end_when_the_run_is_given_up() -> None:
    pool = CooperativePool(2, FAR_S)
    endpoints = memory_endpoints(2, pool.wake)
    threads = pool.threads(endpoints, [waits(), waits()])
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert all(thread.is_alive() for thread in threads)
    pool.stop()
    for thread in threads:
        thread.join(10.0)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("shared", [True, False])
def test_a_run_over_memory_shares_its_threads_unless_its_endpoints_are_wrapped(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "LONG_S", math.inf)
    seen: set[tuple[int, str]] = set()

    def forward(context: Context, run: Run) -> MicroBatch | None:
        seen.add((context.worker, threading.current_thread().name))
        return do_forward(context, run)

    train(forward, None if shared else lambda endpoint: endpoint)
    own = {(k, f"worker {k}") for k in range(4)}
    assert {worker for worker, _ in seen} == {0, 1, 2, 3}
    assert (seen == own) is not shared


def test_what_an_instruction_leaves_set_in_its_thread_is_no_other_worker_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor its own: which thread comes next is chance."""
    monkeypatch.setattr(pool_module, "LONG_S", math.inf)
    seen: set[tuple[bool, int]] = set()

    def forward(context: Context, run: Run) -> MicroBatch | None:
        seen.add((torch.is_grad_enabled(), torch.get_num_threads()))
        header = do_forward(context, run)
        torch.set_grad_enabled(False)
        torch.set_num_threads(2)
        return header

    train(forward)
    assert seen == {(True, 1)}


def train(forward: Handler, wrap: Wrap | None = None) -> None:
    """Thirty updates on four workers over memory."""
    job = make()
    captured = roundelay.capture(job)
    plan = roundelay.plan(job, captured=captured, workers=4, transport="memory")
    handlers = {k: {"forward": forward} for k in range(4)}
    Session(job, captured, plan, 0, Length(steps=30)).run(notify=lambda event: None, handlers=handlers, wrap=wrap)
