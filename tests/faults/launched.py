"""Faults under torchrun, at random: ``python -m tests.faults.launched --cases 60``.

torchrun has a screen and a traceback of its own behind ours. It may be the only one that knows: before all have met,
and of one that is lost at the end, when it or the others have left in good order.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from roundelay.checkpoint.stored_files import is_checkpoint
from tests.faults.case import (
    END_S,
    JOB,
    MISTAKES,
    MOMENTS,
    NEAR,
    ROOT,
    SIGNALS,
    UPDATES,
    Case,
    Outcome,
    forget_mistakes,
    loads,
    reached,
    updates_told,
)
from tests.faults.job import EPOCHS
from tests.faults.table import Play, strike

START_S = 60.0
"""Seconds that a start may take at most, when it is measured."""


def draw(seed: int) -> Case:
    """A random case; the number of one at the start is in hundredths of what its process computes there."""
    dice = random.Random(seed)
    workers = dice.choice([2, 3])
    victim, fault = dice.randrange(workers), dice.choice((*SIGNALS, "SIGTERM"))
    if dice.random() < 0.25:
        victim, fault = -1, dice.choice(["SIGKILL", "SIGTERM", "SIGINT"])
    elif dice.random() < 0.2:
        victim, fault = dice.choice([0, workers - 1]), dice.choice(MISTAKES)
    moment = dice.choice(MOMENTS)
    numbers = {
        "start": (0, 100),
        "training": (1, UPDATES - 2),
        "checkpoint": (1, EPOCHS - 1),
        "end": (UPDATES, UPDATES),
    }
    return Case("torchrun", workers, moment, victim, fault, dice.randint(*numbers[moment]), dice.random() * 0.05)


def here(folder: Path) -> list[int]:
    """Processes that work in a folder and have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if (entry / "cwd").resolve() == folder.resolve() and _fields(int(entry.name))[0] != "Z":
                found.append(int(entry.name))
    return found


def members(launcher: int, folder: Path) -> dict[int, int]:
    """The launcher's own children, by their number among the workers."""
    found = {}
    for pid in here(folder):
        with contextlib.suppress(OSError, StopIteration, ValueError, IndexError):
            variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
            rank = next(v.removeprefix("RANK=") for v in variables if v.startswith("RANK="))
            if int(_fields(pid)[1]) == launcher:
                found[int(rank)] = pid
    return found


def _fields(pid: int) -> list[str]:
    """State, parent and more."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def begin(workers: int, folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start the launcher in a process group of its own; what all say goes to the file ``err``."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}", "-m", "roundelay"]
    length = options or ("--epochs", str(EPOCHS), "--out", "run")
    train = ["train", str(JOB), "--no-baseline", "--check", "off", "--grace-s", "1", *length]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    with (folder / "err").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, *command, *train],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )


def starting_s(folder: Path) -> dict[int, float]:
    """Seconds that each of three processes computes to import torch, capture, meet and make the first update.

    By the clock a start takes half as long where nothing runs beside it.
    """
    launcher, began = begin(3, folder), time.monotonic()
    try:
        while not updates_told(folder):
            assert launcher.poll() is None, (folder / "err").read_text()
            assert time.monotonic() - began < START_S, "it does not start"
            time.sleep(0.01)
        return {rank: _computed_s(pid) for rank, pid in members(launcher.pid, folder).items()}
    finally:
        _end_all(folder)
        launcher.wait()


def _computed_s(pid: int | None) -> float:
    """Seconds of the processors' time that a process has had; none of one that is not there."""
    with contextlib.suppress(OSError):
        fields = [] if pid is None else _fields(pid)
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _end_all(folder: Path) -> None:
    while left := here(folder):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def play(case: Case, folder: Path, start_s: Mapping[int, float], *, go_on: bool) -> Outcome:
    """Run a case in an empty folder, where processes compute so long at the start; continue from what it leaves."""
    launcher = begin(case.workers, folder)
    try:
        ready = _due(case, folder, launcher, start_s)
        deadline = time.monotonic() + 120
        while not ready() and launcher.poll() is None:
            assert time.monotonic() < deadline, "the moment never came"
            time.sleep(0.001)
        time.sleep(case.later_s)
        met = (folder / "run").exists()
        told = updates_told(folder)
        _strike(case, folder, launcher)
        began = time.monotonic()
        while (launcher.poll() is None or here(folder)) and time.monotonic() - began < END_S:
            time.sleep(0.01)
        seconds, left = time.monotonic() - began, here(folder)
    finally:
        _end_all(folder)
    code, said = launcher.poll(), (folder / "err").read_text()
    launcher.wait()
    late = (folder / "run" / "summary.json").exists() and (folder / "run" / "trace.json").exists()
    wrong = [] if late else _judge(case, folder, code, said, met, told > 0)
    wrong += [] if told >= NEAR or not late else ["nothing came of the fault"]
    ours = str(ROOT / "src" / "roundelay")  # not whatever lies in a clone of that name, such as torch
    wrong += ["a traceback of ours"] if any(ours in part for part in said.split("Traceback")[1:]) else []
    wrong += [f"process {pid} is left" for pid in left]
    went_on = go_on and not wrong and is_checkpoint(folder / "run" / "checkpoint")
    if went_on:
        wrong += _goes_on(case, folder)
    return Outcome(code, seconds, late, said, tuple(wrong), went_on)


def _goes_on(case: Case, folder: Path) -> list[str]:
    """What is wrong with another run under the launcher, of as many processes, from the checkpoint that is left."""
    forget_mistakes(folder)
    try:
        code: int | str = begin(case.workers, folder, "--from", "run", "--steps", "3", "--out", "more").wait(START_S)
    except subprocess.TimeoutExpired:
        code = "nothing"
    finally:
        _end_all(folder)
    done = (folder / "more" / "summary.json").exists()
    return [] if code == 0 and done else [f"--from ended with {code}: {(folder / 'err').read_text()[-500:]}"]


def _due(
    case: Case, folder: Path, launcher: subprocess.Popen[bytes], start_s: Mapping[int, float]
) -> Callable[[], bool]:
    """Whether the moment has come; at the start, the victim must be there, or the first of the launcher's children.

    What strikes torchrun before it has started anybody is its own affair: it may lose a Ctrl-C while it imports torch.
    """
    if case.moment != "start":
        return reached(case, folder, launcher.pid)
    rank = max(case.victim, 0)

    def due() -> bool:
        pid = members(launcher.pid, folder).get(rank)
        return _begun(pid, case.fault) and _computed_s(pid) >= start_s[rank] * case.number / 100

    return due


def _begun(pid: int | None, fault: str) -> bool:
    """Whether a member is there; if it is to be stopped, so must be its watchdog, the first thing that it starts."""
    if pid is None or fault != "SIGSTOP":
        return pid is not None
    with contextlib.suppress(OSError):
        return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return False


def _strike(case: Case, folder: Path, launcher: subprocess.Popen[bytes]) -> None:
    if case.fault in MISTAKES:
        (folder / f"{'read' if case.victim == 0 else 'loss'}-{case.fault}").touch()
        return
    number = getattr(signal, case.fault)
    with contextlib.suppress(ProcessLookupError, KeyError):  # it has ended: the fault comes too late
        if case.victim >= 0:
            os.kill(members(launcher.pid, folder)[case.victim], number)
        elif number == signal.SIGINT and launcher.returncode is None:
            os.killpg(launcher.pid, number)  # as a terminal does
        else:
            launcher.send_signal(number)


def _judge(case: Case, folder: Path, code: int | None, said: str, met: bool, trained: bool) -> list[str]:
    """What is wrong with a run that a fault has ended. Every process tells of the fault that it meets, once.

    A process that is killed before all have met has told nobody of it, and nobody hears it go: torchrun tells.
    """
    wrong = []
    if code is None:
        wrong.append("the launcher has not ended")
    if code == 0:
        wrong.append("exit code 0 without a summary")
    panels = re.findall("╭.*?╰", said, re.DOTALL)
    told = len(panels) + said.count("Interrupted.")
    told = told or said.count("was stopped by a signal")  # this is told besides, by its watchdog
    mute = case.fault == "SIGKILL" if case.victim < 0 else case.moment == "end" and case.fault in (*SIGNALS, "SIGTERM")
    killed = case.fault == "SIGKILL" and case.victim >= 0 and not trained
    elsewhere = killed and "Signal 9 (SIGKILL) received by PID" in said
    if told > case.workers or (told < 1 and met and not mute and not elsewhere):
        wrong.append(f"{told} causes told by {case.workers} processes")
    known = (*_causes(case), *(("Interrupted.",) if elsewhere else ()))
    if told and not all(any(words in each for words in known) for each in panels or [said]):
        wrong.append("not this cause told")
    if list(folder.glob("roundelay-*")):
        wrong.append("a folder of its own is left")
    return wrong + loads(folder)


def _causes(case: Case) -> tuple[str, ...]:
    """Words of the one cause. A leader that is asked to end tells that; at the end it may not know for whose sake."""
    if case.fault in MISTAKES:
        return ({"exception": "a deliberate mistake", "memory": "can't allocate memory"}[case.fault],)
    asked = case.victim < 0 or (case.victim == 0 and case.fault == "SIGTERM") or case.moment == "end"
    own = (f"│ worker {case.victim} ", f"roundelay: worker {case.victim} (") if case.victim >= 0 else ()
    return (*(("Interrupted.",) if asked else ()), *own)


@contextmanager
def launched() -> Iterator[Play]:
    """Runs under torchrun; two before show how long processes compute at the start, the second with files at hand."""
    for _ in range(2):
        with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as first:
            start_s = starting_s(Path(first))
    yield lambda seed, folder: (draw(seed), play(draw(seed), folder, start_s, go_on=seed % 3 == 0))


def main() -> None:
    strike(__doc__ or "", 60, launched)


if __name__ == "__main__":
    main()
