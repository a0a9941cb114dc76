"""What only the transport through shared memory has to promise: deaths, narrow rings, nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from roundelay.errors import DeadlineError, PlanError
from roundelay.transport import shm
from roundelay.transport.endpoint import Arrived, Lost, Message
from roundelay.transport.shm import ShmEndpoint
from roundelay.transport.shm_resources import MIN_RING_BYTES, RING_BYTES, ShmResources
from roundelay.transport.shm_stream import READ_BYTES
from roundelay.transport.wire_format import HEAD_BYTES
from tests.transport.harness import DIED, fork_all

WAIT_S = 20.0
CREDITS = 3 * READ_BYTES // HEAD_BYTES  # more than are read at once
Task = Callable[[ShmEndpoint], Any]


def start(tasks: list[Task], deadline_s: float = WAIT_S, ring_bytes: int = RING_BYTES) -> list[Any]:
    """What each worker's task returned; the tasks end their endpoints themselves."""
    wiring = ShmResources(len(tasks), ring_bytes)

    def run(worker: int) -> dict[str, Any]:
        return {"result": tasks[worker](ShmEndpoint(worker, wiring, deadline_s))}

    outcomes = fork_all([lambda k=k: run(k) for k in range(len(tasks))], wiring.close)
    assert all("result" in outcome for outcome in outcomes), outcomes
    return [outcome["result"] for outcome in outcomes]


def held() -> tuple[int, int, int, list[str]]:
    """Threads, file descriptors and shared mappings of this process, and what has a name in /dev/shm."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/zero" in line]
    threads, files = len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))
    return threads, files, len(maps), sorted(entry.name for entry in Path("/dev/shm").iterdir())


def threads_left(wait_s: float = 2.0) -> int:
    """Threads of this process; one that was joined a moment ago may take a moment to leave the kernel's list."""
    until = time.monotonic() + wait_s
    while held()[0] > 1 and time.monotonic() < until:
        time.sleep(0.005)
    return held()[0]


def stopped(pid: int) -> bool:
    return "T (stopped)" in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.parametrize("way", ["close", "abort", "close late"])
def test_an_end_leaves_no_thread_no_file_and_no_memory(way: str) -> None:
    launcher = held()
    wiring = ShmResources(3, MIN_RING_BYTES)

    def run(worker: int) -> dict[str, Any]:
        before = held()
        endpoint = ShmEndpoint(worker, wiring, WAIT_S)
        during = held()
        for other in {0, 1, 2} - {worker}:
            endpoint.send(other, Message(0, (), (torch.ones(2**18),)))
        if way == "close late":
            for _ in range(2):
                assert isinstance(endpoint.receive(WAIT_S), Arrived)
        endpoint.abort("enough") if way == "abort" and worker == 0 else endpoint.close()
        return {"result": [before, during, held(), threading.active_count()]}

    with_wiring = held()
    for outcome in fork_all([lambda k=k: run(k) for k in range(3)], wiring.close):
        before, during, after, threads = outcome["result"]
        assert during[2] > after[2] == launcher[2]
        assert during[1] > after[1] == before[1] - (with_wiring[1] - launcher[1])
        assert after[3] == with_wiring[3] == launcher[3]
        assert threads == 1
    assert held() == launcher


def test_a_quiet_endpoint_has_no_thread() -> None:
    def talk(endpoint: ShmEndpoint) -> int:
        for _ in range(50):
            endpoint.send(1 - endpoint.worker, Message(0, (), (torch.ones(2**14),)))
            endpoint.receive(WAIT_S)
        threads = threading.active_count()
        endpoint.close()
        return threads

    assert start([talk, talk]) == [1, 1]


def test_64_mib_each_way_at_once_through_a_ring_of_64_kib() -> None:
    def swap(endpoint: ShmEndpoint) -> bool:
        big = torch.arange(2**24, dtype=torch.int32)
        endpoint.send(1 - endpoint.worker, Message(0, (), (big + endpoint.worker,)))
        delivery = endpoint.receive(WAIT_S)
        assert isinstance(delivery, Arrived)
        got = delivery.message.values[0]
        assert isinstance(got, torch.Tensor)
        endpoint.close()
        return torch.equal(got, big + 1 - endpoint.worker)

    assert start([swap, swap], ring_bytes=MIN_RING_BYTES) == [True, True]


def test_two_that_flood_each_other_and_close_wait_for_nobody() -> None:
    """Neither receives: each makes room for the other while it closes."""

    def flood(endpoint: ShmEndpoint) -> float:
        for _ in range(20):
            endpoint.send(1 - endpoint.worker, Message(0, (), (torch.ones(2**16),)))
        start = time.monotonic()
        endpoint.close()
        return time.monotonic() - start

    assert max(start([flood, flood], ring_bytes=MIN_RING_BYTES)) < WAIT_S


@pytest.mark.parametrize("with_child", [False, True])
def test_a_killed_worker_is_seen_even_if_a_child_of_its_own_lives_on(with_child: bool) -> None:
    def perish(endpoint: ShmEndpoint) -> None:
        child = os.fork() if with_child else 0
        if with_child and child == 0:
            time.sleep(WAIT_S + 10.0)
            os._exit(0)
        endpoint.send(1, Message(0, (child,), ()))
        os.kill(os.getpid(), signal.SIGKILL)

    def survive(endpoint: ShmEndpoint) -> bool:
        first, second = endpoint.receive(WAIT_S), endpoint.receive(WAIT_S)
        assert isinstance(first, Arrived)
        assert isinstance(second, Lost)
        child = first.message.header[0]
        lived = Path(f"/proc/{child}").exists() if child else True
        if child:
            os.kill(child, signal.SIGKILL)
        endpoint.close()
        return lived

    assert start([perish, survive]) == [DIED, True]


def test_a_message_cut_off_by_death_never_arrives() -> None:
    def perish(endpoint: ShmEndpoint) -> None:
        endpoint.send(1, Message(0, (1,), (torch.ones(100),)))
        endpoint.send(1, Message(0, (2,), (torch.ones(2**20),)))
        os.kill(os.getpid(), signal.SIGKILL)

    def survive(endpoint: ShmEndpoint) -> list[str]:
        time.sleep(0.1)
        got = [type(endpoint.receive(WAIT_S)).__name__ for _ in range(2)]
        endpoint.close()
        return got

    assert start([perish, survive], ring_bytes=MIN_RING_BYTES) == [DIED, ["Arrived", "Lost"]]


def test_a_worker_that_never_pauses_still_hears_of_a_death() -> None:
    """Worker 2 always has something for worker 1."""

    def perish(endpoint: ShmEndpoint) -> None:
        endpoint.receive(WAIT_S)
        os.kill(os.getpid(), signal.SIGKILL)

    def listen(endpoint: ShmEndpoint) -> list[int]:
        before = 0
        while not isinstance(delivery := endpoint.receive(WAIT_S), Lost):
            before += 1
            if before == 100:
                endpoint.send(0, Message(0, (), ()))
                time.sleep(0.5)
        endpoint.abort("heard")
        return [delivery.source, before]

    def chatter(endpoint: ShmEndpoint) -> None:
        for _ in range(CREDITS):
            endpoint.grant(1, 0)
        while endpoint.receive(WAIT_S).source != 1:
            pass
        endpoint.close()

    source, before = start([perish, listen, chatter])[1]
    assert source == 0
    assert 100 <= before < CREDITS


def test_a_worker_that_stopped_answering_holds_up_neither_close_nor_abort() -> None:
    def freeze(endpoint: ShmEndpoint) -> None:
        for other in (1, 2):
            endpoint.send(other, Message(0, (os.getpid(),), ()))
        os.kill(os.getpid(), signal.SIGSTOP)

    def leave(endpoint: ShmEndpoint) -> int:
        delivery = endpoint.receive(WAIT_S)
        assert isinstance(delivery, Arrived)
        pid = delivery.message.header[0]
        while not stopped(pid):
            time.sleep(0.005)
        endpoint.send(0, Message(0, (), (torch.ones(2**22),)))
        if endpoint.worker == 1:
            endpoint.abort("enough")
        else:
            lost = endpoint.receive(WAIT_S)
            assert isinstance(lost, Lost)
            assert lost.reason == "enough"
            with pytest.raises(DeadlineError, match=r"workers \[0\] took nothing"):
                endpoint.close()
            os.kill(pid, signal.SIGKILL)
        return threads_left()

    assert start([freeze, leave, leave], deadline_s=2.0) == [DIED, 1, 1]


def test_what_fits_into_the_ring_outlives_its_sender() -> None:
    def leave(endpoint: ShmEndpoint) -> None:
        endpoint.send(1, Message(0, (7,), (torch.ones(2**16),)))
        endpoint.close()

    def late(endpoint: ShmEndpoint) -> int:
        time.sleep(0.2)
        delivery = endpoint.receive(WAIT_S)
        assert isinstance(delivery, Arrived)
        with pytest.raises(DeadlineError):
            endpoint.receive(0.05)
        endpoint.close()
        return delivery.message.header[0]

    assert start([leave, late])[1] == 7


@pytest.mark.parametrize(("reason", "told"), [("", "no reason given"), ("x" * 100_000, "x" * 2**15)])
def test_an_abort_tells_why_even_if_the_ring_is_full(reason: str, told: str) -> None:
    def give_up(endpoint: ShmEndpoint) -> None:
        endpoint.send(1, Message(0, (), (torch.ones(2**20),)))
        endpoint.abort(reason)

    def busy(endpoint: ShmEndpoint) -> str:
        time.sleep(shm.ABORT_GRACE_S + 0.3)
        lost = endpoint.receive(WAIT_S)
        endpoint.close()
        assert isinstance(lost, Lost)
        return lost.reason

    assert start([give_up, busy], ring_bytes=MIN_RING_BYTES)[1] == told


def test_an_abort_from_another_thread_ends_a_wait_and_lets_everything_go() -> None:
    gc.collect()
    inherited = held()[2]  # what other tests in this process have mapped, a fork has too

    def wait(endpoint: ShmEndpoint) -> int:
        threading.Timer(0.2, endpoint.abort, ("stop",)).start()
        assert endpoint.receive(WAIT_S) == Lost(endpoint.worker, "stop")
        deadline = time.monotonic() + WAIT_S
        while held()[2] > inherited and time.monotonic() < deadline:
            time.sleep(0.01)
        return held()[2] - inherited

    def other(endpoint: ShmEndpoint) -> str:
        lost = endpoint.receive(WAIT_S)
        endpoint.close()
        assert isinstance(lost, Lost)
        return lost.reason

    assert start([wait, other]) == [0, "stop"]


def test_bytes_that_are_no_message_lose_their_sender_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def babble(endpoint: ShmEndpoint) -> None:
        monkeypatch.setattr(shm.wire, "encode", lambda message, room: (bytearray(b"\xff" * 64), []))
        endpoint.send(1, Message(0, (), ()))
        endpoint.close()

    def listen(endpoint: ShmEndpoint) -> list[str]:
        lost = endpoint.receive(WAIT_S)
        endpoint.send(0, Message(0, (), ()))
        endpoint.close()
        assert isinstance(lost, Lost)
        return [lost.reason]

    assert "bytes that are no message" in start([babble, listen])[1][0]


def test_a_system_without_room_is_told_in_words_and_nothing_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before, make, made = held(), os.pipe2, iter(range(100))

    def scarce(flags: int) -> tuple[int, int]:
        if next(made) == 5:
            raise OSError(24, "Too many open files")
        return make(flags)

    monkeypatch.setattr(os, "pipe2", scarce)
    with pytest.raises(PlanError, match="Too many open files"):
        ShmResources(4)
    assert held() == before
