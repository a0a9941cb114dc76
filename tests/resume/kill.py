"""Kill a run, with all its processes, at a random moment, and go on from what it has left, until it is done."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from roundelay.checkpoint.checkpoint import Checkpoint, load
from roundelay.checkpoint.stored_files import is_checkpoint
from tests.faults.case import Server, being_written, members
from tests.resume.job import BATCHES, EPOCHS

UPDATES = EPOCHS * BATCHES
JOB = Path(__file__).with_name("job.py")
RULES = ("1f1b", "pipedream", "pipeoptim", "cdp-v2")
END_S = 120.0
LATE = "the kill came too late"


@dataclass(frozen=True, slots=True)
class Case:
    """A run and when it is killed.

    Args:
        rule: of the run.
        workers: D.
        micro_batches: M.
        transport: between them.
        every: updates from one checkpoint to the next.
        kills: how often it is killed before it may end.
        seed: of the moments.
        amid: whether to wait for a checkpoint that is being written.
        holders: options that say how many workers hold a stage.
    """

    rule: str
    workers: int
    micro_batches: int
    transport: str
    every: int
    kills: int
    seed: int
    amid: bool = False
    holders: tuple[object, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.rule}, D={self.workers} M={self.micro_batches}, {self.transport}, every {self.every}, "
            f"seed {self.seed}"
        )

    def options(self) -> tuple[object, ...]:
        """For the command line."""
        given = {
            "--rule": self.rule,
            "--workers": self.workers,
            "--micro-batches": self.micro_batches,
            "--transport": self.transport,
            "--cuts": "equal",
            "--checkpoint-every": self.every,
            "--epochs": EPOCHS,
        }
        return (*(part for pair in given.items() for part in pair), *self.holders)


def draw(rule: str, seed: int) -> Case:
    """A random case of a rule."""
    dice = random.Random(f"{rule} {seed}")
    workers = dice.choice([2, 3, 4])
    micro_batches = dice.choice([3, 4]) if rule == "cdp-v2" else dice.choice([1, 1, 4])
    transport, every = dice.choice(["memory", "shm", "shm", "gloo"]), dice.choice([1, 2, 3, 5])
    return Case(rule, workers, micro_batches, transport, every, dice.choice([1, 1, 2]), seed)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case.

    Args:
        killed: updates told, and updates of the checkpoint that was left, at each kill.
        in_flight: micro-batches in flight at the last of these checkpoints.
        amid: kills that fell into the writing of a checkpoint.
        faults: what is wrong.
    """

    killed: tuple[tuple[int, int], ...]
    in_flight: int
    amid: int
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """What the run leaves that nothing interrupts: its end, and the loss of every update."""

    end: Checkpoint
    losses: list[float]


def whole(case: Case, folder: Path, server: Server) -> Whole:
    """Run a case without an interruption."""
    pid = server.train(folder, *case.options(), "--out", "whole", job=JOB)
    assert server.wait(pid, END_S) == 0, (folder / "err").read_text()
    losses = [line["loss"] for line in _lines(folder / "whole")]
    return Whole(load(folder / "whole" / "checkpoint"), losses)


def play(case: Case, folder: Path, server: Server, attempts: int = 5) -> Outcome:
    """Play a case in an empty folder; with other moments, so often, where a kill came too late.

    On a busy machine the run may be over by then, or the checkpoint amid which it was to fall: that shows nothing.
    """
    for attempt in range(attempts):
        (own := folder / str(attempt)).mkdir()
        outcome = play_once(replace(case, seed=case.seed + 1000 * attempt), own, server)
        if outcome.faults != (LATE,) and (outcome.faults or outcome.amid or not case.amid):
            break
    return outcome


def play_once(case: Case, folder: Path, server: Server) -> Outcome:
    """Play a case in an empty folder."""
    expected = whole(case, folder, server)
    dice = random.Random(case.seed)
    told: dict[int, float] = {}
    killed: list[tuple[int, int]] = []
    source, start, flying, amid = None, None, 0, 0
    (folder / "pause").write_text("0.02")
    for attempt in range(case.kills):
        begun = 0 if start is None else start.position.updates
        if begun > UPDATES - 3:  # on a busy machine the kill before it came late: nothing is left to kill
            break
        out = folder / f"run{attempt}"
        pid = _begin(case, folder, server, source, out.name)
        later_s = 0.0 if case.amid else dice.random() * 0.05
        amid += _kill(pid, server, out, dice.randint(1, UPDATES - 2 - begun), later_s, case.amid)
        told = {update: loss for update, loss in told.items() if update < begun} | losses_told(out)
        if is_checkpoint(out / "checkpoint"):
            source, start = out.name, load(out / "checkpoint")
        killed.append((max(told, default=-1) + 1, 0 if start is None else start.position.updates))
    if start is not None and start.flight is not None:
        flying = start.flight.micro_batches
    (folder / "pause").unlink()
    if start is not None and start.position.updates == UPDATES:
        return Outcome(tuple(killed), flying, amid, (LATE,))
    status = server.wait(_begin(case, folder, server, source, "last"), END_S)
    if status != 0:
        said = (folder / "err").read_text()[-800:]
        return Outcome(tuple(killed), flying, amid, (f"going on ended with {status}: {said}",))
    begun = 0 if start is None else start.position.updates
    told = {update: loss for update, loss in told.items() if update < begun} | losses_told(folder / "last")
    faults = differences(expected.end, load(folder / "last" / "checkpoint"))
    if [told.get(update) for update in range(UPDATES)] != expected.losses or len(told) != UPDATES:
        faults.append("losses told")
    return Outcome(tuple(killed), flying, amid, tuple(faults))


def differences(a: Checkpoint, b: Checkpoint) -> list[str]:
    """Names of what two checkpoints hold differently."""
    odd = [n for n in a.parameters if not torch.equal(a.parameters[n], b.parameters[n])]
    odd += [n for n in a.buffers if not torch.equal(a.buffers[n], b.buffers[n])]
    for name, state in a.optimizer.items():
        odd += [
            f"{key} of {name}"
            for key in state
            if not torch.equal(*map(torch.as_tensor, (state[key], b.optimizer[name][key])))
        ]
    return odd + ["position"] * (a.position != b.position)


def _begin(case: Case, folder: Path, server: Server, source: str | None, out: str) -> int:
    resume = () if source is None else ("--from", source)
    return server.train(folder, *case.options(), *resume, "--out", out, job=JOB)


def _kill(pid: int, server: Server, out: Path, updates: int, later_s: float, wait: bool) -> bool:
    """Kill every process of a run so many seconds after an update; whether a checkpoint was just being written."""
    deadline = time.monotonic() + END_S
    while (len(losses_told(out)) < updates or (wait and not being_written(out))) and members(pid):
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.002)
    time.sleep(later_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    assert server.wait(pid, END_S) is not None
    while members(pid):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.002)
    return being_written(out)


def _lines(run: Path) -> list[dict[str, Any]]:
    """The whole lines of a run's metrics."""
    path = run / "metrics.jsonl"
    text = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]


def losses_told(run: Path) -> dict[int, float]:
    """Losses by update, none told twice."""
    lines = _lines(run)
    told = {line["update"]: line["loss"] for line in lines}
    assert len(told) == len(lines), "an update is told twice"
    return told
