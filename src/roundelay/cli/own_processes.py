"""Starts the workers of a run over nccl as processes of this host, where no launcher has.

Each is this very command, told by its environment which of the processes it is, as a launcher would tell it. They begin
without CUDA; the first one plans. This process only passes signals on, and ends what is left when one has failed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from roundelay import env
from roundelay.cli.plan_from_options import plan_files
from roundelay.errors import UsageError, counted
from roundelay.planner.holder_choices import parts_of, replicas_of
from roundelay.planner.plan_options import Choices
from roundelay.planning.planning import read_plan
from roundelay.runtime.device import num_cuda_devices
from roundelay.runtime.processes.child_process import die_with_parent
from roundelay.schedules import PIPELINE

ENTRY = ("-m", "roundelay")
"""The arguments of Python that run this program."""

AFTER_S, KILL_S = 15.0, 30.0
"""Seconds after the first failure until the other processes are asked to end, and until they are killed."""

_QUIET = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Variables of the processes, unless they are set: torch's own traces would stand around what the first one tells."""

_TICK_S = 0.1
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def own_processes(choices: Choices, plan_file: Path | None, resume: Path | None = None) -> int:
    """How many processes this command must start to run over nccl; 0 if it is one of them, or runs otherwise.

    Args:
        choices: of the command line.
        plan_file: the plan to run, if one is given.
        resume: the run that is continued, if one is: its plan is kept unless a choice differs.

    Raises:
        UsageError: it would be one process alone, or this host has not a device for each.
    """
    files = [plan_file] if plan_file is not None else [] if resume is None else plan_files(resume)
    plan = read_plan(files[0]) if files else None
    transport = choices.transport or (None if plan is None else plan.transport)
    if transport != "nccl" or env.is_launched():
        return 0
    count = _wanted(choices) if plan is None or _sizes(choices) else plan.num_workers
    here = num_cuda_devices()
    if not 2 <= count <= here:
        raise UsageError(
            "transport nccl without a launcher",
            got=f"{counted(count, 'worker')}, and {counted(here, 'CUDA device')} here",
            expected="two workers or more, each a process with a device of its own on this host",
            remedy="Leave --transport out, for threads of one process (--transport memory); or start processes on "
            "several hosts by torchrun.",
        )
    return count


def _sizes(choices: Choices) -> set[str]:
    """Choices that say how many workers there are."""
    return choices.given().keys() & {"workers", "data_parallel", "hybrid", "tensor_parallel", "signatures", "layout"}


def _wanted(choices: Choices) -> int:
    """The workers that choices ask for: by default as many as there are devices."""
    here = num_cuda_devices()
    if choices.layout not in (None, PIPELINE):
        return choices.micro_batches or here
    split = choices.tensor_parallel or 1
    if choices.signatures is not None:
        split = parts_of(replace(choices, tensor_parallel=None))
    holders = replicas_of(choices) * split
    return holders * (choices.workers or max(1, here // holders))


def run_processes(count: int, arguments: Sequence[str]) -> int:
    """Run this program as so many workers; returns the first one's exit code, or else that of one that failed.

    Args:
        count: how many.
        arguments: of the command line.
    """
    libc, parent, address = ctypes.CDLL(None), os.getpid(), _free_address()
    processes = [
        subprocess.Popen(
            [sys.executable, *ENTRY, *arguments],
            env=env.of_process(_told(rank, count, address), _QUIET),
            start_new_session=True,  # a terminal's Ctrl-C comes to this process, which passes it on
            preexec_fn=partial(die_with_parent, parent, libc),
        )
        for rank in range(count)
    ]
    with _passing_on(processes):
        _wait(processes)
    codes = [process.returncode for process in processes]
    failed = [code for code in codes if code]
    return _code(codes[0] or (failed[0] if failed else 0))


def _told(rank: int, count: int, address: tuple[str, int]) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    host, port = address
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


def _free_address() -> tuple[str, int]:
    """An address of the loopback interface at which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        host, port = listener.getsockname()
    return host, port


@contextmanager
def _passing_on(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    def pass_on(number: int, _: Any) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until all have ended; after a failure not for ever: the others notice it and end by themselves."""
    failed_at, asked = 0.0, False
    while any(process.poll() is None for process in processes):
        time.sleep(_TICK_S)
        if not failed_at and any(process.returncode for process in processes):
            failed_at = time.monotonic()
        since = time.monotonic() - failed_at if failed_at else 0.0
        for process in processes if since > KILL_S or (since > AFTER_S and not asked) else ():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL if since > KILL_S else signal.SIGTERM)
        asked = asked or since > AFTER_S


def _code(returncode: int) -> int:
    """The exit code that a shell would give: 128 and the signal's number for a process that a signal has ended."""
    return returncode if returncode >= 0 else 128 - returncode
