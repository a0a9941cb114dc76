"""What a test bed promises: its delays and rates, silent cuts, losses, quotas; and that nothing of it is ever left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import alive
from tests.wan import namespaces
from tests.wan.bed import ROOT, Bed, Unusable

PORT = 5000
WAIT_S = 20.0
SO_RCVBUFFORCE = 33  # not in Python's socket
DEFIANT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    sys.stdout.write(f"{os.getpid()}\\n")
    sys.stdout.flush()
time.sleep(600)
"""
"""A process that ignores SIGTERM, and its child, which has left its group and session."""

HOLDER = """
import os, sys, time
from tests.wan.bed import Bed
with Bed(2, cores=0.5) as bed:
    process = bed.popen(1, [sys.executable, "-c", sys.argv[1]])
    heir = os.fork()
    if heir:
        print(bed.name(0), process.pid, heir, flush=True)
    time.sleep(600)
"""
"""A process that holds a bed, and its fork, which has all that it had open and outlives it."""


@pytest.fixture(scope="module", autouse=True)
def usable() -> None:
    """Skip, and say why, where there can be no bed."""
    try:
        with Bed(peers=1):
            pass
    except Unusable as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def nothing_is_left(usable: None) -> Iterator[None]:
    """No namespace, quota or carrying process is left that was not there before, but for other sessions' live beds."""
    before = namespaces.names()
    yield
    others = {name for name in namespaces.names() if not carried_by_us(name)}
    assert namespaces.names() - before - others == set()


def carried_by_us(name: str) -> bool:
    """Whether the process that carries a bed is dead or a child of ours; it may belong to another session of pytest."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(int(name.split("-")[1])).ppid() in (os.getpid(), 1)
    return True


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def datagrams(bed: Bed, *peers: int) -> list[socket.socket]:
    """A socket of UDP on each of these peers."""
    made = []
    for peer in peers:
        with bed.inside(peer):
            made.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        made[-1].bind((bed.address(peer), PORT))
        made[-1].settimeout(WAIT_S)
        made[-1].setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 2**24)
    return made


def connected(bed: Bed, source: int, sink: int) -> list[socket.socket]:
    """Both ends of a stream of TCP between two peers."""
    with bed.inside(sink):
        listener = socket.create_server((bed.address(sink), PORT))
    with closing(listener), bed.inside(source):
        outward = socket.create_connection((bed.address(sink), PORT), timeout=WAIT_S)
        return [outward, listener.accept()[0]]


def shortest_trip_ms(bed: Bed, here: int, there: int) -> float:
    """The shortest of 10 round trips: a busy machine can only lengthen one."""
    trips = []
    with ExitStack() as stack:
        near, far = (stack.enter_context(end) for end in datagrams(bed, here, there))
        for _ in range(10):
            begin = time.perf_counter()
            near.sendto(b"?", far.getsockname())
            far.sendto(*far.recvfrom(9))
            near.recv(9)
            trips.append(time.perf_counter() - begin)
    return 1e3 * min(trips)


@pytest.mark.parametrize(("rtt_ms", "expected"), [(40, 40), ((10, 100), 55), (1, 1)])
def test_a_round_trip_takes_the_time_that_was_asked_for(rtt_ms: float, expected: float) -> None:
    with Bed(2, rtt_ms=rtt_ms) as bed:
        assert expected <= shortest_trip_ms(bed, 0, 1) <= 1.1 * expected + 2


def mbit_per_s(bed: Bed, source: int, sink: int, seconds: float = 1.0) -> float:
    """The rate of what comes in a stream of TCP, behind its slow start of half a second."""
    with ExitStack() as stack:
        outward, inward = (stack.enter_context(end) for end in connected(bed, source, sink))
        over = threading.Event()

        def send() -> None:
            while not over.is_set():
                outward.sendall(bytes(2**16))
            outward.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        begin, received = time.monotonic(), 0
        while (now := time.monotonic()) < begin + 0.5 + seconds:
            got = len(inward.recv(2**18))
            received += got if now > begin + 0.5 else 0
        over.set()
        while inward.recv(2**18):
            pass
        sender.join(WAIT_S)
    return received * 8e-6 / seconds


@pytest.mark.parametrize(("rates", "expected"), [(100, 100), ((200, 30), 30), ((30, 200), 30)])
def test_one_stream_takes_the_rate_of_the_slower_line(rates: float, expected: float) -> None:
    with Bed(2, mbit_per_s=rates, rtt_ms=20) as bed:
        got: list[float] = []
        while not any(0.9 * expected <= rate for rate in got) and len(got) < 5:  # a busy machine can only be slower
            got.append(mbit_per_s(bed, 0, 1))
        assert 0.9 * expected <= max(got) <= 1.1 * expected, got


def test_what_a_peer_sends_to_one_takes_its_line_from_the_others() -> None:
    """A line is one: two streams out of it share its rate."""
    with Bed(3, mbit_per_s=40, rtt_ms=4) as bed, ExitStack() as stack:
        (near,) = (stack.enter_context(end) for end in datagrams(bed, 0))
        others = [stack.enter_context(end) for end in datagrams(bed, 1, 2)]
        begin = time.monotonic()
        for _ in range(100):
            for other in others:
                near.sendto(bytes(1400), other.getsockname())
        for other in others:
            for _ in range(100):
                other.recv(1500)
        assert time.monotonic() - begin >= 200 * 1428 * 8e-6 / 40


def test_a_cut_tells_nobody_and_mending_it_goes_on() -> None:
    with Bed(3, rtt_ms=4) as bed, ExitStack() as stack:
        outward, inward = (stack.enter_context(end) for end in connected(bed, 0, 1))
        near, far, third = (stack.enter_context(end) for end in datagrams(bed, 0, 1, 2))
        bed.cut(1)
        for sending in (outward, inward):
            sending.sendall(b"across the cut")
        far.sendto(b"lost", near.getsockname())
        near.sendto(b"lost", far.getsockname())
        for silent in (outward, inward, near, far):
            silent.settimeout(0.3)
            with pytest.raises(TimeoutError):
                silent.recv(99)
        with pytest.raises(TimeoutError), bed.inside(0):
            socket.create_connection((bed.address(1), PORT), timeout=0.3)
        near.sendto(b"others", third.getsockname())
        assert third.recv(99) == b"others"
        bed.mend(1)
        for waiting in (outward, inward):
            waiting.settimeout(WAIT_S)
            assert waiting.recv(99) == b"across the cut"


def arrived(near: socket.socket, far: socket.socket, count: int = 1000) -> int:
    """How many of so many datagrams arrive."""
    for _ in range(count):
        near.sendto(b"." * 20, far.getsockname())
    far.settimeout(0.3)
    got = 0
    with suppress(TimeoutError):
        while got < count:
            got += bool(far.recv(99))
    return got


@pytest.mark.parametrize("way", [(0, 1), (1, 0)])
def test_the_share_of_packets_that_was_asked_for_is_lost_both_ways(way: tuple[int, int]) -> None:
    with Bed(2, rtt_ms=2) as bed, ExitStack() as stack:
        near, far = (stack.enter_context(end) for end in datagrams(bed, *way))
        bed.loss(1, 0.3)
        assert 600 <= arrived(near, far) <= 800
        bed.loss(1, 0)
        assert arrived(near, far) == 1000


def test_a_peer_has_its_share_of_a_core() -> None:
    with Bed(2, cores=(0.2, 0.8)) as bed:
        busy = [sys.executable, "-c", "while True: pass"]
        processes = [psutil.Process(bed.popen(peer, busy).pid) for peer in (0, 1)]
        until(lambda: all(sum(process.cpu_times()[:2]) > 0.1 for process in processes), "they do not run")
        begin, before = time.monotonic(), [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(1)
        took_s = time.monotonic() - begin
        used = [(sum(process.cpu_times()[:2]) - was) / took_s for process, was in zip(processes, before, strict=True)]
    assert used[0] < 0.25
    assert used[0] < used[1] < 0.85


def test_what_runs_on_a_peer_dies_with_the_bed() -> None:
    with suppress(ZeroDivisionError), Bed(2) as bed:
        process = bed.popen(1, [sys.executable, "-c", DEFIANT], stdout=subprocess.PIPE, text=True)
        orphan = int(process.stdout.readline())
        process.stdout.close()
        assert alive(orphan)
        raise ZeroDivisionError
    assert process.returncode == -signal.SIGKILL
    assert not alive(orphan)


@contextmanager
def held(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, list[int]]]:
    """A process that holds a bed: itself, the name of a namespace, and the processes in its bed."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    out = tmp_path / "out"
    command = [sys.executable, "-c", HOLDER, DEFIANT]
    with out.open("w") as file:
        holder = subprocess.Popen(command, stdout=file, stderr=subprocess.DEVNULL, text=True, env=environment)
    try:
        until(lambda: out.read_text().count("\n") == 2 or holder.poll() is not None, "no bed was made")
        orphan, line = sorted(out.read_text().splitlines(), key=len)
        name, process, heir = line.split()
        try:
            yield holder, name, [int(orphan), int(process)]
        finally:
            os.kill(int(heir), signal.SIGKILL)
    finally:
        holder.kill()
        holder.wait(WAIT_S)


def gone(name: str, processes: list[int]) -> bool:
    mine = {other for other in namespaces.names() if other.split("-")[1] == name.split("-")[1]}
    return not mine and not any(map(alive, [*processes, int(name.split("-")[1])]))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_bed_whose_holder_is_struck(number: signal.Signals, tmp_path: Path) -> None:
    with held(tmp_path) as (holder, name, processes):
        assert name in namespaces.names()
        holder.send_signal(number)
        holder.wait(WAIT_S)
        until(lambda: gone(name, processes), "something is left")


def test_a_bed_removes_what_dead_ones_have_left(tmp_path: Path) -> None:
    with held(tmp_path) as (holder, name, processes):
        os.kill(int(name.split("-")[1]), signal.SIGKILL)
        holder.kill()
        holder.wait(WAIT_S)
        assert name in namespaces.names()
        with Bed(1):
            assert gone(name, processes)


def test_two_beds_do_not_meet() -> None:
    with Bed(2, rtt_ms=4) as one, ExitStack() as stack:
        with Bed(2, rtt_ms=4) as other:
            ends = [[stack.enter_context(end) for end in datagrams(bed, 0, 1)] for bed in (one, other)]
            for (near, far), text in zip(ends, (b"one", b"other"), strict=True):
                near.sendto(text, far.getsockname())
            assert [far.recv(99) for _, far in ends] == [b"one", b"other"]
        near, far = ends[0]
        near.sendto(b"still", far.getsockname())
        assert far.recv(99) == b"still"


def test_a_bed_whose_carrier_dies_says_so() -> None:
    bed = Bed(1)
    bed.__enter__()
    carrier = int(bed.name(0).split("-")[1])
    os.kill(carrier, signal.SIGKILL)
    until(lambda: not alive(carrier), "it lives")
    with pytest.raises(RuntimeError, match=r"carries the bed's packets ended with code -9"):
        bed.__exit__()
