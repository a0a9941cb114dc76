"""Messages between two peers of 100 Mbit/s and 40 ms: how many a second, over each transport that leaves a machine.

Bare ``ProcessGroupGloo``, our gloo endpoint and our grpc endpoint take turns on one test bed of namespaces. The first
worker keeps a number of messages on their way, the second answers each with one of the same size, as between two stages
of a pipeline. Bare gloo has as many receives posted ahead: one posted when it is needed waits a round trip more.
"""

from __future__ import annotations

import functools
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.transport.run import PATIENCE_S, Side, of_two, side_of
from roundelay.transport.gloo import GlooEndpoint
from roundelay.transport.grpc_member import Member, name_of
from roundelay.transport.grpc_stream import GrpcEndpoint
from roundelay.transport.meeting import FileMeeting
from roundelay.trust.authority import new_authority
from tests.wan.bed import Bed, Unusable
from tests.wan.wire import DEVICE

MBIT_PER_S, RTT_MS = 100, 40
SIZES = {"64 KiB": 2**16, "1 MiB": 2**20}
WINDOWS = (1, 8)
WARM_S, COUNTED_S = 1.5, 4.0

Connect = Callable[[str, int, int, int], Side]
"""From a file to meet at, worker, bytes and messages on their way to its side."""


def raw_gloo(path: str, worker: int, size: int, window: int) -> Side:
    """torch's own group of two, sends left to themselves, receives posted ahead."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(interface=DEVICE)]
    options._timeout = timedelta(seconds=PATIENCE_S)
    store = dist.FileStore(path, 2)  # type: ignore[attr-defined]
    group: Any = dist.ProcessGroupGloo(store, worker, 2, options)  # type: ignore[attr-defined]
    other = 1 - worker
    sent: deque[Any] = deque()
    posted: deque[tuple[torch.Tensor, Any]] = deque()

    def post() -> None:
        into = torch.empty(size // 4)
        posted.append((into, group.recv([into], other, 0)))

    def send(tensor: torch.Tensor) -> None:
        sent.append(group.send([tensor], other, 0))
        if len(sent) > 2 * window:
            sent.popleft().wait()

    def receive() -> torch.Tensor:
        post()
        into, work = posted.popleft()
        work.wait()
        return into

    def end() -> None:
        store.set(f"ended {worker}", "")
        store.wait([f"ended {other}"])

    for _ in range(window):
        post()
    return send, receive, end


def our_gloo(path: str, worker: int, size: int, window: int) -> Side:
    """Our endpoint over gloo."""
    return side_of(GlooEndpoint(worker, 2, path, PATIENCE_S, DEVICE))


def exchange(side: Side, worker: int, size: int, window: int) -> dict[str, float]:
    """Round trips a second, with so many on their way; the first worker's first element tells the other to end."""
    send, receive, end = side
    tensor, last = torch.ones(size // 4), torch.zeros(size // 4)
    trips, before = 0, time.process_time()
    if worker:
        while bool(receive()[0]):
            send(tensor)
            trips += 1
        send(last)
        end()
        return {"cpu_s": (time.process_time() - before) / trips}
    for _ in range(window):
        send(tensor)
    began = time.monotonic()
    while (now := time.monotonic()) < began + WARM_S:
        receive()
        send(tensor)
    start, answered = now, 0
    while now < start + COUNTED_S:
        receive()
        now, answered = time.monotonic(), answered + 1
        send(tensor)
    send(last)
    while bool(receive()[0]):
        pass
    end()
    return {"rate": answered / (now - start)}


def measured(bed: Bed, connect: Connect, size: int, window: int) -> float:
    """Round trips a second of one pair of workers, each on its peer."""
    with tempfile.TemporaryDirectory() as folder:

        def work(worker: int) -> dict[str, float]:
            with bed.inside(worker):
                return exchange(connect(f"{folder}/store", worker, size, window), worker, size, window)

        return of_two(work)[0]["rate"]


def our_grpc(bed: Bed) -> Connect:
    """Our endpoint over gRPC with mutual TLS, serving at the peer's address."""
    authority = new_authority("roundelay", datetime.now(UTC), timedelta(days=1))
    own = [authority.issue(name_of(k)) for k in range(2)]

    def connect(path: str, worker: int, size: int, window: int) -> Side:
        member = Member(own[worker], FileMeeting(path, 2, PATIENCE_S), host=bed.address(worker))
        return side_of(GrpcEndpoint(worker, range(2), member, PATIENCE_S))

    return connect


def main() -> None:
    what = asked(__doc__ or "")
    found: dict[str, dict[str, list[float]]] = {}
    with Bed(peers=2, mbit_per_s=MBIT_PER_S, rtt_ms=RTT_MS) as bed:
        transports: dict[str, Connect] = {"raw gloo": raw_gloo, "our gloo": our_gloo, "our grpc": our_grpc(bed)}
        for name, size in SIZES.items():
            for window in WINDOWS:
                runs = {t: functools.partial(measured, bed, c, size, window) for t, c in transports.items()}
                found[f"{name}, {window}"] = alternate(runs, what.repeats)
    rows = []
    for name, rates in found.items():
        medians = {transport: statistics.median(values) for transport, values in rates.items()}
        ratios = [f"{medians['our grpc'] / medians[rival]:.2f}" for rival in ("raw gloo", "our gloo")]
        rows.append([name, *(spread(values) for values in rates.values()), *ratios])
    columns = ["size, messages on their way", *transports, "our grpc / raw gloo", "our grpc / our gloo"]
    report(what, "Round trips a second:\n\n" + table(columns, rows), {"trips per s": found})


if __name__ == "__main__":
    try:
        main()
    except Unusable as error:
        sys.exit(str(error))
