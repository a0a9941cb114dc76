"""The process that makes a bed's namespaces, carries packets between them and removes them: ``-m tests.wan.wire JSON``.

Each peer has one TUN device, all of which this process reads and writes: no bridge, no veth, and the devices vanish
with the process. A packet waits until its peer's line is free, takes its bytes' time there, both delays, and its time
on the other peer's line; what finds more than `QUEUE_S` waiting before it is dropped. Rates are kept here rather than
by tbf, for here they are exact in both directions, and count what TCP's large packets (up to `segments` of `MTU` bytes,
so that few are to be carried) would take on a wire.

It ends, and removes everything, when it is told to by a line on its input, or the process that started it has died.
"""

from __future__ import annotations

import fcntl
import gc
import heapq
import itertools
import json
import os
import select
import signal
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from tests.wan.namespaces import Lacking, inside, name_of, remove, run, set_quota

DEVICE, MTU = "wan0", 1500
NETWORK = "10.77.0"
QUEUE_S = 0.1
"""How long a packet may wait for a line: what a home router holds."""

STRUCK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

FEW, TICK_S = 8, 0.001
"""With more than a few packets on their way, others are looked for once in a while: a wake-up costs more than one."""

FILTER = f"""table netdev bed {{
  chain in {{ type filter hook ingress device "{DEVICE}" priority 0; }}
  chain out {{ type filter hook egress device "{DEVICE}" priority 0; }}
}}
"""
CONGESTION = ("cubic", "reno")
"""TCP's control of congestion, whatever this machine's own is: the first that its kernel allows in a namespace."""

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TUN, _NO_PI, _VNET_HDR = 0x1, 0x1000, 0x4000
_CSUM, _TSO4 = 0x1, 0x2
_BEFORE_IP = struct.Struct("=BBHHHH")
"""virtio's header: flags, kind of segmentation, bytes of headers, bytes of data in a segment, where a checksum goes."""
_DESTINATION = slice(_BEFORE_IP.size + 16, _BEFORE_IP.size + 20)
_MOST_BYTES = 2**16 + _BEFORE_IP.size
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Peer:
    """One peer's line to the others.

    Args:
        mbit_per_s: of IP packets, each way.
        rtt_ms: there and back, to a peer with the same.
        cores: that its processes may use; None for all.
    """

    mbit_per_s: float
    rtt_ms: float
    cores: float | None = None


def address(peer: int) -> str:
    """The address of a peer, the same in each bed."""
    return f"{NETWORK}.{peer + 1}"


def make(name: str, peer: int, asked: Peer, segments: int) -> int:
    """Make one peer's namespace; return the descriptor of its device.

    Raises:
        Lacking: something is missing here.
    """
    of_kernel = "Run as root, on a kernel with network namespaces and TUN; in a container, privileged."
    run("ip", "netns", "add", name, lacking="network namespaces", remedy=of_kernel)
    try:
        with inside(name):
            tun = _device()
            _control_congestion()
    except OSError as error:
        raise Lacking(f"TUN devices (/dev/net/tun: {error})", "Load the kernel's module: modprobe tun.") from error
    lines = (
        "link set lo up",
        f"link set {DEVICE} mtu {MTU} txqueuelen 5000 gso_max_segs {segments} up",
        f"addr add {address(peer)}/24 dev {DEVICE}",
    )
    run("ip", "-n", name, "-batch", "-", text="\n".join(lines), lacking="a device", remedy=of_kernel)
    newer = "Take a kernel of 5.16 or newer with nf_tables and CONFIG_NETFILTER_EGRESS."
    run(*in_namespace(name), "nft", "-f", "-", text=FILTER, lacking="nftables at a device's ends", remedy=newer)
    if asked.cores is not None:
        set_quota(name, asked.cores)
    return tun


def in_namespace(name: str) -> tuple[str, ...]:
    """What comes before a command that runs in a namespace, and becomes that command's process."""
    return ("nsenter", f"--net=/run/netns/{name}", "--")


def _device() -> int:
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TUN | _NO_PI | _VNET_HDR))
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _CSUM | _TSO4)
    return tun


def _control_congestion() -> None:
    for control in CONGESTION:
        with suppress(PermissionError):
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(control)
            return


@final
class Line:
    """What is known of one peer's line: each way, until when it is taken."""

    def __init__(self, tun: int, asked: Peer) -> None:
        self.tun = tun
        self.byte_s = 8e-6 / asked.mbit_per_s
        self.delay_s = asked.rtt_ms / 4e3  # two lines, there and back
        self.up_s = self.down_s = 0.0


@final
class Wire:
    """All lines, and the packets on their way.

    Args:
        lines: of peers 0, 1, ...
    """

    def __init__(self, lines: list[Line]) -> None:
        self._lines = {line.tun: line for line in lines}
        self._to = {bytes(map(int, address(k).split("."))): line for k, line in enumerate(lines)}
        self._way: list[tuple[float, int, bool, Line, float, bytes]] = []  # due, number, its last bit?, whither ...
        self._number = itertools.count()

    def carry_until(self, ends: list[int]) -> None:
        """Carry packets until one of these descriptors has something to read."""
        watched = [*self._lines, *ends]
        while True:
            now = time.monotonic()
            busy = len(self._way) > FEW
            while self._way and self._way[0][0] <= now + busy * TICK_S / 2:
                self._advance(*heapq.heappop(self._way))
            if busy:
                time.sleep(TICK_S)
            wait = max(0.0, self._way[0][0] - time.monotonic()) if self._way else None
            for ready in select.select(watched, (), (), wait)[0]:
                if ready in ends:
                    return
                self._take_all(self._lines[ready])

    def _take_all(self, line: Line) -> None:
        with suppress(BlockingIOError):
            for _ in range(_AT_ONCE):
                self._take(line, os.read(line.tun, _MOST_BYTES))

    def _take(self, line: Line, packet: bytes) -> None:
        other, now = self._to.get(packet[_DESTINATION]), time.monotonic()
        begin = max(now, line.up_s)
        if other is None or begin - now > QUEUE_S:
            return
        size = wire_bytes(packet)
        line.up_s = begin + size * line.byte_s
        delay_s = line.delay_s + other.delay_s
        heapq.heappush(self._way, (begin + delay_s, next(self._number), False, other, line.up_s + delay_s, packet))

    def _advance(self, due: float, number: int, last: bool, line: Line, last_s: float, packet: bytes) -> None:
        """The first bit of a packet has come to its peer's line, or the last one to the peer."""
        if last:
            with suppress(OSError):  # a device that is down loses it
                os.write(line.tun, packet)
            return
        begin = max(due, line.down_s)
        if begin - due <= QUEUE_S:
            line.down_s = max(last_s, begin + wire_bytes(packet) * line.byte_s)
            heapq.heappush(self._way, (line.down_s, number, True, line, 0.0, packet))


def wire_bytes(packet: bytes) -> int:
    """Bytes of the IP packets into which a wire would cut a packet of TCP's."""
    _, _, headers, segment, _, _ = _BEFORE_IP.unpack_from(packet)
    size = len(packet) - _BEFORE_IP.size
    return size + headers * ((size - headers - 1) // segment) if segment else size


def main(arguments: list[str]) -> int:
    """Make a bed, say so or what is missing, and carry it."""
    asked: dict[str, Any] = json.loads(arguments[0])
    for number in STRUCK:
        signal.signal(number, lambda *_: sys.exit(0))
    parent = os.pidfd_open(asked["parent"])
    if os.getppid() != asked["parent"]:
        return 1
    with suppress(OSError):
        os.nice(-15)  # late packets would look like a slower network
    gc.disable()
    try:
        peers = [Peer(**one) for one in asked["peers"]]
        tuns = [make(name_of(os.getpid(), k), k, peer, asked["segments"]) for k, peer in enumerate(peers)]
        _say({"ready": os.getpid()})
        Wire([Line(tun, peer) for tun, peer in zip(tuns, peers, strict=True)]).carry_until([0, parent])
    except Lacking as lack:
        _say({"what": lack.what, "remedy": lack.remedy})
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, STRUCK)
        remove(os.getpid())
    return 0


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
