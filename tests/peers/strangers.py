"""A door in a process of its own, and who comes to it: gRPC is used in forked children only, as others fork here."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import ssl
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from roundelay.membership.roster import Roster, Seat
from roundelay.peers import knock as knocking
from roundelay.peers.door import Door, Terms
from roundelay.peers.gate import Gate
from roundelay.peers.import_grpc import import_grpc
from roundelay.peers.knock import Joined, knock
from roundelay.peers.listener import LOOPBACK
from roundelay.peers.loop_thread import LoopThread
from roundelay.peers.messages import DOOR_NAME, PATH, Versions
from roundelay.peers.refusals import RefusalLog
from roundelay.trust.authority import new_authority
from roundelay.trust.invitation import Address, Invitation
from tests.transport.harness import fork_all

RUN = "0123456789abcdef"
VERSIONS = Versions("0.1.0", "2.13.0+cpu")
MEMBERS = (("203.0.113.7", 43117),)
OURS = new_authority("roundelay", datetime.now(UTC), timedelta(days=1))
WAIT_S = 8.0


@dataclass
class Opened:
    """A door, and what is known of it."""

    door: Door
    gate: Gate
    log: RefusalLog
    path: Path
    loop: LoopThread
    admitted: list[Seat] = field(default_factory=list)

    def invite(self, seconds: float = 600.0, **changes: Any) -> Invitation:
        name = f"worker-{len(self.door.roster.seats)}"
        return self.door.invite(name, int(time.time() + seconds), **changes)

    def join(self, invitation: Invitation | None = None, versions: Versions = VERSIONS) -> Joined:
        return knock(invitation or self.invite(), WAIT_S, versions)

    def reasons(self) -> list[str]:
        """Those that the file lists."""
        lines = [json.loads(line) for line in self.path.read_text().splitlines()]
        assert all(set(line) == {"time", "peer", "reason"} for line in lines)
        return [line["reason"] for line in lines]

    def settled(self, count: int) -> list[str]:
        """The file's reasons once there are so many, or too long has passed."""
        deadline = time.monotonic() + WAIT_S
        while len(self.reasons()) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.reasons()


@contextmanager
def opened(folder: Path, room: int = 100, listen: Address = (LOOPBACK, 0), **given: Any) -> Iterator[Opened]:
    path, loop, admitted = folder / "refused.jsonl", LoopThread("peers"), list[Seat]()
    log = RefusalLog(path)
    gate = Gate(loop, log.refuse, listen)
    door = Door(Terms(RUN, OURS, MEMBERS, VERSIONS), Roster((), room), log, gate, admitted.append, **given)
    try:
        yield Opened(door, gate, log, path, loop, admitted)
    finally:
        door.close()
        gate.close()
        loop.close()
        log.close()


class Complaints(logging.Handler):
    """What libraries log, such as asyncio of a task that was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(f"{record.getMessage()} {record.exc_info}")


def in_child(body: Callable[[], Any]) -> Any:
    """What `body` returns in a forked child, where nothing may be logged."""

    def told() -> dict[str, Any]:
        complaints = Complaints()
        logging.getLogger().addHandler(complaints)
        try:
            result = body()
            gc.collect()
        except BaseException:
            return {"error": traceback.format_exc()}
        return {"error": "\n".join(complaints.heard)} if complaints.heard else {"result": result}

    (outcome,) = fork_all([told])
    assert "result" in outcome, outcome["error"]
    return outcome["result"]


@contextmanager
def calling(address: Address, root: bytes | None, shown_at: Address | None = None) -> Iterator[Any]:
    """A channel of gRPC that trusts `root`, or whatever is shown there; plaintext if `root` is empty."""
    grpc = import_grpc()
    target = f"{address[0]}:{address[1]}"
    if root == b"":
        channel = grpc.insecure_channel(target)
    else:
        trusting = grpc.ssl_channel_credentials(root or knocking._shown(shown_at or address, WAIT_S)[0])
        options = [("grpc.ssl_target_name_override", DOOR_NAME), ("grpc.enable_retries", 0)]
        channel = grpc.secure_channel(target, trusting, options=options)
    with channel:
        yield channel


def call(address: Address, body: bytes | None, method: str = PATH, root: bytes | None = None) -> list[Any]:
    """The code and the words by which a call is refused; a call without a body keeps its stream open."""
    with calling(address, root) as channel:
        bodies = iter([body]) if body is not None else _never()
        try:
            return ["let in", len(next(channel.stream_stream(method)(bodies, timeout=20.0)))]
        except import_grpc().RpcError as error:
            return [error.code().name, error.details()]


def _never() -> Iterator[bytes]:
    time.sleep(10.0)
    yield b""


def send(
    address: Address, sent: bytes, tls: bool = False, source: str = LOOPBACK, server: str = DOOR_NAME
) -> tuple[bytes, float]:
    """What comes back for bytes until the other side ends the connection, and after how many seconds."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    began, received = time.monotonic(), b""
    with socket.create_connection(address, 20.0, (source, 0)) as plain:
        try:
            connection = context.wrap_socket(plain, server_hostname=server) if tls else plain
            connection.sendall(sent)
            while chunk := connection.recv(4096):
                received += chunk
        except OSError:
            pass
        return received, time.monotonic() - began


@contextmanager
def from_elsewhere(address: Address, source: str) -> Iterator[Address]:
    """An address of this machine, behind which connections to `address` come from `source`."""
    loop, tasks = LoopThread("elsewhere"), set[Any]()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(4096):
                writer.write(chunk)
        finally:
            writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(*address, local_addr=(source, 0))
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer), return_exceptions=True)

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(relay(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def serve() -> tuple[asyncio.Server, Address]:
        server = await asyncio.start_server(accept, LOOPBACK, 0)
        return server, server.sockets[0].getsockname()[:2]

    async def stop(server: asyncio.Server) -> None:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    server, where = loop.run(serve(), WAIT_S)
    try:
        yield where
    finally:
        loop.run(stop(server), WAIT_S)
        loop.close()
