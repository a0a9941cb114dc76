"""Cuts by measured speed: peers of 0.2, 0.4 and 0.8 of a core, imitated by quotas, train fourteen equal blocks.

`roundelay host` on the peer of 0.8 measures all three and cuts the model by what it finds, over lines of 1 Gbit/s and
1 ms. The optimum is of all cuts the one whose slowest peer takes the least, by what plain PyTorch takes on each peer
for all blocks, on all at the same time. Beside it five, five and four blocks. Updates per second are those of the
last half of a run.

    .venv/bin/python -m benchmarks.peers.unequal [--repeats 3] [--short] [--anyway] [--out FILE]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import combinations
from pathlib import Path

import torch

from benchmarks.common import alternate, asked, report, spread, table
from benchmarks.peers.hosted import hosted
from benchmarks.peers.jobs import blocks
from tests.wan.bed import ROOT, Bed, Unusable

CORES = (0.8, 0.2, 0.4)
MBIT_PER_S, RTT_MS = 1000, 1
STEPS, WANTED = 80, 0.85
ALONE_S = 10.0
JOB = Path(blocks.__file__)
WAYS = {"by speed": "measured", "equal": "linear_9,linear_19"}
"""How the model is cut: option `--cuts`."""


def alone() -> float:
    """Seconds of a batch of all blocks by plain PyTorch, in this process."""
    torch.set_num_threads(1)
    model, batch = blocks.model(), blocks.batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    count, start = -3, 0.0
    while count < 1 or time.monotonic() < start + ALONE_S:
        optimizer.zero_grad()
        blocks.loss(model(batch[0]), batch).backward()
        optimizer.step()
        count += 1
        start = time.monotonic() if count == 0 else start
    return (time.monotonic() - start) / count


def speeds(bed: Bed) -> list[float]:
    """Blocks per second of each peer, while the others compute too."""
    argv = [sys.executable, "-m", "benchmarks.peers.unequal", "--alone"]
    processes = [bed.popen(k, argv, stdout=subprocess.PIPE, cwd=ROOT) for k in range(len(CORES))]
    return [blocks.BLOCKS / json.loads(process.communicate(timeout=120)[0]) for process in processes]


def optimum(rates: list[float]) -> tuple[float, list[int]]:
    """Updates per second with the best cuts, and the blocks of each peer."""
    every = combinations(range(1, blocks.BLOCKS), len(rates) - 1)
    counts = [[b - a for a, b in zip((0, *ends), (*ends, blocks.BLOCKS), strict=True)] for ends in every]
    return max((min(rate / n for rate, n in zip(rates, own, strict=True)), own) for own in counts)


def cuts_of(plan: dict) -> list[int]:
    """Blocks of each stage of a plan; each block has as many weights."""
    weights = [stage["parameter_bytes"] for stage in plan["stages"]]
    return [round(blocks.BLOCKS * own / sum(weights)) for own in weights]


def main() -> None:
    """Run, and print a table."""
    what = asked(__doc__ or "", repeats=3)
    steps = STEPS // 2 if what.short else STEPS
    cuts: dict[str, list[str]] = {way: [] for way in WAYS}
    with (
        tempfile.TemporaryDirectory() as folder,
        Bed(len(CORES), mbit_per_s=MBIT_PER_S, rtt_ms=RTT_MS, cores=CORES) as bed,
    ):
        rates = speeds(bed)

        def updates_per_s(way: str) -> float:
            out = Path(folder) / f"{way} {time.monotonic_ns()}"
            run = hosted(bed, len(CORES), JOB, out, ["--steps", str(steps), "--cuts", WAYS[way]])
            cuts[way].append("-".join(map(str, cuts_of(run.plan))))
            last = run.updates[steps // 2 :]
            return (len(last) - 1) / (last[-1]["seconds"] - last[0]["seconds"])

        found = alternate({way: partial(updates_per_s, way) for way in WAYS}, what.repeats)
    best, own = optimum(rates)
    rows = [
        [way, " ".join(sorted(set(cuts[way]))), spread(each, 2), f"{statistics.median(each) / best:.2f}"]
        for way, each in found.items()
    ]
    rows.append(["optimum", "-".join(map(str, own)), f"{best:.2f}", "1.00"])
    head = ["imitated by quota: 0.8, 0.2, 0.4 of a core", "blocks", "updates per second", "of the optimum"]
    alone = f"Alone: {', '.join(f'{rate:.1f}' for rate in rates)} blocks a second. Wanted by speed: {WANTED}."
    report(what, f"{table(head, rows)}\n\n{alone}", {"updates per s": found, "blocks per s": rates, "cuts": cuts})


if __name__ == "__main__":
    if sys.argv[1:] == ["--alone"]:
        print(alone())
        sys.exit()
    try:
        main()
    except Unusable as error:
        sys.exit(str(error))
