"""A run that is told to end, or loses a worker, ends quickly and leaves no process; two runs do not meet."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.harness import SCREEN_LINES, Said, environment, finish, job_file, start

#: Seconds that a command may take to come to life on a busy machine, and to end.
START_S, END_S = 60.0, 10.0
SLOW = """
import pathlib, time

def slow(epoch):
    while epoch > 1 and pathlib.Path("../hold").exists():
        time.sleep(0.05)
    for batch in mlp.batches(epoch):
        time.sleep(0.05)
        yield batch
"""
OPTIONS = ("--workers", 2, "--steps", 9999, "--no-baseline", "--out", "run")

Running = subprocess.Popen[str]


def until(ready: Callable[[], bool], process: Running) -> None:
    """Wait until something holds of a running command."""
    deadline = time.monotonic() + START_S
    while not ready():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def trains(folder: Path) -> Callable[[], bool]:
    """Whether a run has made an update."""
    metrics = folder / "run" / "metrics.jsonl"
    return lambda: metrics.exists() and metrics.stat().st_size > 0


@contextlib.contextmanager
def running(folder: Path, *args: object) -> Iterator[Running]:
    """A command in a process group of its own; none of the group is left when the block ends."""
    process = start(folder, *args)
    try:
        yield process
        deadline = time.monotonic() + END_S
        while group(process) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not group(process), "processes are left"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        finish(process)


def group(process: Running) -> list[int]:
    """Members of a command's process group that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == process.pid and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def ended(process: Running) -> Said:
    """Wait for the end, which must come soon."""
    began = time.monotonic()
    said = finish(process, START_S)
    assert time.monotonic() - began < END_S
    assert "Traceback" not in said.err, said.err
    assert len(said.err.splitlines()) <= SCREEN_LINES
    return said


@contextlib.contextmanager
def two_in_training(workplace: Path, *args: object) -> Iterator[list[tuple[Path, Running]]]:
    """Two runs at once, each in a folder of its own, that have begun to train."""
    job = job_file(workplace, "batches=slow", SLOW)
    folders = [workplace / "a", workplace / "b"]
    for folder in folders:
        folder.mkdir()
    with contextlib.ExitStack() as stack:
        runs = [(folder, stack.enter_context(running(folder, "train", job, *OPTIONS, *args))) for folder in folders]
        for folder, process in runs:
            until(trains(folder), process)
        yield runs


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
def test_ctrl_c_in_training_ends_everything(workplace: Path, transport: str) -> None:
    with two_in_training(workplace, "--transport", transport) as runs:
        os.killpg(runs[0][1].pid, signal.SIGINT)  # as a terminal does
        os.kill(runs[1][1].pid, signal.SIGINT)  # as `kill -INT` does
        for folder, process in runs:
            said = ended(process)
            assert said.code == 130, said.err
            assert "Interrupted" in said.err
            left = {entry.name for entry in (folder / "run").iterdir()}
            assert left - {"checkpoint", ".checkpoint.new"} == {
                "plan.toml",
                "metrics.jsonl",
            }  # after an epoch there is one


def test_ctrl_c_before_training_leaves_nothing(workplace: Path) -> None:
    before = "import pathlib, time\n\ndef wait():\n    pathlib.Path('here').touch()\n    time.sleep(60)\n"
    job = job_file(workplace, "**{'model': wait()}", before)
    with running(workplace, "train", job, *OPTIONS) as process:
        until((workplace / "here").exists, process)
        os.kill(process.pid, signal.SIGINT)
        assert ended(process).code == 130
    with running(workplace, "train", job, *OPTIONS) as process:
        until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text(), process)  # being loaded
        os.kill(process.pid, signal.SIGINT)
        said = ended(process)
    assert said.code in (130, -signal.SIGINT)
    assert not (workplace / "run").exists()


#: `python -m roundelay` with a command that tells what an interrupt would do when it begins.
FIRST_LINES = """
import runpy, signal, sys, types

signal.signal(signal.SIGINT, {handler})
sys.modules["roundelay.cli"] = types.ModuleType("roundelay.cli")
sys.modules["roundelay.cli"].main = lambda: print(repr(signal.getsignal(signal.SIGINT)))
runpy.run_module("roundelay", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("handler", "told"), [("signal.default_int_handler", "SIG_DFL"), ("signal.SIG_IGN", "SIG_IGN")]
)
def test_until_the_command_listens_ctrl_c_just_ends_the_module(handler: str, told: str) -> None:
    """Unless it was told not to: a shell's background job ignores interrupts."""
    program = [sys.executable, "-c", FIRST_LINES.format(handler=handler)]
    said = subprocess.run(program, env=environment(), capture_output=True, text=True, timeout=START_S, check=True)
    assert told in said.stdout


def test_before_those_lines_nothing_is_loaded_that_takes_long() -> None:
    """`-m` reads the package before its module: in that time a Ctrl-C shows where it struck."""
    program = "import runpy, sys; had = {*sys.modules}; import roundelay; print(*sorted({*sys.modules} - had))"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=START_S, check=True
    )
    assert done.stdout.split() == ["__future__", "roundelay"]


def test_an_error_that_an_interrupt_makes_elsewhere_does_not_hide_it(workplace: Path) -> None:
    before = """
import pathlib, time

def wait():
    try:
        pathlib.Path('here').touch()
        time.sleep(60)
    except KeyboardInterrupt:
        raise IndexError('pop from empty list')
"""
    job = job_file(workplace, "**{'model': wait()}", before)
    with running(workplace, "train", job, *OPTIONS) as process:
        until((workplace / "here").exists, process)
        os.kill(process.pid, signal.SIGINT)
        said = ended(process)
    assert said.code == 130
    assert "Interrupted" in said.err
    assert "pop from" not in said.err


def test_a_killed_worker_is_told_by_name_and_signal_and_a_killed_launcher_takes_its_workers_along(
    workplace: Path,
) -> None:
    with two_in_training(workplace, "--transport", "gloo") as ((_, robbed), (_, orphaning)):
        victim = max(set(group(robbed)) - {robbed.pid})
        os.kill(victim, signal.SIGKILL)
        said = ended(robbed)
        assert len(group(orphaning)) == 3
        os.kill(orphaning.pid, signal.SIGKILL)
        finish(orphaning)
    assert said.code == 1
    assert re.search(rf"worker [01] \(process {victim}\)", said.told), said.err
    assert "SIGKILL" in said.told


def test_two_runs_at_once_work_and_nobody_outside_can_reach_them(workplace: Path) -> None:
    hold = workplace / "hold"  # the first may not be over before the second trains
    hold.touch()
    with two_in_training(workplace, "--transport", "gloo", "--steps", 30) as runs:
        for _, process in runs:
            members = group(process)
            assert len(members) == 3
            assert all(address in LOOPBACK for address in listeners(members)), listeners(members)
        hold.unlink()
        assert [finish(process).code for _, process in runs] == [0, 0]


#: 127.0.0.1, ::1, and the former written as the latter, as /proc prints them on a little-endian machine.
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def listeners(pids: list[int]) -> list[str]:
    """Local addresses at which any of the processes listens."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets |= set(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.append(fields[1].split(":")[0])
    return found


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
def test_ctrl_c_while_measuring_writes_nothing(workplace: Path, transport: str) -> None:
    with running(workplace, "calibrate", "--transport", transport, "--threads", 1, "-o", "machine.toml") as process:
        assert process.stderr is not None
        assert "sweep 1" in process.stderr.readline()
        os.kill(process.pid, signal.SIGINT)
        assert ended(process).code == 130
    assert not list(workplace.iterdir())
