"""One fault: a run, a moment, a victim, and what must be true afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundelay.checkpoint.checkpoint import load
from roundelay.checkpoint.stored_files import is_checkpoint, named_files
from tests.faults.job import BATCHES, EPOCHS

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = Path(__file__).with_name("job.py")
UPDATES = EPOCHS * BATCHES
#: Seconds within which every process must have ended, on a machine that has nothing else to do.
END_S = 10.0
#: Behind so many updates a run may have done all before a fault reaches it.
NEAR = UPDATES // 2
MOMENTS = ("start", "training", "checkpoint", "end")
SIGNALS = ("SIGKILL", "SIGSTOP")  # a forked worker is deaf to SIGTERM, which a scheduler sends to all
MISTAKES = ("exception", "memory")


@dataclass(frozen=True, slots=True)
class Case:
    """A fault.

    Args:
        transport: of the run.
        workers: how many.
        moment: one of :data:`MOMENTS`.
        victim: a worker's number; -1 is the launcher.
        fault: a signal's name, or one of :data:`MISTAKES`.
        number: which update, checkpoint or tenth of a second the moment is.
        later_s: seconds from that to the fault.
    """

    transport: str
    workers: int
    moment: str
    victim: int
    fault: str
    number: int
    later_s: float

    def __str__(self) -> str:
        victim = "launcher" if self.victim < 0 else f"worker {self.victim} of {self.workers}"
        return f"{self.transport}: {self.fault} on {victim} at {self.moment} {self.number} + {self.later_s:.3f} s"


def draw(seed: int) -> Case:
    """A random case."""
    dice = random.Random(seed)
    transport, workers = dice.choice(["memory", "gloo", "shm", "shm"]), dice.choice([2, 3])
    launcher = transport == "memory" or dice.random() < 0.3
    if launcher:
        victim, fault = -1, dice.choice(["SIGKILL", "SIGTERM", "SIGINT"])
    else:
        victim, fault = dice.randrange(workers), dice.choice(SIGNALS)
    if dice.random() < 0.25:
        fault, victim = dice.choice(MISTAKES), dice.choice([0, workers - 1])
    moment = dice.choice(MOMENTS)
    numbers = {"start": (0, 12), "training": (1, UPDATES - 2), "checkpoint": (1, EPOCHS - 1), "end": (UPDATES, UPDATES)}
    return Case(transport, workers, moment, victim, fault, dice.randint(*numbers[moment]), dice.random() * 0.05)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case: exit code (negative: the signal), seconds to the end, what was said, what is wrong.

    ``late``: the run had ended before; ``went_on``: another continued from its checkpoint.
    """

    code: int | None
    seconds: float
    late: bool
    said: str
    faults: tuple[str, ...]
    went_on: bool = False


class Server:
    """A running :mod:`tests.faults.server`."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **what: Any) -> Any:
        """One line there, one back."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def train(self, folder: Path, *args: object, job: Path = JOB) -> int:
        """Start ``roundelay train``; its process number."""
        argv = ["train", str(job), "--no-baseline", "--check", "off", *map(str, args)]
        return int(self.ask(argv=argv, folder=str(folder))["pid"])

    def wait(self, pid: int, seconds: float) -> int | None:
        """Its wait status, if it has ended by then."""
        status = self.ask(wait=pid, seconds=seconds)["status"]
        return None if status is None else int(status)

    def close(self) -> None:
        """End it."""
        with self._process:  # closes the pipes, at which it ends
            pass


def members(leader: int) -> list[int]:
    """Processes of a group that have not ended: a launcher, then its workers in the order of their forks.

    The system counts processes upwards and begins anew at the largest number.
    """
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == leader and fields[0] != "Z":
                found.append(int(entry.name))
    return sorted(found, key=lambda pid: (pid < leader, pid))


def play(case: Case, folder: Path, server: Server, go_on: bool, end_s: float = END_S, epochs: int = EPOCHS) -> Outcome:
    """Run a case in an empty folder.

    Args:
        case: the fault.
        folder: where the run may write.
        server: starts the commands.
        go_on: whether to continue from the checkpoint that is left.
        end_s: seconds in which everything must have ended.
        epochs: of the run, if nothing strikes it.
    """
    pid = server.train(
        folder, "--workers", case.workers, "--transport", case.transport, "--epochs", epochs, "--out", "run"
    )
    try:
        _until(reached(case, folder, pid), pid)
        time.sleep(case.later_s)
        near = updates_told(folder) >= min(NEAR, epochs * BATCHES // 2)
        _strike(case, folder, pid)
        began = time.monotonic()
        status = server.wait(pid, end_s)
        while members(pid) and time.monotonic() - began < end_s:
            time.sleep(0.005)
        seconds = time.monotonic() - began
        left = members(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    code = None if status is None else os.waitstatus_to_exitcode(status)
    said = (folder / "err").read_text() if (folder / "err").exists() else ""
    over = code in (0, -signal.SIGTERM, -signal.SIGINT)  # a signal may also meet an interpreter that is shutting down
    late = over and (folder / "run" / "summary.json").exists()
    faults = () if late else (*_judge(case, folder, code, said), *(f"process {pid} is left" for pid in left))
    if late and not near:
        faults = ("nothing came of the fault",)
    went_on = go_on and not faults and is_checkpoint(folder / "run" / "checkpoint")
    if went_on:
        faults = _goes_on(folder, case, server)
    return Outcome(code, seconds, late, said, tuple(faults), went_on)


def being_written(run: Path) -> bool:
    """Whether there are files of a checkpoint that is not complete."""
    folder = run / "checkpoint"
    return bool({path.name for path in folder.glob("*stage-*")} - named_files(folder))


def updates_told(folder: Path) -> int:
    """Updates that a run in a folder has told so far."""
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def reached(case: Case, folder: Path, pid: int) -> Callable[[], bool]:
    """Whether the moment has come. A worker starts when it is forked."""
    metrics = folder / "run" / "metrics.jsonl"
    if case.moment == "start" and case.victim >= 0 and case.fault in SIGNALS:
        return lambda: len(members(pid)) > _forked(case)
    if case.moment == "start":
        due = time.monotonic() + case.number / 10
        return lambda: time.monotonic() >= due
    if case.moment == "checkpoint":
        seen = [0, False]

        def saving() -> bool:
            now = being_written(folder / "run")
            seen[0] += now and not seen[1]
            seen[1] = now
            return seen[0] >= case.number

        return saving
    return lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= case.number


def _forked(case: Case) -> int:
    """How many workers there must be before one can be struck: a single child may be one that tries out a backward."""
    return max(case.victim + 1, 2)


def _until(ready: Callable[[], bool], pid: int) -> None:
    deadline = time.monotonic() + 60
    while not ready() and members(pid):
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.001)


def _strike(case: Case, folder: Path, pid: int) -> None:
    if case.fault in MISTAKES:
        (folder / f"{'read' if case.victim == 0 else 'loss'}-{case.fault}").touch()
        return
    group = members(pid)
    workers = group[1:]
    needed = _forked(case) if case.moment == "start" else case.workers
    if case.victim >= 0 and len(workers) < needed:
        return  # one has ended, and the others' numbers are its no more: the fault comes too late
    victim = pid if case.victim < 0 else workers[case.victim]
    number = getattr(signal, case.fault)
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, number)


def _judge(case: Case, folder: Path, code: int | None, said: str) -> list[str]:
    """What is wrong with a run that a fault has ended."""
    wrong = []
    if code is None:
        wrong.append("the launcher has not ended")
    if code == 0:
        wrong.append("exit code 0 without a summary")
    if "Traceback" in said:
        wrong.append("a traceback")
    silent = {None, -signal.SIGKILL, -signal.SIGINT}
    if case.moment == "start":
        silent.add(-signal.SIGTERM)  # it came before the command listened
    if code not in silent and said.count(" got ") + said.count("Interrupted.") != 1:
        wrong.append("not one cause told")
    if code not in silent and _cause(case) not in said:
        wrong.append("not this cause told")
    if list(folder.glob("roundelay-*")):
        wrong.append("a folder of its own is left")
    return wrong + loads(folder)


def loads(folder: Path) -> list[str]:
    """What is wrong with the checkpoint, if there is one."""
    checkpoint = folder / "run" / "checkpoint"
    if is_checkpoint(checkpoint):
        try:
            load(checkpoint)
        except Exception as error:
            return [f"the checkpoint cannot be loaded: {error}"]
    return []


def _cause(case: Case) -> str:
    """Words of the one cause."""
    if case.fault in MISTAKES:
        return {"exception": "a deliberate mistake", "memory": "can't allocate memory"}[case.fault]
    return "Interrupted." if case.victim < 0 else f"worker {case.victim} (process"


def forget_mistakes(folder: Path) -> None:
    """Take back what makes the job in a folder fail."""
    for mistake in MISTAKES:
        for where in ("read", "loss"):
            (folder / f"{where}-{mistake}").unlink(missing_ok=True)


def _goes_on(folder: Path, case: Case, server: Server) -> tuple[str, ...]:
    forget_mistakes(folder)
    pid = server.train(folder, "--workers", 2, "--from", "run", "--steps", 3, "--out", "more")
    status = server.wait(pid, 60)
    return () if status == 0 else (f"--from ended with {status}: {(folder / 'err').read_text()[-500:]}",)
