"""Runs workers as threads of this process, on transport memory."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roundelay.deferred_signals import DeferredSignals
from roundelay.launching.cooperative_pool import CooperativePool
from roundelay.launching.cuda_handoff import wrap_for_streams
from roundelay.launching.failure_tracker import FailureTracker, Listener
from roundelay.runtime.device import HOST, Device, make_device
from roundelay.runtime.processes.worker_messages import Report, Reporter
from roundelay.runtime.workload import Workload, Wrap, unchanged, work, working
from roundelay.transport.checked_endpoint import next_item
from roundelay.transport.cuda import Cuda
from roundelay.transport.endpoint import Endpoint
from roundelay.transport.memory import memory_endpoints

END_S = 5.0
"""Seconds to wait for the threads once the run has ended or failed; a thread that still computes cannot be stopped."""

SURE_S = 1.0
"""The part of these seconds that no signal interrupts; most threads and their loaders' have ended by then."""

COALESCE_S = 0.01
"""Seconds to wait for further reports after one has arrived, so that they are handled together."""

_TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class _WorkerThreads:
    """Threads to start, the endpoints of the workers that they run, and a function that stops the threads."""

    threads: Sequence[threading.Thread]
    endpoints: Sequence[Endpoint]
    stop: Callable[[], object]


def run_threads(task: Workload, listen: Listener, wrap: Wrap) -> None:
    """Execute a task by threads; see :func:`roundelay.launching.launch.run`."""
    reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
    size = len(task.works)
    recent = task.recent_integers()
    devices = [make_device(device, k, recent) for k, device in enumerate(task.settings.devices)]
    shared = wrap is unchanged and all(device is HOST for device in devices)
    workers = _pooled(task, size, reports.put) if shared else _separate(task, devices, wrap, reports.put)
    tracker = FailureTracker(size, listen)
    try:
        _train(workers, reports, tracker)
    finally:
        while not reports.empty():
            tracker.add_failure(reports.get())
    tracker.raise_failure()


def _train(workers: _WorkerThreads, reports: queue.SimpleQueue[Report], tracker: FailureTracker) -> None:
    with DeferredSignals() as interrupts:
        try:
            for thread in workers.threads:
                thread.start()
            interrupts.open()
            take_reports(reports, tracker)
        finally:
            interrupts.held = True
            _end(workers, tracker, interrupts)


def _end(workers: _WorkerThreads, tracker: FailureTracker, interrupts: DeferredSignals) -> None:
    began = time.monotonic()
    try:
        if tracker.failures or len(tracker.ended) < len(workers.endpoints):
            for endpoint in workers.endpoints:
                endpoint.abort("the run was ended")
        _join(workers.threads, began + SURE_S)
        interrupts.open()  # a second Ctrl-C ends the wait
        _join(workers.threads, began + END_S)
    finally:
        interrupts.held = True
        workers.stop()


def _join(threads: Sequence[threading.Thread], deadline: float) -> None:
    for thread in threads:
        if thread.ident is not None:
            thread.join(max(0.0, deadline - time.monotonic()))


def _pooled(task: Workload, size: int, report: Reporter) -> _WorkerThreads:
    """Threads that share the workers, all on the CPU."""
    pool = CooperativePool(size, task.settings.deadline_s)
    endpoints, device = memory_endpoints(size, pool.wake), Device(pool.yielding)
    loops = [working(task, k, endpoint, report, device) for k, endpoint in enumerate(endpoints)]
    return _WorkerThreads(pool.threads(endpoints, loops), endpoints, pool.stop)


def _separate(task: Workload, devices: Sequence[Device], wrap: Wrap, report: Reporter) -> _WorkerThreads:
    """One thread per worker: a current CUDA device belongs to a thread, and a wrapped endpoint may block."""
    endpoints = [wrap(endpoint) for endpoint in wrap_for_streams(memory_endpoints(len(devices)), devices, Cuda())]
    threads = [
        threading.Thread(target=_main, args=(task, k, endpoint, report, device), name=f"worker {k}", daemon=True)
        for k, (endpoint, device) in enumerate(zip(endpoints, devices, strict=True))
    ]
    return _WorkerThreads(threads, endpoints, lambda: None)


def take_reports(reports: queue.SimpleQueue[Report], tracker: FailureTracker) -> None:
    """Record reports until the run is over, in groups, as a wake-up for each report would cost its sender more."""
    while not tracker.is_over(time.monotonic()):
        try:
            tracker.add(next_item(reports, _TICK_S))
        except queue.Empty:
            continue
        time.sleep(COALESCE_S)
        for _ in range(reports.qsize()):
            tracker.add(reports.get())


def _main(task: Workload, worker: int, endpoint: Endpoint, report: Reporter, device: Device) -> None:
    work(task, worker, endpoint, report, device)
