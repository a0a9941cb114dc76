"""One message, there and back: how long a transport takes, and what it costs, between two workers of one host.

Five transports take turns in one job: bare ``ProcessGroupGloo`` send and receive of one tensor, our gloo endpoint, our
grpc endpoint, our shm endpoint, and memory (two threads). Two measurements for each size:

- *latency*: a ping-pong of messages of one tensor; half the time there and back. Both workers wait for nothing else.
- *CPU*: processor time of both workers for one message when messages come at a slow pace, as between the stages of a
  pipeline that computes: the receiver sleeps when a message comes.

The tensor that arrives is a new one of torch's own, as a stage needs it; bare gloo receives into the same tensor again.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import alternate, asked, report, spread, table
from roundelay.transport.endpoint import Arrived, Endpoint, Message
from roundelay.transport.gloo import GlooEndpoint
from roundelay.transport.grpc_stream import forked_over_grpc
from roundelay.transport.memory import memory_endpoints
from roundelay.transport.shm import ShmEndpoint
from roundelay.transport.shm_resources import RING_BYTES, ShmResources

SIZES = {"4 KiB": 2**12, "64 KiB": 2**16, "1 MiB": 2**20, "8 MiB": 2**23}
COUNTS = {"4 KiB": 1000, "64 KiB": 1000, "1 MiB": 200, "8 MiB": 40}
PACED = 200
PACE_S = 0.002
PATIENCE_S = 60.0
MOST_TO_WARM = 64  # messages; enough for those that travel through shm's ring to touch all its pages
HEADER = tuple(range(9))  # as long as a micro-batch's

Side = tuple[Callable[[torch.Tensor], None], Callable[[], torch.Tensor], Callable[[], None]]
"""Send a tensor, receive one, end."""
Connect = Callable[[int, int], Side]
"""From worker and bytes to its side."""
Measured = dict[str, float]


def side_of(endpoint: Endpoint) -> Side:
    """An endpoint's send and receive of one tensor."""
    other = 1 - endpoint.worker

    def send(tensor: torch.Tensor) -> None:
        endpoint.send(other, Message(0, HEADER, (tensor,)))

    def receive() -> torch.Tensor:
        delivery = endpoint.receive(PATIENCE_S)
        assert isinstance(delivery, Arrived)
        tensor = delivery.message.values[0]
        assert isinstance(tensor, torch.Tensor)
        return tensor

    return send, receive, endpoint.close


def bare_gloo(folder: str, worker: int, size: int) -> Side:
    """torch's own group of two, as fast as it goes: one tensor, waited for on the spot."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=PATIENCE_S)
    group: Any = dist.ProcessGroupGloo(dist.FileStore(f"{folder}/store", 2), worker, 2, options)  # type: ignore[attr-defined]
    other, into = 1 - worker, torch.empty(size // 4)

    def receive() -> torch.Tensor:
        group.recv([into], other, 0).wait()
        return into

    return (lambda tensor: group.send([tensor], other, 0).wait()), receive, lambda: None


def ping_pong(side: Side, worker: int, size: int, count: int, pace_s: float) -> dict[str, float]:
    """`count` messages there and back after a warm-up; seconds and processor seconds of each way, seen from here."""
    send, receive, end = side
    tensor = torch.ones(size // 4)
    trips = []
    cpu = 0.0
    for i in range(-max(count // 10, min(RING_BYTES // size, MOST_TO_WARM)), count):
        if i == 0:
            cpu = time.process_time()
        if worker == 0 and pace_s and i >= 0:
            time.sleep(pace_s)
        start = time.perf_counter()
        if worker == 0:
            send(tensor)
            receive()
        else:
            receive()
            send(tensor)
        trips.append(time.perf_counter() - start)
    cpu = time.process_time() - cpu
    end()
    return {"wall_s": statistics.median(trips[-count:]) / 2, "cpu_s": cpu / count / 2}


def in_processes(
    connect: Connect, size: int, count: int, pace_s: float, forked: Callable[[], None]
) -> dict[str, float]:
    """Two forked workers; the time of the first, the processor time of both."""
    results = of_two(lambda worker: ping_pong(connect(worker, size), worker, size, count, pace_s), forked)
    return {"wall_s": results[0]["wall_s"], "cpu_s": results[0]["cpu_s"] + results[1]["cpu_s"]}


def of_two(
    work: Callable[[int], dict[str, float]], forked: Callable[[], None] = lambda: None
) -> list[dict[str, float]]:
    """What two forked workers measure."""
    children = []
    for worker in range(2):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                torch.set_num_threads(1)
                os.write(writing, json.dumps(work(worker)).encode())
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writing)
        children.append((pid, reading))
    forked()
    results = []
    for pid, reading in children:
        with os.fdopen(reading) as pipe:
            results.append(json.loads(pipe.read()))
        os.waitpid(pid, 0)
    return results


def raw_gloo(size: int, count: int, pace_s: float) -> dict[str, float]:
    """Bare ProcessGroupGloo."""
    with tempfile.TemporaryDirectory() as folder:
        return in_processes(lambda k, n: bare_gloo(folder, k, n), size, count, pace_s, lambda: None)


def our_gloo(size: int, count: int, pace_s: float) -> dict[str, float]:
    """Our endpoint over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        return in_processes(
            lambda k, n: side_of(GlooEndpoint(k, 2, store, PATIENCE_S)), size, count, pace_s, lambda: None
        )


def our_grpc(size: int, count: int, pace_s: float) -> dict[str, float]:
    """Our endpoint over gRPC with mutual TLS."""
    with forked_over_grpc(2, PATIENCE_S) as links:
        return in_processes(lambda k, n: side_of(links.connect(k)), size, count, pace_s, links.forked)


def our_shm(size: int, count: int, pace_s: float) -> dict[str, float]:
    """Our endpoint over shared memory."""
    wiring = ShmResources(2)
    return in_processes(lambda k, n: side_of(ShmEndpoint(k, wiring, PATIENCE_S)), size, count, pace_s, wiring.close)


def our_memory(size: int, count: int, pace_s: float) -> dict[str, float]:
    """Our endpoint between two threads; the processor time is that of the process."""
    endpoints = memory_endpoints(2)
    results: dict[int, dict[str, float]] = {}

    def work(worker: int) -> None:
        results[worker] = ping_pong(side_of(endpoints[worker]), worker, size, count, pace_s)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results[0]


TRANSPORTS = {
    "raw gloo": raw_gloo,
    "our gloo": our_gloo,
    "our grpc": our_grpc,
    "our shm": our_shm,
    "memory": our_memory,
}
RIVALS = ("raw gloo", "our gloo", "our grpc")


FORMS = (
    ("Latency one way, us", "fast", "wall_s"),
    ("Latency one way, receiver asleep, us", "paced", "wall_s"),
    ("CPU time of both workers for one message, receiver asleep, us", "paced", "cpu_s"),
)


def measured(size: str, share: float, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds by title and transport, the transports taking turns."""
    found: dict[str, dict[str, list[float]]] = {title: {name: [] for name in TRANSPORTS} for title, _, _ in FORMS}

    def once(name: str) -> float:
        counts = {"fast": COUNTS[size], "paced": PACED}
        got = {
            mode: TRANSPORTS[name](SIZES[size], max(10, int(count * share)), PACE_S if mode == "paced" else 0.0)
            for mode, count in counts.items()
        }
        for title, mode, number in FORMS:
            found[title][name].append(1e6 * got[mode][number])
        return got["fast"]["wall_s"]

    alternate({name: functools.partial(once, name) for name in TRANSPORTS}, repeats)
    return {title: {name: values[1:] for name, values in by_name.items()} for title, by_name in found.items()}


def main() -> None:
    what = asked(__doc__ or "")
    found = {size: measured(size, 0.2 if what.short else 1.0, what.repeats) for size in SIZES}
    tables = []
    for title, _, _ in FORMS:
        rows = []
        for size in SIZES:
            by_name = found[size][title]
            medians = {name: statistics.median(values) for name, values in by_name.items()}
            ratios = [f"{medians[name] / medians['our shm']:.1f}" for name in RIVALS]
            rows.append([size, *(spread(values, 0) for values in by_name.values()), *ratios])
        tables.append(
            f"{title}:\n\n" + table(["size", *TRANSPORTS, "raw gloo / shm", "our gloo / shm", "our grpc / shm"], rows)
        )
    report(what, "\n\n".join(tables), {"us": found})


if __name__ == "__main__":
    main()
