"""Runs one body per worker over any transport: threads, forked processes, lanes beside their frames or not."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from roundelay.transport import FORKED
from roundelay.transport.endpoint import Endpoint, ForkedLinks
from roundelay.transport.memory import memory_endpoints
from roundelay.transport.nccl import NcclEndpoint
from roundelay.transport.nccl_p2p import Lane, LaneDevice, Wait, open_lanes
from roundelay.transport.shm import ShmEndpoint
from roundelay.transport.shm_resources import MIN_RING_BYTES, ShmResources
from tests.transport.delayed import DelayedEndpoint

KINDS = (
    *[f"{delay}{name}" for name in ("memory", *FORKED) for delay in ("", "delayed ")],
    "narrow shm",
    "nccl over gloo",
)
"""Narrow: through pipes and rings that hold next to nothing, so that senders keep most of what they send."""

PATIENCE_S = 30.0
MAX_DELAY_S = 0.004

Body = Callable[[Endpoint], Any]
"""What a worker does; returns something that json can carry. The harness closes the endpoint afterwards."""

DIED = "died"


class Death(BaseException):
    """A worker of a thread transport dies: its launcher aborts its endpoint."""


def run_workers(kind: str, bodies: Sequence[Body], tmp_path: Path) -> list[Any]:
    """Each body's result, by worker; `DIED` for one that called `die`. Fails when any body raised."""
    outcomes = _run_threads(kind, bodies) if "memory" in kind else _run_processes(kind, bodies, tmp_path)
    errors = [f"worker {k}: {outcome['error']}" for k, outcome in enumerate(outcomes) if "error" in outcome]
    assert not errors, "\n".join(errors)
    return [outcome["result"] for outcome in outcomes]


def die(kind: str) -> NoReturn:
    """End this worker without a word."""
    if "memory" not in kind:
        os.kill(os.getpid(), signal.SIGKILL)
    raise Death


def _wrap(kind: str, endpoint: Endpoint) -> Endpoint:
    return DelayedEndpoint(endpoint, endpoint.worker, MAX_DELAY_S) if "delayed" in kind else endpoint


class GlooLane(Lane):
    """A lane whose tensors are the CPU's."""

    def __init__(self, path: Path, sends: bool) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=PATIENCE_S)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._group: Any = dist.ProcessGroupGloo(dist.FileStore(str(path), 2), 0 if sends else 1, 2, options)
        self._held: list[dist.Work] = []

    def send(self, parts: Sequence[torch.Tensor]) -> None:
        self._held += [self._group.send([part], 1, 0) for part in parts]

    def post(self, parts: Sequence[torch.Tensor]) -> Wait:
        works = [self._group.recv([part], 0, 0) for part in parts]
        return lambda: [work.wait(timedelta(seconds=PATIENCE_S)) for work in works] and None

    def flush(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self._held and time.monotonic() < deadline:
            with contextlib.suppress(RuntimeError):  # the other side has closed: what was sent is dropped
                self._held.pop(0).wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        return not self._held

    def close(self) -> None:
        self._group = None

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()


def with_lanes(inner: Endpoint, num_workers: int, tmp_path: Path) -> NcclEndpoint:
    """The endpoint with lanes to all others, as it would be over NCCL."""
    device = LaneDevice(torch.device("cpu"))
    others = [other for other in range(num_workers) if other != inner.worker]
    lanes = open_lanes(inner.worker, others, lambda name, sends: GlooLane(tmp_path / name, sends), device, PATIENCE_S)
    return NcclEndpoint(inner, lanes, device, PATIENCE_S)


def _outcome(body: Body, connect: Callable[[], Endpoint]) -> dict[str, Any]:
    try:
        endpoint = connect()
        try:
            result = body(endpoint)
        except Death:
            endpoint.abort("it died")
            return {"result": DIED}
        endpoint.close()
    except BaseException:
        return {"error": traceback.format_exc()}
    return {"result": result}


def _run_threads(kind: str, bodies: Sequence[Body]) -> list[dict[str, Any]]:
    outcomes: list[dict[str, Any]] = [{"error": "it hung"} for _ in bodies]

    def run(worker: int, endpoint: Endpoint) -> None:
        outcomes[worker] = _outcome(bodies[worker], lambda: _wrap(kind, endpoint))

    endpoints = memory_endpoints(len(bodies))
    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(endpoints)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    return outcomes


def _run_processes(kind: str, bodies: Sequence[Body], tmp_path: Path) -> list[dict[str, Any]]:
    with narrow_links(len(bodies)) if "narrow" in kind else FORKED[kind.split()[-1]](len(bodies), PATIENCE_S) as links:

        def connect(worker: int) -> Endpoint:
            inner = links.connect(worker)
            return with_lanes(inner, len(bodies), tmp_path) if "nccl" in kind else _wrap(kind, inner)

        tasks = [lambda k=k, body=body: _outcome(body, lambda: connect(k)) for k, body in enumerate(bodies)]
        return fork_all(tasks, links.forked)


@contextlib.contextmanager
def narrow_links(num_workers: int) -> Iterator[ForkedLinks]:
    resources = ShmResources(num_workers, MIN_RING_BYTES)
    for pipe in resources.pipes.values():
        fcntl.fcntl(pipe.writing, fcntl.F_SETPIPE_SZ, 4096)
    yield ForkedLinks(lambda worker: ShmEndpoint(worker, resources, PATIENCE_S), resources.close)


def fork_all(
    tasks: Sequence[Callable[[], dict[str, Any]]], forked: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """What each task returned in a forked child of its own; no child outlives this call.

    `forked` is called here when all are forked.
    """
    children = [_fork(task) for task in tasks]
    forked()
    deadline = time.monotonic() + PATIENCE_S
    try:
        texts = [_read(pipe, deadline) for _, pipe in children]
    finally:
        statuses = [_reap(pid) for pid, _ in children]
    return [_told(text, status) for text, status in zip(texts, statuses, strict=True)]


def _fork(task: Callable[[], dict[str, Any]]) -> tuple[int, int]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as pipe:
                json.dump(task(), pipe)
        finally:
            os._exit(0)
    os.close(writing)
    return pid, reading


def _read(pipe: int, deadline: float) -> bytes:
    """All that comes through `pipe` until its writer ends, or until the deadline."""
    parts: list[bytes] = []
    with os.fdopen(pipe, "rb", buffering=0) as reader:
        while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = reader.read(65536)
            if not part:
                break
            parts.append(part)
    return b"".join(parts)


def _reap(pid: int) -> int:
    """The exit status of our child `pid`; one that has told its result or run out of time is ended."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return -1


def _told(text: bytes, status: int) -> dict[str, Any]:
    if text:
        return json.loads(text)
    if status == signal.SIGKILL:
        return {"result": DIED}
    return {"error": f"it hung or fell silent, status {status}"}
