"""The plan that a search chooses, run beside what a person would take instead, on the same two processes.

Ours is ``roundelay plan JOB.py --search --workers 2``, finals included, and nothing else given. Torch's are
DistributedDataParallel, FSDP2 (``fully_shard`` of each block and of the whole), ``parallelize_module`` (columns, then
rows) and ``torch.distributed.pipelining`` (1F1B, two stages of as many blocks, 4 micro-batches), each on two ranks with
one thread over gloo, as their documentation shows, and one process with all threads. Milliseconds of an update, in
rounds that take turns. All run with the C library's memory settings that the command uses.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.planner.ranking import JOBS, Block
from benchmarks.two_processes import WARM, of_two_ranks, update_ms
from benchmarks.zero.run import sharded
from roundelay import Job, capture
from roundelay.env import better_malloc
from roundelay.finals.search_plan import Searched, SearchPlan
from roundelay.planner.plan_options import Choices
from roundelay.planning.examined import hardware_here
from roundelay.search.search import shown
from roundelay.session.training import Length, Session

MICRO_BATCHES = 4
"""Of torch's pipeline."""

Step = Callable[[Tensor, Tensor], None]
"""Train on inputs and labels."""


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs, labels.flatten())


def job_of(name: str) -> Job:
    torch.manual_seed(0)
    return JOBS[name]()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The parts of which a model has many."""
    return list(model.blocks if hasattr(model, "blocks") else model)


def timed(job: Job, steps: int, step: Step, rows: slice = slice(None)) -> float:
    """Median milliseconds of an update in a loop of plain PyTorch, on some rows of each batch."""
    took, data = [], itertools.cycle(job.batches(0))
    for x, labels in itertools.islice(data, steps):
        start = time.perf_counter()
        step(x[rows], labels[rows])
        took.append(1e3 * (time.perf_counter() - start))
    return statistics.median(took[WARM:])


def stepping(model: nn.Module) -> Step:
    """The usual loop's body."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(x: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model(x), labels).backward()
        optimizer.step()

    return step


def alone(name: str, steps: int) -> float:
    """One process with all threads."""

    def measure(rank: int) -> float:
        if rank:
            return 0.0
        torch.set_num_threads(hardware_here().threads)
        job = job_of(name)
        return timed(job, steps, stepping(job.model))

    return of_two_ranks(measure)


def data_parallel(name: str, steps: int) -> float:
    """DistributedDataParallel."""

    def measure(rank: int) -> float:
        job = job_of(name)
        return timed(job, steps, stepping(DistributedDataParallel(job.model)), slice(rank, None, 2))

    return of_two_ranks(measure)


def fully_sharded(name: str, steps: int) -> float:
    """FSDP2."""

    def measure(rank: int) -> float:
        job = job_of(name)
        model = sharded(job.model, blocks_of(job.model), 2)
        return timed(job, steps, stepping(model), slice(rank, None, 2))

    return of_two_ranks(measure)


def tensor_parallel(name: str, steps: int) -> float:
    """parallelize_module: of a transformer's blocks the perceptrons, which need no other code; else layer by layer."""

    def measure(rank: int) -> float:
        mesh, job = init_device_mesh("cpu", (2,)), job_of(name)
        for i, block in enumerate(blocks_of(job.model)):
            own: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            if not isinstance(block, Block):
                own = {"0": RowwiseParallel() if i % 2 else ColwiseParallel()}
            parallelize_module(block, mesh, own)
        return timed(job, steps, stepping(job.model))

    return of_two_ranks(measure)


def pipelined(name: str, steps: int) -> float:
    """Torch's 1F1B."""

    def measure(rank: int) -> float:
        job = job_of(name)
        stage = PipelineStage(half_of(job.model, rank), rank, 2, torch.device("cpu"))
        optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-4)
        schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)

        def step(x: Tensor, labels: Tensor) -> None:
            optimizer.zero_grad()
            if rank:
                schedule.step(target=labels, losses=[])
            else:
                schedule.step(x)
            optimizer.step()

        return timed(job, steps, step)

    return of_two_ranks(measure)


def half_of(model: nn.Module, rank: int) -> nn.Module:
    """Half of the blocks, with what stands before or behind them."""
    blocks = blocks_of(model)
    half = blocks[len(blocks) // 2 :] if rank else blocks[: len(blocks) // 2]
    if not hasattr(model, "blocks"):
        return nn.Sequential(*half)
    return nn.Sequential(*half, model.head, nn.Flatten(0, 1)) if rank else nn.Sequential(model.words, *half)


@functools.cache
def searched(name: str) -> Searched:
    """What `--search --workers 2` finds."""
    job = job_of(name)
    return SearchPlan(job, capture(job), Choices(workers=2), 0, lambda words: print(words, file=sys.stderr)).run(4)


@functools.cache
def session(name: str, steps: int) -> Session:
    job = job_of(name)
    return Session(job, capture(job), searched(name).planned.plan, 0, Length(steps=steps))


def ours(name: str, steps: int) -> float:
    """Median milliseconds from one update to the next."""
    return of_two_ranks(lambda rank: 0.0 if rank else update_ms(session(name, steps)))


RIVALS = {
    "one process, all threads": alone,
    "DistributedDataParallel": data_parallel,
    "FSDP2": fully_sharded,
    "parallelize_module": tensor_parallel,
    "torch.distributed.pipelining, 1F1B": pipelined,
    "ours, chosen": ours,
}


def main() -> None:
    """Search, run all in turns, and print a table."""
    if (environment := better_malloc()) is not None:  # as the command itself does
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    warnings.filterwarnings("ignore")
    what = asked(__doc__ or "", 5)
    steps = 25 if what.short else 60
    every = {f"{name}: {one}": functools.partial(run, name, steps) for name in JOBS for one, run in RIVALS.items()}
    for name in JOBS:
        session(name, steps)
    found, rows = alternate(every, what.repeats), []
    for name, values in found.items():
        mine = statistics.median(found[name.split(":")[0] + ": ours, chosen"])
        rows.append([name, spread(values), f"{statistics.median(values) / mine:.2f}"])
    report(what, table(["", "ms per update", "times ours"], rows), {"ms": found})
    for name in JOBS:
        print(f"\n{name}: chosen {shown(searched(name).chosen.choices)}")
        for final in searched(name).finals:
            took = "failed" if final.measured_s is None else f"{1e3 * final.measured_s:.1f}"
            print(f"  predicted {1e3 * final.tried.batch_s:.1f}, ran {took}: {shown(final.tried.choices)}")


if __name__ == "__main__":
    main()
