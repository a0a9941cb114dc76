"""Run a task on its plan's transport, listen to its workers, and see that nothing is left behind.

The first cause of a failure is the error that is raised; workers that ended because another was lost only confirm it.
"""

from __future__ import annotations

from collections.abc import Callable

from roundelay.errors import UsageError
from roundelay.ir.transports import transport_named
from roundelay.runtime.failure_tracker import Listener
from roundelay.runtime.forked_workers import run_forked
from roundelay.runtime.gc_policy import settled
from roundelay.runtime.loader_processes import loaders_unheard
from roundelay.runtime.rendezvous import ProcessGroup
from roundelay.runtime.threaded_workers import run_threads
from roundelay.runtime.torchrun_worker import run_leader
from roundelay.runtime.worker import Task, Wrap, unchanged

Launcher = Callable[[Task, Listener, Wrap], None]


def needs_launcher() -> UsageError:
    """Why no processes are started here for NCCL: a forked one cannot use CUDA once this one has."""
    return UsageError(
        "transport nccl without a launcher",
        got="one process",
        expected="a process for each device, started by a launcher",
        remedy="Run `torchrun --nproc-per-node DEVICES -m roundelay train JOB.py --transport nccl`, or choose "
        "--transport memory: threads of one process, with a stream each.",
    )


def _refuse(task: Task, listen: Listener, wrap: Wrap) -> None:
    raise needs_launcher()


LAUNCHERS: dict[str, Launcher] = {"threads": run_threads, "forked": run_forked, "launched": _refuse}
"""What starts, hears and ends workers, by their kind (`roundelay.ir.transports.Transport.workers`)."""


def run(task: Task, listen: Listener, wrap: Wrap | None = None, party: ProcessGroup | None = None) -> None:
    """Execute a task.

    Args:
        task: the run.
        listen: told of every report, in this thread.
        wrap: put around every endpoint, for tests that delay messages.
        party: the processes that a launcher has started, if one has; this one leads them.

    Raises:
        RoundelayError: the first cause, if a worker failed.
    """
    around = wrap or unchanged
    with settled(), loaders_unheard():
        if party is not None:
            run_leader(task, listen, around, party)
        else:
            LAUNCHERS[transport_named(task.plan.transport).workers](task, listen, around)
