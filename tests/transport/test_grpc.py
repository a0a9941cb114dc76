"""What only the transport over gRPC has to promise: strangers are refused, each by its reason, and training goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from roundelay.errors import DeadlineError, UsageError, WorkerLostError
from roundelay.ir.transports import check_packages
from roundelay.planner.plan_options import Choices
from roundelay.planning.check_here import check_here
from roundelay.transport import envelope as envelopes
from roundelay.transport import grpc_link
from roundelay.transport import grpc_stream as stream
from roundelay.transport.endpoint import Arrived, Lost, Message
from roundelay.transport.grpc_member import Member, load_grpc, name_of
from roundelay.transport.grpc_stream import GrpcEndpoint, forked_over_grpc
from roundelay.transport.meeting import FileMeeting
from roundelay.trust.authority import Credentials, new_authority
from tests.transport.harness import fork_all
from tests.transport.test_gloo import listening_addresses, settled

WAIT_S = 8.0
DAY = timedelta(days=1)
OURS = new_authority("roundelay", datetime.now(UTC), DAY)
FOREIGN = new_authority("roundelay", datetime.now(UTC), DAY)
LOOPBACK = "0000000000000000FFFF00000100007F"
"""127.0.0.1 as an address of IPv6, as the kernel lists it."""

Task = Callable[[GrpcEndpoint], Any]


def open_one(worker: int, num_workers: int, tmp_path: Path, deadline_s: float = WAIT_S) -> GrpcEndpoint:
    return GrpcEndpoint(worker, range(num_workers), member(worker, tmp_path, deadline_s), deadline_s)


def member(worker: int, tmp_path: Path, deadline_s: float = WAIT_S) -> Member:
    """One that meets the others in a file of the folder."""
    return Member(OURS.issue(name_of(worker)), FileMeeting(str(tmp_path / "ports"), 2, deadline_s))


def start(tasks: list[Task], tmp_path: Path, *others: Callable[[], Any], deadline_s: float = WAIT_S) -> list[Any]:
    """What each worker's task returned, which ends its endpoint itself, and then what each of the others returned."""
    bodies = [
        lambda k=k, task=task: task(open_one(k, len(tasks), tmp_path, deadline_s)) for k, task in enumerate(tasks)
    ]
    outcomes = fork_all([lambda body=body: {"result": body()} for body in [*bodies, *others]])
    assert all("result" in outcome for outcome in outcomes), outcomes
    return [outcome["result"] for outcome in outcomes]


def train(tmp_path: Path) -> tuple[Task, Task]:
    """Two workers that exchange messages until the file `done` is there; the first tells what it refused."""

    def lead(endpoint: GrpcEndpoint) -> dict[str, int]:
        over = False
        while not over:
            over = (tmp_path / "done").exists()
            endpoint.send(1, Message(0, (int(over),), (torch.ones(100),)))
            endpoint.grant(1, 0)
            assert isinstance(next_message(endpoint), Arrived)
        endpoint.close()
        return dict(endpoint.refused)

    def answer(endpoint: GrpcEndpoint) -> None:
        over = 0
        while not over:
            delivery = next_message(endpoint)
            assert isinstance(delivery, Arrived), delivery
            over = delivery.message.header[0]
            endpoint.send(0, Message(0, (), ()))
        endpoint.close()

    return lead, answer


def next_message(endpoint: GrpcEndpoint) -> Any:
    """The next message from worker 0 or 1, or the loss of one of these."""
    while (delivery := endpoint.receive(WAIT_S, credits=False)).source == 2:
        pass
    return delivery


# --- who connects


def connect(tmp_path: Path, credentials: Credentials | None, certified: bool, hello: bytes) -> list[str]:
    """Call worker 0 as a stranger would; the code and the words with which it is refused."""
    grpc = load_grpc()
    address = dist.FileStore(str(tmp_path / "ports"), 2).get(name_of(0)).decode()
    time.sleep(0.3)
    if credentials is None:
        channel = grpc.insecure_channel(address)
    else:
        pair = (credentials.key, credentials.certificate) if certified else (None, None)
        named = [("grpc.ssl_target_name_override", name_of(0))]
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(OURS.certificate, *pair), options=named)
    call = channel.stream_stream("/roundelay/Link")(iter([hello]))
    try:
        return ["let in", str(next(call))]
    except grpc.RpcError as error:
        return [error.code().name, error.details()]
    finally:
        (tmp_path / "done").touch()


def hello_of(worker: int, generation: int = 0) -> bytes:
    return envelopes.seal(envelopes.HELLO, generation, 0, [worker.to_bytes(4, "little")])


EXPIRED = replace(OURS, start=datetime.now(UTC) - 2 * DAY)
STRANGERS: dict[str, tuple[Credentials | None, bool, bytes, str]] = {
    "no certificate": (OURS.issue(name_of(1)), False, hello_of(1), ""),
    "plaintext": (None, False, hello_of(1), ""),
    "foreign authority": (FOREIGN.issue(name_of(1)), True, hello_of(1), ""),
    "expired": (EXPIRED.issue(name_of(1)), True, hello_of(1), ""),
    "another's name": (OURS.issue(name_of(7)), True, hello_of(1), envelopes.MISNAMED),
    "unknown worker": (OURS.issue(name_of(7)), True, hello_of(7), envelopes.MISNAMED),
    "the server's own name": (OURS.issue(name_of(0)), True, hello_of(0), envelopes.MISNAMED),
    "stale generation": (OURS.issue(name_of(1)), True, hello_of(1, 9), envelopes.STALE),
    "connected already": (OURS.issue(name_of(1)), True, hello_of(1), envelopes.TAKEN),
    "no envelope": (OURS.issue(name_of(1)), True, b"\xff" * 40, envelopes.FOREIGN),
    "half an envelope": (OURS.issue(name_of(1)), True, hello_of(1)[:9], envelopes.TRUNCATED),
    "a message first": (OURS.issue(name_of(1)), True, envelopes.seal(envelopes.WHOLE, 0, 0, []), envelopes.MISPLACED),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_a_stranger_is_refused_and_training_goes_on(who: str, tmp_path: Path) -> None:
    *credentials, reason = STRANGERS[who]
    refused, _, told = start([*train(tmp_path)], tmp_path, lambda: connect(tmp_path, *credentials))
    if reason:
        assert (told, refused) == (["PERMISSION_DENIED", reason], {reason: 1})
    else:  # the handshake of TLS fails: no byte of it reaches us
        assert (told[0], refused) == ("UNAVAILABLE", {})


def test_a_server_of_a_foreign_authority_or_another_name_is_not_talked_to(tmp_path: Path) -> None:
    for i, credentials in enumerate((FOREIGN.issue(name_of(0)), OURS.issue(name_of(5)))):
        path = str(tmp_path / f"ports {i}")

        def serve(credentials: Credentials = credentials, path: str = path) -> str:
            with pytest.raises(DeadlineError) as caught:
                GrpcEndpoint(0, range(2), Member(credentials, FileMeeting(path, 2, 2.0)), 2.0)
            return caught.value.got

        def call(path: str = path) -> str:
            with pytest.raises(WorkerLostError, match="worker 1 connecting to worker 0") as caught:
                GrpcEndpoint(1, range(2), Member(OURS.issue(name_of(1)), FileMeeting(path, 2, WAIT_S)), WAIT_S)
            return caught.value.got

        outcomes = fork_all([lambda: {"result": serve()}, lambda: {"result": call()}])
        assert [outcome.get("error") for outcome in outcomes] == [None, None]
        assert outcomes[0]["result"] == "none of workers [1]"


@pytest.mark.parametrize("behind", ["", "data-0"])
@pytest.mark.parametrize("owner", [0, 1])
def test_a_certificate_opens_as_a_service_of_its_owner_only(behind: str, owner: int, tmp_path: Path) -> None:
    """Worker 0 serves: with its own certificate it is talked to, and with another worker's it is not."""

    def meet(worker: int, certified: int) -> str:
        meeting = FileMeeting(str(tmp_path / "ports"), 2, WAIT_S)
        own = Member(OURS.issue(name_of(certified)), meeting, service=behind)
        try:
            GrpcEndpoint(worker, range(2), own, WAIT_S if worker else 2.0).abort("over")
        except (DeadlineError, WorkerLostError) as error:
            return type(error).__name__
        return "met"

    outcomes = fork_all([lambda: {"result": meet(0, owner)}, lambda: {"result": meet(1, 1)}])
    told = ["met", "met"] if owner == 0 else ["DeadlineError", "WorkerLostError"]
    assert outcomes == [{"result": each} for each in told]


# --- what a worker sends that was let in


def flip(piece: bytes) -> bytes:
    return piece[:-1] + bytes([piece[-1] ^ 4])


SEAL = envelopes.seal
TAMPERED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "replay": (lambda piece: SEAL(envelopes.WHOLE, 0, 1, [piece[28:]]), envelopes.REPLAYED),
    "gap": (lambda piece: SEAL(envelopes.WHOLE, 0, 9, [piece[28:]]), envelopes.SKIPPED),
    "flipped bit": (flip, envelopes.DAMAGED),
    "truncated": (lambda piece: piece[:-3], envelopes.TRUNCATED),
    "oversize": (lambda piece: piece + bytes(1000), envelopes.OVERSIZE),
    "stale generation": (lambda piece: SEAL(envelopes.WHOLE, 7, 2, [piece[28:]]), envelopes.STALE),
    "half a frame": (lambda piece: SEAL(envelopes.WHOLE, 0, 2, [piece[28:40]]), envelopes.TRUNCATED),
    "more than its frame": (
        lambda piece: SEAL(envelopes.WHOLE, 0, 2, [piece[28:], b"x"]),
        envelopes.TRUNCATED,
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_what_is_tampered_with_loses_its_sender_only(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tamper, reason = TAMPERED[what]
    lead, answer = train(tmp_path)

    def listen(endpoint: GrpcEndpoint) -> list[Any]:
        got = [endpoint.receive(WAIT_S), endpoint.receive(WAIT_S)]
        (tmp_path / "done").touch()
        assert isinstance(got[0], Arrived)
        assert isinstance(got[1], Lost)
        return [got[1].source, got[1].reason, lead(endpoint)]

    def babble(endpoint: GrpcEndpoint) -> str:
        endpoint.send(0, Message(0, (), (torch.ones(3),)))
        settled(lambda: endpoint._links[0].written, 1)
        monkeypatch.setattr(envelopes, "seal", lambda *given: tamper(SEAL(*given)))
        endpoint.send(0, Message(0, (), (torch.ones(3),)))
        lost = endpoint.receive(WAIT_S)
        monkeypatch.setattr(envelopes, "seal", SEAL)
        endpoint.abort("refused")
        assert isinstance(lost, Lost)
        return lost.reason

    (source, told, refused), _, heard = start([listen, answer, babble], tmp_path)
    assert (source, refused) == (2, {reason: 1})
    assert told == f"it sent bytes that are no message ({reason})"
    assert reason in heard


def test_memory_is_not_allocated_for_what_is_only_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that announces 8 GiB, followed by 100,000 bytes."""
    lead, answer = train(tmp_path)

    def listen(endpoint: GrpcEndpoint) -> Any:
        monkeypatch.setattr(grpc_link, "decoded", lambda head, body: pytest.fail("memory was allocated"))
        lost = endpoint.receive(WAIT_S)
        monkeypatch.undo()
        (tmp_path / "done").touch()
        assert isinstance(lost, Lost)
        lead(endpoint)
        return lost.reason

    def babble(endpoint: GrpcEndpoint) -> None:
        announced = torch.empty(2**31, device="meta")
        frame, _ = stream.wire.encode(Message(0, (), (announced,)))
        endpoint._post(endpoint._links[0], frame, [torch.zeros(100_000, dtype=torch.uint8)])
        endpoint.receive(WAIT_S)
        endpoint.abort("refused")

    assert "truncated" in start([listen, answer, babble], tmp_path)[0]


# --- ends


def test_nothing_listens_outside_loopback_and_an_end_leaves_no_loop(tmp_path: Path) -> None:
    def look(endpoint: GrpcEndpoint) -> list[Any]:
        found = listening_addresses()
        endpoint.close()
        return [found, endpoint._thread.is_alive(), settled(listening_addresses, [])]

    assert start([look, look], tmp_path) == [[[LOOPBACK], False, []], [[], False, []]]


def test_a_worker_serves_at_the_address_that_it_is_given_and_is_found_there(tmp_path: Path) -> None:
    def look(worker: int) -> dict[str, Any]:
        elsewhere = replace(member(worker, tmp_path), host=f"127.0.0.{worker + 2}")
        endpoint = GrpcEndpoint(worker, range(2), elsewhere, WAIT_S)
        found = listening_addresses()
        endpoint.close()
        return {"result": found}

    outcomes = fork_all([lambda: look(0), lambda: look(1)])
    assert [outcome["result"] for outcome in outcomes] == [[LOOPBACK.replace("0100007F", "0200007F")], []]


def test_a_message_beyond_what_the_plan_sends_is_refused_before_it_has_come(tmp_path: Path) -> None:
    """Three pieces where two are enough for any: nothing of it is kept."""

    def listen() -> dict[str, Any]:
        endpoint = GrpcEndpoint(0, range(2), member(0, tmp_path), WAIT_S, most_bytes=2**20)
        first, lost = endpoint.receive(WAIT_S), endpoint.receive(WAIT_S)
        told = [type(first).__name__, lost.reason if isinstance(lost, Lost) else "", dict(endpoint.refused)]
        endpoint.abort("")
        return {"result": told}

    def send() -> dict[str, Any]:
        endpoint = open_one(1, 2, tmp_path)
        for size in (2**19, 2**21):
            endpoint.send(0, Message(0, (), (torch.zeros(size, dtype=torch.uint8),)))
        endpoint.receive(WAIT_S)
        endpoint.abort("")
        return {"result": None}

    told, _ = [outcome["result"] for outcome in fork_all([listen, send])]
    assert told == ["Arrived", f"it sent bytes that are no message ({envelopes.OVERSIZE})", {envelopes.OVERSIZE: 1}]


def test_a_worker_that_never_comes_ends_the_connecting(tmp_path: Path) -> None:
    def wait(worker: int) -> dict[str, Any]:
        began = time.monotonic()
        with pytest.raises((DeadlineError, WorkerLostError)) as caught:
            open_one(worker, 2, tmp_path / str(worker), 0.5)
        return {"result": [caught.value.got, time.monotonic() - began]}

    for worker in (0, 1):
        (tmp_path / str(worker)).mkdir()
    outcomes = fork_all([lambda: wait(0), lambda: wait(1)])
    for (told, seconds), other in zip((outcome["result"] for outcome in outcomes), (1, 0), strict=True):
        assert told == f"none of workers [{other}]"
        assert seconds < 3


def test_a_silent_worker_is_told_in_seconds_and_holds_up_no_close(tmp_path: Path) -> None:
    def stopped(endpoint: GrpcEndpoint) -> None:
        endpoint.send(1, Message(0, (os.getpid(),), ()))
        endpoint.receive(WAIT_S)
        os.kill(os.getpid(), signal.SIGSTOP)

    def go_on(endpoint: GrpcEndpoint) -> float:
        delivery = endpoint.receive(WAIT_S)
        assert isinstance(delivery, Arrived)
        endpoint.grant(0, 0)
        began = time.monotonic()
        assert isinstance(endpoint.receive(WAIT_S), Lost)
        passed = time.monotonic() - began
        endpoint.close()
        os.kill(delivery.message.header[0], signal.SIGKILL)
        return passed

    assert 3.0 < start([stopped, go_on], tmp_path)[1] < 6.0


def test_an_idle_stream_stays(tmp_path: Path) -> None:
    def wait(endpoint: GrpcEndpoint) -> None:
        with pytest.raises(DeadlineError):
            endpoint.receive(7.0)
        endpoint.close()

    start([wait, wait], tmp_path)


def test_who_has_no_room_for_a_message_says_so_itself_and_can_still_tell_its_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send(endpoint: GrpcEndpoint) -> str:
        assert settled((tmp_path / "no room").exists, True)
        endpoint.send(1, Message(0, (), (torch.ones(2**20),)))
        lost = endpoint.receive(WAIT_S)
        endpoint.abort("over")
        assert isinstance(lost, Lost)
        return lost.reason

    def no_room(head: object, body: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")

    def listen(endpoint: GrpcEndpoint) -> str:
        monkeypatch.setattr(stream.wire, "decode", no_room)
        (tmp_path / "no room").touch()
        lost = endpoint.receive(WAIT_S)
        assert isinstance(lost, Lost)
        told = endpoint.cause(WorkerLostError("worker 0", got=lost.reason, expected="life", remedy="None."))
        endpoint.abort("worker 1 has no room")
        return f"{told.subject}: {told.got}"

    heard, told = start([send, listen], tmp_path)
    assert heard == "worker 1 has no room"
    assert told.startswith("worker 1: out of memory for a message from worker 0 ([enforce fail")


# --- packages


@pytest.mark.parametrize("missing", ["grpc", "cryptography"])
def test_a_missing_package_is_told_before_anything_is_forked(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = stream.check_packages.__globals__["check_installed"].__globals__["importlib"].util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else found(name))
    check_packages("gloo")
    for refused in (lambda: check_here(Choices(workers=2, transport="grpc")), forked_over_grpc(2, 1.0).__enter__):
        with pytest.raises(UsageError, match=r"pip install roundelay\[join\]") as caught:
            refused()
        assert caught.value.got == f"no module {missing}"


def test_who_floods_a_busy_worker_is_not_read_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 messages of 1 MiB, or of 300 empty ones, only some are taken into memory while the worker is busy."""
    monkeypatch.setattr(stream, "MOST_WAITING", 100)

    def busy(endpoint: GrpcEndpoint) -> list[int]:
        waiting = []
        for due in (60, 300):
            time.sleep(1.0)
            waiting.append(endpoint._inbox.qsize())
            assert all(isinstance(endpoint.receive(WAIT_S), Arrived) for _ in range(due))
            endpoint.send(1, Message(0, (), ()))
        endpoint.close()
        return waiting

    def flood(endpoint: GrpcEndpoint) -> None:
        for due, size in ((60, 2**18), (300, 0)):
            for _ in range(due):
                endpoint.send(0, Message(0, (), (torch.zeros(size),)))
            endpoint.receive(WAIT_S)
        endpoint.close()

    own = member(0, tmp_path)
    bodies = [
        lambda: {"result": busy(GrpcEndpoint(0, range(2), own, WAIT_S, 2**21))},
        lambda: {"result": flood(open_one(1, 2, tmp_path))},
    ]
    (told, _) = fork_all(bodies)
    bytes_waiting, waiting = told["result"]
    assert 8 <= bytes_waiting <= 16
    assert 100 <= waiting <= 102
