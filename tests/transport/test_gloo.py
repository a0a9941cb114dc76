"""What only the process transport has to promise: sockets, threads, deaths, forks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from roundelay.errors import DeadlineError, WorkerLostError
from roundelay.transport import gloo
from roundelay.transport.endpoint import Arrived, Lost, Message
from roundelay.transport.gloo import GlooEndpoint
from tests.transport.harness import fork_all

WAIT_S = 20.0
Task = Callable[[], dict[str, Any]]


def start(tasks: dict[int, Callable[[GlooEndpoint], Any]], tmp_path: Path, deadline_s: float = WAIT_S) -> list[Any]:
    """What each worker's task returned; the tasks end their endpoints themselves."""

    def run(worker: int) -> dict[str, Any]:
        endpoint = GlooEndpoint(worker, len(tasks), str(tmp_path / "rendezvous"), deadline_s)
        return {"result": tasks[worker](endpoint)}

    outcomes = fork_all([lambda k=worker: run(k) for worker in sorted(tasks)])
    assert all("result" in outcome for outcome in outcomes), outcomes
    return [outcome["result"] for outcome in outcomes]


def listening_addresses() -> list[str]:
    """The hexadecimal addresses that this process listens on."""
    mine = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists() or entry.is_symlink()}
    rows = [
        line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


def open_things() -> tuple[int, int]:
    """How many threads and file descriptors this process has."""
    return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))


def settled(things: Callable[[], Any], wanted: Any) -> Any:
    """What there is; a thread that was joined a moment ago may take a moment to leave the kernel's list."""
    deadline = time.monotonic() + 2.0
    while (found := things()) != wanted and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


def test_nothing_listens_outside_loopback(tmp_path: Path) -> None:
    def look(endpoint: GlooEndpoint) -> list[str]:
        found = listening_addresses()
        endpoint.close()
        return found

    for found in start({0: look, 1: look}, tmp_path):
        assert set(found) == {"0100007F"}


@pytest.mark.parametrize("way", ["close", "abort"])
def test_an_end_leaves_no_thread_and_no_socket(way: str, tmp_path: Path) -> None:
    def run(worker: int) -> dict[str, Any]:
        before = open_things()
        endpoint = GlooEndpoint(worker, 2, str(tmp_path / "rendezvous"), WAIT_S)
        during = open_things()
        endpoint.send(1 - worker, Message(0, (), (torch.ones(2**18),)))
        endpoint.close() if way == "close" or worker == 1 else endpoint.abort("enough")
        return {"result": [before, during, settled(open_things, before), threading.active_count()]}

    for outcome in fork_all([lambda: run(0), lambda: run(1)]):
        before, during, after, threads = outcome["result"]
        assert during > before
        assert after == before
        assert threads == 1


def test_waiting_longer_than_the_deadline_of_the_rendezvous_breaks_nothing(tmp_path: Path) -> None:
    def late(endpoint: GlooEndpoint) -> None:
        time.sleep(2.3)
        endpoint.send(1, Message(0, (1,), (torch.ones(100_000),)))
        endpoint.close()

    def patient(endpoint: GlooEndpoint) -> int:
        delivery = endpoint.receive(WAIT_S)
        endpoint.close()
        assert isinstance(delivery, Arrived)
        return delivery.message.header[0]

    assert start({0: late, 1: patient}, tmp_path, deadline_s=2.0)[1] == 1


def test_a_worker_that_never_comes_ends_the_rendezvous(tmp_path: Path) -> None:
    with pytest.raises(DeadlineError, match=r"2 workers within 0\.2 s"):
        GlooEndpoint(0, 2, str(tmp_path / "rendezvous"), 0.2)


def test_a_message_cut_off_by_death_never_arrives(tmp_path: Path) -> None:
    def perish(endpoint: GlooEndpoint) -> None:
        endpoint.send(1, Message(0, (1,), (torch.ones(100),)))
        endpoint.receive(WAIT_S)
        endpoint.send(1, Message(0, (2,), (torch.ones(2**25),)))
        os.kill(os.getpid(), signal.SIGKILL)

    def survive(endpoint: GlooEndpoint) -> list[str]:
        first = endpoint.receive(WAIT_S)
        endpoint.grant(0, 0)
        got = [type(first).__name__, type(endpoint.receive(WAIT_S)).__name__]
        endpoint.close()
        return got

    assert start({0: perish, 1: survive}, tmp_path)[1] == ["Arrived", "Lost"]


def test_a_worker_that_stopped_answering_holds_up_neither_close_nor_abort(tmp_path: Path) -> None:
    def stopped(endpoint: GlooEndpoint) -> None:
        endpoint.send(1, Message(0, (os.getpid(),), ()))
        endpoint.send(2, Message(0, (os.getpid(),), ()))
        for _ in range(2):
            endpoint.receive(WAIT_S)
        os.kill(os.getpid(), signal.SIGSTOP)

    def leave(endpoint: GlooEndpoint) -> int:
        delivery = endpoint.receive(WAIT_S)
        assert isinstance(delivery, Arrived)
        endpoint.grant(0, 0)
        while "T (stopped)" not in Path(f"/proc/{delivery.message.header[0]}/status").read_text():
            time.sleep(0.005)
        endpoint.send(0, Message(0, (), (torch.ones(2**22),)))
        if endpoint.worker == 1:
            endpoint.abort("enough")
        else:
            assert isinstance(endpoint.receive(WAIT_S), Lost)
            with pytest.raises(DeadlineError, match=r"no answer from workers \[0\]"):
                endpoint.close()
            os.kill(delivery.message.header[0], signal.SIGKILL)
        return int(settled(lambda: open_things()[0], 1))

    results = start({0: stopped, 1: leave, 2: leave}, tmp_path, deadline_s=2.0)
    assert results[1:] == [1, 1]


@pytest.mark.parametrize(("reason", "told"), [("", "no reason given"), ("x" * 100_000, "x" * 2**15)])
def test_an_abort_without_words_or_with_too_many_is_still_an_abort(reason: str, told: str, tmp_path: Path) -> None:
    def listen(endpoint: GlooEndpoint) -> str:
        lost = endpoint.receive(WAIT_S)
        endpoint.close()
        assert isinstance(lost, Lost)
        return lost.reason

    assert start({0: lambda endpoint: endpoint.abort(reason), 1: listen}, tmp_path)[1] == told


def test_bytes_that_are_no_message_lose_their_sender_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def babble(endpoint: GlooEndpoint) -> None:
        monkeypatch.setattr(gloo.wire, "grant_frame", lambda channel: bytearray(b"\xff" * 64))
        endpoint.grant(1, 0)
        endpoint.receive(WAIT_S)

    def listen(endpoint: GlooEndpoint) -> list[str]:
        lost = endpoint.receive(WAIT_S)
        endpoint.abort("over")
        assert isinstance(lost, Lost)
        return [lost.reason]

    assert "bytes that are no message" in start({0: babble, 1: listen}, tmp_path)[1][0]


def test_who_has_no_room_for_a_message_says_so_itself_and_can_still_tell_its_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(endpoint: GlooEndpoint) -> str:
        assert settled((tmp_path / "no room").exists, True)
        endpoint.send(1, Message(0, (), (torch.ones(2**20),)))
        lost = endpoint.receive(WAIT_S)
        endpoint.abort("over")
        assert isinstance(lost, Lost)
        return lost.reason

    def no_room(head: object, body: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")

    def listen(endpoint: GlooEndpoint) -> str:
        monkeypatch.setattr(gloo.wire, "decode", no_room)
        (tmp_path / "no room").touch()
        lost = endpoint.receive(WAIT_S)
        assert isinstance(lost, Lost)
        told = endpoint.cause(WorkerLostError("worker 0", got=lost.reason, expected="life", remedy="None."))
        endpoint.abort("worker 1 has no room")
        return f"{told.subject}: {told.got}"

    heard, told = start({0: send, 1: listen}, tmp_path)
    assert heard == "worker 1 has no room"
    assert told.startswith("worker 1: out of memory for a message from worker 0 ([enforce fail")


def test_workers_that_are_no_partners_have_no_threads_for_each_other(tmp_path: Path) -> None:
    """A star of 64 would have 63 times as many."""

    def run(worker: int, partners: tuple[int, ...]) -> dict[str, Any]:
        endpoint = GlooEndpoint(worker, 4, str(tmp_path / "rendezvous"), WAIT_S, partners=partners)
        threads = threading.active_count()
        for other in partners:
            endpoint.send(other, Message(0, (worker,), ()))
        got = sorted(delivery.source for delivery in (endpoint.receive(WAIT_S) for _ in partners))
        endpoint.close()
        return {"result": [threads, got]}

    outcomes = fork_all([lambda: run(0, (1, 2, 3)), *(lambda k=k: run(k, (0,)) for k in (1, 2, 3))])
    assert [outcome["result"] for outcome in outcomes] == [[8, [1, 2, 3]], *[[4, [0]]] * 3]


def test_a_child_forked_after_backward_runs_backward_and_talks(tmp_path: Path) -> None:
    """The launcher captures and tries a model in the parent, with one thread, before it forks the workers."""

    def train() -> float:
        weight = torch.ones(64, 64, requires_grad=True)
        (torch.randn(8, 64) @ weight).relu().sum().backward()
        assert weight.grad is not None
        return float(weight.grad.abs().sum())

    train()

    def work(endpoint: GlooEndpoint) -> float:
        endpoint.send(1 - endpoint.worker, Message(0, (), (train(),)))
        delivery = endpoint.receive(WAIT_S)
        endpoint.close()
        assert isinstance(delivery, Arrived)
        return float(delivery.message.values[0] or 0.0)

    assert all(value > 0 for value in start({0: work, 1: work}, tmp_path))
