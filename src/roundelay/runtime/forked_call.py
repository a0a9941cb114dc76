"""Calls in a forked child: what they do to autograd, to memory and to the person's objects ends with it.

Where an accelerator is present, a backward in this process would make every process forked later unable to train (see
:mod:`roundelay.fork_safety`). So whatever computes gradients beside the workers (measuring, compiling, the reference of
a run of processes) is done in a child.
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

from roundelay.deferred_signals import Interrupts
from roundelay.errors import RoundelayError, RunError, UsageError
from roundelay.fork_safety import STARTED_WITHOUT_DEVICES, one_backward
from roundelay.ir.transports import transport_named
from roundelay.runtime.child_process import fork
from roundelay.runtime.failure_tracker import failure, restored
from roundelay.runtime.forked_workers import END_S, Child, write_all
from roundelay.runtime.user_errors import out_of_memory, unexpected
from roundelay.runtime.worker_messages import Report, ReportAssembler, pieces_of

_TICK_S = 1.0


def isolated(call: Callable[[], Any], what: str, *, threads: int = 1, limit_s: float = math.inf) -> Any:
    """Call a function in a forked child.

    Args:
        call: returns what JSON can hold.
        what: what it does, for people.
        threads: intra-op threads of the child.
        limit_s: seconds that it may take; by default as long as its process lives.

    Returns:
        what it returned.

    Raises:
        RoundelayError: the one that it raised.
        UserCodeError: it raised something else.
        RunError: the child was killed, or took longer than ``limit_s``.
    """

    def live() -> None:
        torch.set_num_threads(threads)  # first of all: a forked pool of more threads would hang
        os.close(reading)
        for piece in pieces_of(_result(call, what)):
            write_all(writing, piece)

    with Interrupts() as interrupts:
        reading, writing = os.pipe()
        try:
            try:
                child = Child(0, fork(live), reading)
            finally:
                os.close(writing)
            report = _answer(child, interrupts, limit_s)
        finally:
            os.close(reading)
    if report is None:
        raise _no_answer(child, what, limit_s)
    if report.kind == "failed":
        raise restored(report)
    return report.data["value"]


def _result(call: Callable[[], Any], what: str) -> Report:
    try:
        return Report("finished", 0, {"value": call()})
    except RoundelayError as error:
        told: RoundelayError = error
    except MemoryError as error:
        told = out_of_memory(what, error)
    except Exception as error:  # of the person's own code, or torch's
        told = unexpected(what, error)
    return failure(0, told, "".join(traceback.format_exception(told)))


def _answer(child: Child, interrupts: Interrupts, limit_s: float) -> Report | None:
    """What the child says, if it does; it has ended then."""
    try:
        interrupts.open()
        incoming, deadline = ReportAssembler(), time.monotonic() + limit_s
        poller = select.poll()  # select knows the first 1024 files only
        poller.register(child.pipe, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            if not poller.poll(1000 * min(left, _TICK_S)):
                continue
            size = os.readv(child.pipe, incoming.rooms())
            for report in incoming.filled(size):
                return report
            if not size:
                child.wait(END_S)
                return None
        return None
    finally:
        interrupts.held = True
        if child.status() is None:
            child.killed = True
            os.kill(child.pid, signal.SIGKILL)  # what its loader has started ends with it
        child.wait(END_S)


def _no_answer(child: Child, what: str, limit_s: float) -> RunError:
    status = child.status()
    if child.killed:
        how = f"no answer for {limit_s:g} s"
    elif status is not None and os.WIFSIGNALED(status):
        how = f"its process was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    else:
        how = "its process ended without a word"
    return RunError(
        what,
        got=how,
        expected="a process that lives until it has answered",
        remedy="If the system killed it for memory, use smaller micro-batches; the run itself starts other processes.",
    )


def apart(call: Callable[[], Any], what: str) -> Any:
    """Call a function that computes gradients: in a child where one here would spoil later forks, else here.

    Args:
        call: returns what JSON can hold, or whatever it likes where that comes back from this very process.
        what: what it does, for people.

    Raises:
        RoundelayError: as :func:`isolated`; where it is called here, whatever it raises.
    """
    return isolated(call, what) if backwards_apart() else call()


def backwards_apart() -> bool:
    """Whether backwards beside the workers belong in a child: one here would start threads for devices."""
    return not STARTED_WITHOUT_DEVICES and hasattr(os, "fork") and not forked_backward_error()


def forked_backward_error() -> str:
    """Why a process forked from this one cannot run a backward; empty if it can."""
    try:
        isolated(one_backward, "a backward in a forked process")
    except RoundelayError as error:
        return error.got
    return ""


def check_transport(transport: str) -> None:
    """Refuse a transport whose workers would be forked from a process that cannot be forked, or not any more.

    Raises:
        UsageError: it is one.
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
            expected="a process in which neither a backward nor CUDA has begun: torch then has threads for its "
            "devices, and a fork loses them",
            remedy='Use transport="memory", or train from a process of its own: `roundelay train JOB.py --transport '
            f"{transport}`, or `torchrun --nproc-per-node N -m roundelay train JOB.py`.",
        )
