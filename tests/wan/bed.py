"""A test bed: peers that reach each other over lines of a given rate and delay, on one machine, each in a namespace.

::

    with Bed(peers=3, mbit_per_s=100, rtt_ms=40) as bed:
        process = bed.popen(1, ["roundelay", "host", "job.py", "--listen", f"{bed.address(1)}:7000"])
        bed.cut(1)

It needs root, `ip`, `nft` and `nsenter`. However its process ends, nothing is left: :mod:`tests.wan.wire` sees to it.
``python -m tests.wan.bed`` says whether there can be one here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, final

import psutil

from roundelay.errors import UsageError
from tests.wan import namespaces
from tests.wan.namespaces import Lacking, name_of
from tests.wan.wire import Peer, address, in_namespace

ROOT = Path(__file__).resolve().parent.parent.parent
END_S = 20.0
PACKAGES = {"ip": "iproute2", "nft": "nftables", "nsenter": "util-linux", "sh": "dash"}
"""What is needed on PATH, by the package of Debian that has it."""

Each = float | Sequence[float]
"""One number for all peers, or one for each."""


@final
class Unusable(UsageError):
    """There can be no test bed here."""

    def __init__(self, lack: Lacking) -> None:
        super().__init__("a test bed of namespaces", got=f"no {lack.what}", expected="all it needs", remedy=lack.remedy)


@final
class Bed:
    """Peers 0, 1, ... from entering the context to leaving it, when all that runs in them is killed.

    Args:
        peers: how many.
        mbit_per_s: of IP packets on a peer's line, each way: TCP has 96.5 % of it.
        rtt_ms: there and back between two peers; where theirs differ, the mean of both.
        cores: that a peer's processes have by a quota; None for no limit.
        segments: most packets of 1500 bytes of one stream that travel, and are lost, together: 1 is closest to a real
            network, and takes the most processor time.

    Raises:
        Unusable: when entered, if something is missing here.
    """

    def __init__(
        self, peers: int, *, mbit_per_s: Each = 100, rtt_ms: Each = 40, cores: Each | None = None, segments: int = 16
    ) -> None:
        rates, trips = _each(mbit_per_s, peers), _each(rtt_ms, peers)
        shares = [None] * peers if cores is None else _each(cores, peers)
        self._peers = [Peer(*one) for one in zip(rates, trips, shares, strict=True)]
        self._segments = segments
        self._wire: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[Any]] = []
        self._cut = [False] * peers
        self._loss = [0.0] * peers

    def __enter__(self) -> Self:
        _check()
        namespaces.remove()
        asked = {"parent": os.getpid(), "peers": [asdict(peer) for peer in self._peers], "segments": self._segments}
        try:
            self._wire = subprocess.Popen(
                [sys.executable, "-m", namespaces.WIRE, json.dumps(asked)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            told = json.loads(_of(self._wire.stdout).readline() or '{"what": "answer", "remedy": "See above."}')
            if "ready" not in told:
                raise Unusable(Lacking(told["what"], told["remedy"]))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._wire is not None
        broken = self._wire.poll()
        self._end()
        if broken is not None:
            raise RuntimeError(f"the process that carries the bed's packets ended with code {broken}")

    def address(self, peer: int) -> str:
        """The address of a peer."""
        return address(peer)

    def name(self, peer: int) -> str:
        """The name of a peer's namespace: ``ip netns exec NAME ping ...``."""
        assert self._wire is not None, "the bed is not entered"
        return name_of(self._wire.pid, peer)

    def popen(self, peer: int, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a peer; options are `subprocess.Popen`'s. It, and what it starts, dies with the bed."""
        command = [*in_namespace(self.name(peer)), *argv]
        if self._peers[peer].cores is not None:
            joining = f'echo $$ > {namespaces.quota_file(self.name(peer))} && exec "$@"'
            command = ["sh", "-c", joining, "sh", *command]
        process: subprocess.Popen[Any] = subprocess.Popen(command, **options)
        self._started.append(process)
        return process

    def inside(self, peer: int) -> AbstractContextManager[None]:
        """Let the calling thread work on a peer; the sockets that it makes meanwhile stay there."""
        return namespaces.inside(self.name(peer))

    def cut(self, peer: int) -> None:
        """Drop all that a peer sends and is sent, and tell nobody; what it sent before still arrives."""
        self._cut[peer] = True
        self._filter(peer)

    def mend(self, peer: int) -> None:
        """End the cut."""
        self._cut[peer] = False
        self._filter(peer)

    def loss(self, peer: int, share: float) -> None:
        """Drop this share of the packets that a peer sends, and of those that it is sent, at random."""
        self._loss[peer] = share
        self._filter(peer)

    def carrying_cpu_s(self) -> float:
        """Processor seconds that carrying the packets has taken."""
        assert self._wire is not None, "the bed is not entered"
        times = psutil.Process(self._wire.pid).cpu_times()
        return times.user + times.system

    def _filter(self, peer: int) -> None:
        verdict = "drop" if self._cut[peer] else f"numgen random mod 1000000 < {round(1e6 * self._loss[peer])} drop"
        wanted = self._cut[peer] or self._loss[peer] > 0
        rules = [f"add rule netdev bed {chain} {verdict}" for chain in ("in", "out") if wanted]
        text = "\n".join(["flush table netdev bed", *rules, ""])
        remedy = "Take a kernel with nf_tables and its expression numgen."
        try:
            argv = (*in_namespace(self.name(peer)), "nft", "-f", "-")
            namespaces.run(*argv, text=text, lacking="rule of nftables", remedy=remedy)
        except Lacking as lack:
            raise Unusable(lack) from lack

    def _end(self) -> None:
        for process in self._started:
            process.kill()
        if self._wire is None:
            return
        with suppress(OSError, ValueError):  # it has ended, or is closed already
            print("end", file=self._wire.stdin, flush=True)
        try:
            self._wire.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._wire.kill()
            self._wire.communicate()
        namespaces.remove()
        for process in self._started:
            process.wait(END_S)


def _check() -> None:
    if sys.platform != "linux" or os.geteuid():
        raise Unusable(Lacking("root on Linux", "Run as root."))
    missing = [tool for tool in PACKAGES if shutil.which(tool) is None]
    if missing:
        packages = " ".join(PACKAGES[tool] for tool in missing)
        raise Unusable(Lacking(f"{', '.join(missing)} on PATH", f"On Debian: apt install {packages}."))


def _each(value: Each, peers: int) -> list[float]:
    return [float(value)] * peers if isinstance(value, int | float) else [float(one) for one in value]


def _of(stream: Any) -> Any:
    assert stream is not None
    return stream


if __name__ == "__main__":
    try:
        with Bed(peers=1):
            pass
    except Unusable as error:
        sys.exit(f"{error} Nothing was tested.")
