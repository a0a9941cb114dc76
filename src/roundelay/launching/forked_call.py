"""Calls a function in a forked child, so that it has no effect on this process's autograd, memory and user objects.

Where an accelerator is present, a backward in this process would make every process forked later unable to train (see
:mod:`roundelay.fork_safety`). So gradients computed outside of workers (measuring, compiling, the reference of a run of
processes) are computed in a child.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from roundelay.deferred_signals import DeferredSignals
from roundelay.errors import RoundelayError, RunError, UsageError
from roundelay.fork_safety import STARTED_WITHOUT_DEVICES, autograd_anew, one_backward
from roundelay.ir.transports import transport_named
from roundelay.launching.forked_workers import END_S, Child
from roundelay.runtime.processes.child_process import fork
from roundelay.runtime.processes.discarded_writes import discard_open_files
from roundelay.runtime.processes.user_errors import out_of_memory, unexpected
from roundelay.runtime.processes.worker_messages import Report, ReportAssembler, error_of, failure, write_report

_TICK_S = 1.0


def isolated(
    call: Callable[[], Any], what: str, *, threads: int | None = None, limit_s: float = math.inf, quiet: bool = False
) -> Any:
    """Call a function in a forked child, in which nothing is written into files that are open now.

    Args:
        call: returns plain data (numbers, strings, lists, dicts).
        what: what it does, for messages.
        threads: intra-op threads of the child; as many as the calling thread has by default.
        limit_s: seconds that it may take; no limit by default.
        quiet: discard what it prints, as calls of the user's code are repeated in the run.

    Returns:
        the result of the call.

    Raises:
        RoundelayError: the call raised it.
        UserCodeError: the call raised something else.
        RunError: the child was killed, or took longer than ``limit_s``.
    """
    count = torch.get_num_threads() if threads is None else threads

    def main() -> None:
        torch.set_num_threads(count)
        autograd_anew()
        os.close(reading)
        discard_open_files(except_for=writing)
        _hide_lost_devices()
        if quiet:
            devnull = os.open(os.devnull, os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(devnull, stream)
        write_report(writing, _result(call, what))

    with DeferredSignals() as interrupts:
        reading, writing = os.pipe()
        try:
            try:
                child = Child(0, fork(main), reading)
            finally:
                os.close(writing)
            report = _answer(child, interrupts, limit_s)
        finally:
            os.close(reading)
    if report is None:
        raise _no_answer(child, what, limit_s)
    if report.kind == "failed":
        raise error_of(report)
    return report.data["value"]


def _hide_lost_devices() -> None:
    """Let a child of a process that uses CUDA see no GPU: it cannot use one, and torch's optimizers would ask it."""
    if torch.cuda._is_in_bad_fork():
        for name, answer in (("is_available", False), ("device_count", 0)):
            setattr(torch.cuda, name, lambda answer=answer: answer)
        setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)  # noqa: B010


def _result(call: Callable[[], Any], what: str) -> Report:
    try:
        return Report("finished", 0, {"value": call()})
    except RoundelayError as error:
        cause: RoundelayError = error
    except MemoryError as error:
        cause = out_of_memory(what, error)
    except (Exception, SystemExit) as error:  # of user code, or torch
        cause = unexpected(what, error)
    return failure(0, cause, "".join(traceback.format_exception(cause)))


def _answer(child: Child, interrupts: DeferredSignals, limit_s: float) -> Report | None:
    """Wait for the child's report and its end; None if there is no report."""
    try:
        interrupts.open()
        incoming, deadline = ReportAssembler(), time.monotonic() + limit_s
        poller = select.poll()  # select is limited to 1024 file descriptors
        poller.register(child.pipe, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            if not poller.poll(1000 * min(left, _TICK_S)):
                continue
            reports = incoming.read(child.pipe)
            if reports:
                return reports[0]
            if reports is None:
                child.wait(END_S)
                return None
        return None
    finally:
        interrupts.held = True
        if child.status() is None:
            child.killed = True
            os.kill(child.pid, signal.SIGKILL)  # its own children, such as a loader's processes, end with it
        child.wait(END_S)


def _no_answer(child: Child, what: str, limit_s: float) -> RunError:
    status = child.status()
    if child.killed:
        how = f"no answer for {limit_s:g} s"
    elif status is not None and os.WIFSIGNALED(status):
        how = f"its process was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    else:
        how = "its process ended without an answer"
    return RunError(
        what,
        got=how,
        expected="a process that runs until it has answered",
        remedy="If the system killed it for memory, use smaller micro-batches.",
    )


def apart(call: Callable[[], Any], what: str) -> Any:
    """Call a function that computes gradients, in a child if a backward here would prevent later forks.

    Args:
        call: returns plain data.
        what: what it does, for messages.

    Raises:
        RoundelayError: as :func:`isolated`; if called in this process, whatever it raises.
    """
    return isolated(call, what) if must_isolate_backward() else call()


def must_isolate_backward() -> bool:
    """Whether a backward outside of workers must run in a child, as one here would start autograd's device threads."""
    return not STARTED_WITHOUT_DEVICES and hasattr(os, "fork") and not forked_backward_error()


def forked_backward_error() -> str:
    """Return why a process forked from this one cannot run a backward; empty if it can."""
    try:
        isolated(one_backward, "a backward in a forked process")
    except RoundelayError as error:
        return error.got
    return ""


def check_transport(transport: str) -> None:
    """Reject a transport whose workers are forked if this process cannot be forked.

    Raises:
        UsageError: the transport cannot be used in this process.
    """
    if not transport_named(transport).forks:
        return
    if not hasattr(os, "fork"):
        raise UsageError(
            f"transport {transport}",
            got="a system on which processes cannot be forked",
            expected="Linux, or macOS",
            remedy="Use --transport memory (threads of one process), or torchrun.",
        )
    if (why := forked_backward_error()) and why:
        raise UsageError(
            f"transport {transport} in this process",
            got=f"no backward is possible in a process forked from it: {' '.join(why.split())[:200]}",
            expected="a process that has run no backward and not initialized CUDA: their device threads do not survive "
            "a fork",
            remedy='Use transport="memory", or train from a process of its own: `roundelay train JOB.py --transport '
            f"{transport}`, or `torchrun --nproc-per-node N -m roundelay train JOB.py`.",
        )
