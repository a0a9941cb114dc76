"""Runs a task: starts its workers for the plan's transport, takes their reports, and ends them.

The error raised for a failed run is its first cause, not what other workers observed of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from roundelay.errors import UsageError
from roundelay.ir.transports import transport_named
from roundelay.launching.failure_tracker import Listener
from roundelay.launching.forked_workers import run_forked
from roundelay.launching.gc_policy import frozen_gc
from roundelay.launching.launched_worker import run_leader
from roundelay.launching.process_group import ProcessGroup
from roundelay.launching.threaded_workers import run_threads
from roundelay.runtime.processes.idle_resources import give_back_idle
from roundelay.runtime.processes.loader_processes import without_sigchld_handler
from roundelay.runtime.workload import Workload, Wrap, unchanged

Launcher = Callable[[Workload, Listener, Wrap], None]


def needs_launcher() -> UsageError:
    """The error of transport nccl without a launcher: a forked process cannot use CUDA once this one has."""
    return UsageError(
        "transport nccl without a launcher",
        got="one process",
        expected="a process for each device, started by a launcher",
        remedy="`roundelay train JOB.py --transport nccl` starts a process for each device of this host, and torchrun "
        "on several hosts; or choose --transport memory: threads of one process, with a stream each.",
    )


def _refuse_nccl(task: Workload, listen: Listener, wrap: Wrap) -> None:
    raise needs_launcher()


LAUNCHERS: dict[str, Launcher] = {"threads": run_threads, "forked": run_forked, "launched": _refuse_nccl}
"""What starts, hears and ends workers, by their kind (`roundelay.ir.transports.Transport.workers`)."""


def run(task: Workload, listen: Listener, wrap: Wrap | None = None, process_group: ProcessGroup | None = None) -> None:
    """Execute a task.

    Args:
        task: the run.
        listen: called with every report, in this thread.
        wrap: applied to every endpoint, for tests that delay messages.
        process_group: the processes started by a launcher, if any; this one leads them.

    Raises:
        RoundelayError: the first cause, if a worker failed.
    """
    around = wrap or unchanged
    give_back_idle()
    try:
        with frozen_gc(), without_sigchld_handler():
            if process_group is not None:
                run_leader(task, listen, around, process_group)
            else:
                LAUNCHERS[transport_named(task.settings.transport).workers](task, listen, around)
    finally:
        torch.set_num_threads(torch.get_num_threads())  # new threads get the last number that any thread has set
