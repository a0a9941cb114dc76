"""OneFlow's Fig. 16 at our size: a GPT by data, tensor, hybrid and three-fold parallelism, samples/s by workers.

One and two workers are run here, processes over shared memory with one thread each; more are simulated, from the same
facts: nodes of 8 workers as fast as this machine's cores, within a node the links that a profile of this machine has,
between nodes 10 Gbit/s and 20 microseconds, declared. A batch of 32 sequences, whatever the number of workers.

    .venv/bin/python -m benchmarks.planner.figure_16 [--anyway] [--out FILE] [--short]
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping

import torch

import roundelay
from benchmarks.common import asked, report, table
from benchmarks.planner.ranking import GPT, job_of, variants
from roundelay.env import better_malloc
from roundelay.errors import RoundelayError
from roundelay.finals.short_run import ShortRun
from roundelay.planner.cluster import Cluster, ClusterLink, ClusterLinks, ClusterWorker
from roundelay.planner.machine_profile import MachineProfile
from roundelay.planner.plan_options import Choices
from roundelay.planner.source import Hardware
from roundelay.planning.collect_facts import collect_facts
from roundelay.planning.examined import Examined
from roundelay.search.search import Task, tried

LAYERS, WIDTH, ROWS, LENGTH = 8, 256, 32, 64
NODE, MOST, HEADS = 8, 32, 4
BETWEEN = ClusterLink(latency_s=20e-6, bytes_per_s=1.25e9)


def forms(workers: int) -> Mapping[str, Choices]:
    """What the four parts of the figure have on so many workers."""
    own = Choices(rule="1f1b", workers=1, micro_batches=1, transport="shm", threads=1, recompute="none")
    found = {"data": own.over(Choices(data_parallel=workers))}
    if workers <= HEADS:
        found["tensor"] = Choices(tensor_parallel=workers).over(own)
    if workers >= 4:
        found["data x tensor 2"] = Choices(data_parallel=workers // 2, tensor_parallel=2).over(own)
    if workers >= 8:
        three = Choices(data_parallel=workers // 4, tensor_parallel=2, workers=2, micro_batches=4)
        found["data x tensor 2 x 2 stages"] = three.over(own)
    elif workers == 2:
        found["2 stages"] = Choices(workers=2, micro_batches=8).over(own)
    return found


def cluster_of(workers: int, profile: MachineProfile) -> Cluster:
    """So many workers, eight on a node."""
    latency_s, size = profile.message_s(1), 1 << 22
    within = ClusterLink(latency_s=latency_s, bytes_per_s=size / (profile.message_s(size) - latency_s))
    nodes = [ClusterWorker(f"w{k}", k, 1.0, node=str(k // NODE)) for k in range(workers)]
    return Cluster(workers=tuple(nodes), links=ClusterLinks(within=within, between=BETWEEN))


def main() -> None:
    """Run, simulate, and print a table."""
    if (environment := better_malloc()) is not None:  # as the command itself does
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    what = asked(__doc__ or "", 1)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    job = job_of(GPT(LAYERS, WIDTH), lambda chance: torch.randint(256, (ROWS, LENGTH), generator=chance), 256)
    captured = roundelay.capture(job)
    facts = collect_facts(Examined(job, captured, 0, lambda *_: None), threads=(1,))
    profile = variants()["profile"]
    assert profile is not None
    short, rows = ShortRun(job, captured, 0, 1.0 if what.short else 4.0), []
    for workers in (1, 2, 4, 8, 16, MOST):
        cluster = cluster_of(workers, profile) if workers > 2 else None
        machine = Hardware(workers, workers, cluster=cluster)
        task = Task(facts, machine, workers, None, {"shm": profile})
        for name, choices in forms(workers).items():
            try:
                one = tried(task, choices)
            except RoundelayError as error:
                rows.append([name, str(workers), "", "", str(error.got)])
                continue
            real = short.batch_s(one.priced.plan) if workers <= 2 else 0.0
            measured = f"{ROWS / real:.1f}" if real else ""
            rows.append([name, str(workers), f"{ROWS / one.batch_s:.1f}", measured])
    report(what, table(["", "workers", "predicted samples/s", "measured"], rows), {"rows": rows})


if __name__ == "__main__":
    main()
