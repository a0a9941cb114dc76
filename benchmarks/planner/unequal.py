"""Do cuts by speed gain what the planner predicts? Two processes over shared memory, one with half a core.

Imitated by quota: worker 1 enters a control group of its own that gets half of every 10 ms of a core (version 1 or 2
of control groups; root is needed). Two jobs of 12 equal blocks, an MLP and a GPT, rule 1f1b, 8 micro-batches of a
batch, one thread each. Compared are the plan that takes both workers for alike, and the one that knows the speed 0.5,
in alternating rounds of some seconds; told is how many times as fast the second is, by prediction and by the medians
of a batch. Ends with 1 where these differ by more than 10 %, or no such group can be made.

    .venv/bin/python -m benchmarks.planner.unequal [--repeats 5] [--short] [--anyway] [--out FILE]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import roundelay
from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.planner.ranking import GPT
from benchmarks.two_processes import WARM
from roundelay import Job
from roundelay.frontend import Captured
from roundelay.ir.plan import Plan
from roundelay.planner.cluster import Cluster, ClusterWorker
from roundelay.planner.price import batch_s
from roundelay.session.training import Length, Session

SPEED, PERIOD_US, SLOW = 0.5, 10_000, 1
BLOCKS, MICRO_BATCHES, NEAR = 12, 8, 0.1
LEADER = os.getpid()
ROOT = Path("/sys/fs/cgroup")


class Group:
    """A control group that has a share of a core; joined by the slow worker of a run while ``on``."""

    def __init__(self) -> None:
        old = (ROOT / "cpu").is_dir()
        self._folder = (ROOT / "cpu" if old else ROOT) / f"roundelay-{LEADER}"
        self._quota = int(SPEED * PERIOD_US)
        self._limits = (
            {"cpu.cfs_period_us": PERIOD_US, "cpu.cfs_quota_us": self._quota}
            if old
            else {"cpu.max": f"{self._quota} {PERIOD_US}"}
        )
        self._joined = Path(tempfile.gettempdir()) / f"roundelay-slow-{LEADER}"
        #: whether processes of a run join
        self.on = False

    @property
    def joined(self) -> int:
        """The process that joined last."""
        return int(self._joined.read_text())

    @contextmanager
    def made(self) -> Iterator[None]:
        """While there is one."""
        try:
            self._folder.mkdir()
            for name, value in self._limits.items():
                (self._folder / name).write_text(str(value))
        except OSError as error:
            sys.exit(f"No control group with half a core can be made here: {error}")
        try:
            yield
        finally:
            self._joined.unlink(missing_ok=True)
            self._folder.rmdir()

    def join(self) -> None:
        """Called in each process of a run: the slow worker joins."""
        if self.on and os.getpid() != LEADER and _number_among_siblings() == SLOW:
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))
            self._joined.write_text(str(os.getpid()))


def _number_among_siblings() -> int:
    """How many children of this process's parent were started before it."""
    parent, starts = os.getppid(), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(words[1]) == parent:
                starts[int(entry.name)] = int(words[19]), int(entry.name)
    return sum(start < starts[os.getpid()] for start in starts.values())


GROUP = Group()


def _job(model: nn.Module, data: list[Any]) -> Job:
    def optimizer(named: Any) -> torch.optim.Optimizer:
        GROUP.join()
        return torch.optim.SGD(named, lr=1e-3)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return functional.cross_entropy(outputs, batch[1].flatten())

    return Job(model=model, loss=loss, batches=lambda epoch: data * 100, optimizer=optimizer)


def mlp() -> Job:
    """12 layers of 512², 256 rows."""
    layers = [nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(BLOCKS)]
    return _job(nn.Sequential(*layers), [(torch.randn(256, 512), torch.randint(512, (256,))) for _ in range(4)])


def gpt() -> Job:
    """12 blocks of width 128, 16 x 32 tokens."""
    data = [(torch.randint(256, (16, 32)), torch.randint(256, (16, 32))) for _ in range(4)]
    return _job(GPT(BLOCKS, 128), data)


JOBS: Mapping[str, Callable[[], Job]] = {"MLP": mlp, "GPT": gpt}


def plans(job: Job, captured: Captured) -> dict[str, Plan]:
    """The plan for workers that are alike, and the one that knows better; both on workers as they are."""
    workers = ClusterWorker("w0", 0, 1.0), ClusterWorker("w1", SLOW, SPEED)
    given: dict[str, Any] = {"workers": 2, "rule": "1f1b", "micro_batches": MICRO_BATCHES}
    given |= {"transport": "shm", "threads": 1, "captured": captured}
    alike = roundelay.plan(job, **given)
    slow = replace(alike.workers[SLOW], speed=SPEED)
    known = roundelay.plan(job, cluster=Cluster(workers=workers), **given)
    return {"equal": replace(alike, workers=(alike.workers[0], slow)), "by speed": known}


def measured_s(job: Job, captured: Captured, plan: Plan, steps: int) -> float:
    """Median seconds of a batch, with the slow worker in the group."""
    GROUP.on = True
    try:
        done = Session(job, captured, plan, 0, Length(steps=steps)).run(notify=lambda event: None)
    finally:
        GROUP.on = False
    assert GROUP.joined == done.workers[SLOW]["pid"], "another process than the slow worker was limited"
    last = plan.num_stages - 1
    ends = [e.end_s for own in done.events.values() for e in own if (e.opcode, e.stage) == ("update", last)]
    return statistics.median([b - a for a, b in zip(ends[WARM:], ends[WARM + 1 :], strict=False)])


def main() -> None:
    """Run, and print a table."""
    args = asked("Cuts by speed: predicted gain beside the measured one.")
    found: dict[str, dict[str, list[float]]] = {}
    steps, rows, right = WARM + (12 if args.short else 40), [], True
    with GROUP.made():
        for name, made in JOBS.items():
            torch.manual_seed(0)
            job = made()
            captured = roundelay.capture(job)
            chosen = plans(job, captured)
            runs = {way: partial(measured_s, job, captured, plan, steps) for way, plan in chosen.items()}
            times = found[name] = alternate(runs, args.repeats)
            predicted = {way: batch_s(plan) for way, plan in chosen.items()}
            gains = [
                own["equal"] / own["by speed"]
                for own in (predicted, {way: statistics.median(each) for way, each in times.items()})
            ]
            right = right and abs(gains[0] / gains[1] - 1) <= NEAR
            cells = [spread([1e3 * one for one in times[way]]) for way in chosen]
            sizes = [f"{plan.stages[0].workers[0]} up to {plan.stages[0].segments[-1]}" for plan in chosen.values()]
            rows.append([name, *cells, *sizes, f"{gains[0]:.3f}", f"{gains[1]:.3f}"])
    head = ["imitated by quota", "equal, ms a batch", "by speed, ms", "equal: stage 0", "by speed: stage 0"]
    text = table([*head, "gain, predicted", "measured"], rows)
    report(args, f"{text}\n\nGains within {NEAR:.0%} of each other: {'yes' if right else 'no'}.", found)
    sys.exit(not right)


if __name__ == "__main__":
    main()
