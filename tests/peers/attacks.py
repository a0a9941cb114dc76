"""What strangers, and members who misbehave, send to the listeners of a run. Functions run in forked children."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from datetime import timedelta

from roundelay.peers.import_grpc import import_grpc
from roundelay.transport import envelope as envelopes
from roundelay.trust.authority import BACKUP, Authority, Credentials, new_authority
from roundelay.trust.invitation import Address
from tests.peers.strangers import WAIT_S, send
from tests.peers.strangers import call as knocked

PICKLE = pickle.dumps([*range(100)])
LINK, GET = "/roundelay/Link", "/roundelay.Members/Get"


def hello(worker: int, sequence: int = 0) -> bytes:
    """The first piece of a stream."""
    return envelopes.seal(envelopes.HELLO, 0, sequence, [worker.to_bytes(4, "little")])


@dataclass(frozen=True)
class Port:
    """A listener that wants to be shown a certificate.

    Args:
        address: where it listens.
        name: in its certificate.
        method: what it serves.
        good: what a member may send there.
        worker: who may send it.
    """

    address: Address
    name: str
    method: str
    good: bytes
    worker: int

    def call(self, own: Credentials | None, body: bytes, authority: bytes) -> str:
        """How a call ends, by one who shows these credentials, or none: its words, or the name of its code."""
        grpc = import_grpc()
        shown = (own.key, own.certificate) if own is not None else (None, None)
        options = [("grpc.ssl_target_name_override", self.name), ("grpc.enable_retries", 0)]
        trusting = grpc.ssl_channel_credentials(authority, *shown)
        with grpc.secure_channel("{}:{}".format(*self.address), trusting, options=options) as channel:
            try:
                answer: bytes = next(channel.stream_stream(self.method)(iter([body]), timeout=WAIT_S))
                return f"let in: {answer!r}"
            except grpc.RpcError as error:
                return str(error.details() if error.code().name == "PERMISSION_DENIED" else error.code().name)


def strangers(port: Port, authority: Authority) -> dict[str, str]:
    """Who does not prove to be of the run, and how each was refused."""
    name = f"worker-{port.worker}"
    foreign = new_authority("roundelay", authority.start, authority.valid)
    expired = replace(authority, start=authority.start - timedelta(days=9))
    called: dict[str, tuple[Credentials | None, bytes]] = {
        "no certificate": (None, port.good),
        "foreign authority": (foreign.issue(name), port.good),
        "expired": (expired.issue(name), port.good),
        "wrong role": (authority.issue(name, BACKUP), port.good),
        "pickle": (authority.issue("worker-9"), PICKLE),
        "oversize": (authority.issue("worker-9"), port.good + bytes(2**16)),
    }
    outcomes = {who: port.call(own, body, authority.certificate) for who, (own, body) in called.items()}
    for who, sent in (("plaintext", b"GET / HTTP/1.1\r\n\r\n"), ("bare pickle", PICKLE)):
        outcomes[who] = send(port.address, sent)[0].decode(errors="replace")
    return outcomes


def frames(port: Port, authority: Authority) -> dict[str, str]:
    """Pieces that come from certified workers, and must not."""
    first, own = hello(9), authority.issue("worker-9")
    sent: dict[str, tuple[Credentials, bytes]] = {
        "truncated frame": (own, first[:20]),
        "flipped bit": (own, first[:-1] + bytes([first[-1] ^ 1])),
        "skipped frame": (own, hello(9, 5)),
        "oversize header": (own, first[:16] + b"\xff" * 4 + first[20:]),
        "another's name": (own, port.good),
        "unknown worker": (own, first),
        "replayed frame": (authority.issue(f"worker-{port.worker}"), port.good),
    }
    return {what: port.call(shown, body, authority.certificate) for what, (shown, body) in sent.items()}


def at_door(address: Address) -> dict[str, str]:
    """What a door refuses beside what its own test sends."""
    return {
        "pickle": knocked(address, PICKLE)[1],
        "oversize": knocked(address, bytes(40_000))[1],
        "another server": send(address, b"", tls=True, server="www.example.org")[0].decode(),
        "wrong method": knocked(address, b"", method=GET)[1],
        "plaintext": send(address, b"GET / HTTP/1.1\r\n\r\n")[0].decode(),
        "bare pickle": send(address, PICKLE)[0].decode(),
    }
