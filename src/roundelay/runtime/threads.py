"""Workers as threads of this process, over memory."""

from __future__ import annotations

import queue
import threading
import time

import torch

from roundelay.runtime.device import Device, device_of
from roundelay.runtime.report import Report, Reporter
from roundelay.runtime.streams import streamed
from roundelay.runtime.tally import Listener, Tally
from roundelay.runtime.worker import Task, Wrap, work
from roundelay.schedules import num_workers
from roundelay.transport.contract import Endpoint
from roundelay.transport.driver import Cuda
from roundelay.transport.memory import memory_endpoints
from roundelay.transport.queues import next_item

END_S = 5.0
"""Seconds that threads get to end once the run has ended or failed; one that computes on cannot be ended."""

HANDFUL_S = 0.01
"""Whoever has been woken by a report waits so long for more of them."""

_TICK_S = 0.5


def run_threads(task: Task, listen: Listener, wrap: Wrap) -> None:
    """Execute a task by threads; see :func:`roundelay.runtime.launch.run`."""
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    size = num_workers(task.plan)
    devices = [device_of(name) for name in task.plan.devices[:size]]  # a worker's first stage is of its own number
    handing = streamed(memory_endpoints(size), devices, Cuda())
    endpoints = [wrap(endpoint) for endpoint in handing]
    threads = [
        threading.Thread(target=_main, args=(task, k, end, reports.put, device), name=f"worker {k}", daemon=True)
        for k, (end, device) in enumerate(zip(endpoints, devices, strict=True))
    ]
    tally = Tally(size, listen)
    try:
        for thread in threads:
            thread.start()
        follow(reports, tally)
    finally:
        if tally.failures or len(tally.ended) < size:
            for endpoint in endpoints:
                endpoint.abort("the run was ended")
        deadline = time.monotonic() + END_S
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
        while not reports.empty():
            tally.late(reports.get())
    tally.raise_failure()


def follow(reports: queue.SimpleQueue[Report], tally: Tally) -> None:
    """Count reports until the run is over; by the handful, as being woken by each costs its sender more."""
    while not tally.over(time.monotonic()):
        try:
            tally.take(next_item(reports, _TICK_S))
        except queue.Empty:
            continue
        time.sleep(HANDFUL_S)
        for _ in range(reports.qsize()):
            tally.take(reports.get())


def _main(task: Task, worker: int, endpoint: Endpoint, report: Reporter, device: Device) -> None:
    torch.set_num_threads(1)  # the number of intra-op threads is each thread's own where OpenMP keeps it
    work(task, worker, endpoint, report, device)
