"""Workers as threads of this process, over memory."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from roundelay.deferred_signals import Interrupts
from roundelay.runtime.cooperative_pool import CooperativePool
from roundelay.runtime.cuda_handoff import streamed
from roundelay.runtime.device import HOST, CpuDevice, Device, device_of
from roundelay.runtime.failure_tracker import FailureTracker, Listener
from roundelay.runtime.worker import Task, Wrap, unchanged, work, working
from roundelay.runtime.worker_messages import Report, Reporter
from roundelay.transport.cuda import Cuda
from roundelay.transport.endpoint import Endpoint
from roundelay.transport.memory import memory_endpoints
from roundelay.transport.queues import next_item

END_S = 5.0
"""Seconds that threads get to end once the run has ended or failed; one that computes on cannot be ended."""

SURE_S = 1.0
"""Of these, seconds that they get whatever interrupts: most have ended by then, and so have their loaders' threads."""

HANDFUL_S = 0.01
"""Whoever has been woken by a report waits so long for more of them."""

_TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class _Gang:
    """Threads that are to be started, the endpoints of the workers that they carry on, and what ends the threads."""

    threads: Sequence[threading.Thread]
    endpoints: Sequence[Endpoint]
    stop: Callable[[], object]


def run_threads(task: Task, listen: Listener, wrap: Wrap) -> None:
    """Execute a task by threads; see :func:`roundelay.runtime.launch.run`."""
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    size = task.plan.num_workers
    devices = [device_of(name) for name in task.plan.devices[:size]]  # a worker's first stage is of its own number
    shared = wrap is unchanged and all(device is HOST for device in devices)
    gang = _shared(task, size, reports.put) if shared else _own(task, devices, wrap, reports.put)
    tally = FailureTracker(size, listen)
    try:
        _train(gang, reports, tally)
    finally:
        while not reports.empty():
            tally.late(reports.get())
    tally.raise_failure()


def _train(gang: _Gang, reports: queue.SimpleQueue[Report], tally: FailureTracker) -> None:
    with Interrupts() as interrupts:
        try:
            for thread in gang.threads:
                thread.start()
            interrupts.open()
            follow(reports, tally)
        finally:
            interrupts.held = True
            _end(gang, tally, interrupts)


def _end(gang: _Gang, tally: FailureTracker, interrupts: Interrupts) -> None:
    began = time.monotonic()
    try:
        if tally.failures or len(tally.ended) < len(gang.endpoints):
            for endpoint in gang.endpoints:
                endpoint.abort("the run was ended")
        _join(gang.threads, began + SURE_S)
        interrupts.open()  # a second Ctrl-C ends the patience
        _join(gang.threads, began + END_S)
    finally:
        interrupts.held = True
        gang.stop()


def _join(threads: Sequence[threading.Thread], deadline: float) -> None:
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))


def _shared(task: Task, size: int, report: Reporter) -> _Gang:
    """Threads that share the workers, all on the CPU."""
    pool = CooperativePool(size, task.plan.deadline_s)
    endpoints, device = memory_endpoints(size, pool.wake), CpuDevice(pool.yielding)
    loops = [working(task, k, endpoint, report, device) for k, endpoint in enumerate(endpoints)]
    return _Gang(pool.threads(endpoints, loops), endpoints, pool.stop)


def _own(task: Task, devices: Sequence[Device], wrap: Wrap, report: Reporter) -> _Gang:
    """A thread of its own for every worker: a device is current in one thread, and another endpoint may wait."""
    endpoints = [wrap(endpoint) for endpoint in streamed(memory_endpoints(len(devices)), devices, Cuda())]
    threads = [
        threading.Thread(target=_main, args=(task, k, endpoint, report, device), name=f"worker {k}", daemon=True)
        for k, (endpoint, device) in enumerate(zip(endpoints, devices, strict=True))
    ]
    return _Gang(threads, endpoints, lambda: None)


def follow(reports: queue.SimpleQueue[Report], tally: FailureTracker) -> None:
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
