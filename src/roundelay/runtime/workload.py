"""What launching knows of what it launches, and how one worker of it runs to its end."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass

from roundelay.errors import RoundelayError
from roundelay.ir.work import Settings, Work
from roundelay.runtime.device import HOST, Device
from roundelay.runtime.processes.device_failure import RecentIntegers
from roundelay.runtime.processes.user_errors import out_of_memory, unexpected
from roundelay.runtime.processes.worker_messages import Reporter, failure
from roundelay.transport.endpoint import Endpoint

Loop = Generator[bool, None, None]
"""A worker as a generator: ``next`` runs it until it would wait, and yields whether a credit would unblock it.

It may be resumed in any thread, but only when something has arrived or the deadline has passed.
"""

Wrap = Callable[[Endpoint], Endpoint]
"""Wraps every endpoint of a run, for tests that delay messages."""

Prepare = Callable[[int], None]
"""What a forked worker, whose number is the argument, does before it connects to the others."""


def unchanged(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint itself: the default wrap."""
    return endpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(ABC):
    """What launching must know of what it launches, the same for all workers: a run, or measurements of its parts.

    Args:
        works: what each worker is sent.
        audit: whether to report a digest of everything that is computed.
        prepare: what every forked worker does first.
    """

    works: tuple[Work, ...]
    audit: bool = False
    prepare: Prepare | None = None

    @property
    def settings(self) -> Settings:
        """What all workers have in common."""
        return self.works[0].settings

    def recent_integers(self) -> RecentIntegers | None:
        """Where the devices of a run keep the integers of micro-batches, if they do."""
        return None

    @abstractmethod
    def loop(self, worker: int, endpoint: Endpoint, report: Reporter, device: Device) -> Loop:
        """What a worker does, to its last report, ``finished``; arguments as of :func:`work`."""


def work(task: Workload, worker: int, endpoint: Endpoint, report: Reporter, device: Device = HOST) -> None:
    """Run one worker to its end.

    Args:
        task: what all do.
        worker: its number.
        endpoint: its end of the transport.
        report: called with losses, progress, states and its end. An error is reported as ``failed`` and not raised.
        device: where it computes.
    """
    for _ in working(task, worker, endpoint, report, device):
        pass


def working(task: Workload, worker: int, endpoint: Endpoint, report: Reporter, device: Device = HOST) -> Loop:
    """:func:`work` as a generator. If the endpoint blocks, it may be resumed at any time."""
    try:
        with device.active():
            yield from task.loop(worker, endpoint, report, device)
        endpoint.close()
    except RoundelayError as error:
        _fail(error, worker, endpoint, report)
    except MemoryError as error:
        _fail(out_of_memory(f"worker {worker}", error), worker, endpoint, report)
    except GeneratorExit:  # closed: the run is over
        raise
    except BaseException as error:  # every end of a worker must be reported
        _fail(unexpected(f"worker {worker}", error), worker, endpoint, report)


def _fail(error: RoundelayError, worker: int, endpoint: Endpoint, report: Reporter) -> None:
    trace = "".join(traceback.format_exception(error))
    report(failure(worker, endpoint.cause(error), trace))  # first: an abort may take a second
    endpoint.abort(f"worker {worker} failed")
