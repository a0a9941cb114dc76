"""Cyclic Data Parallelism (2024), Table 2 (b) and Figure 3: a residual network on ImageNet, at full size.

    DATA=imagenet DEPTH=50 python -m roundelay compare benchmarks/cdp/jobs/imagenet.py \\
        --rules 1f1b,cdp-v1,cdp-v2 --workers 4 --micro-batches 4 --cuts roofline --epochs 90 --seeds 3
    python -m benchmarks.cdp.jobs.imagenet compare/imagenet

Sect. 5: batches of 256, SGD with momentum 0.9, rate 0.1 times 0.1 at epochs 30, 60 and 90, weight decay 1e-4, with 18
layers or 50. The second command prints what the paper reports, the highest accuracy of the last 10 epochs. SIDE=32
makes smaller images and ROWS=8 smaller batches, for a trial.
"""

from __future__ import annotations

import csv
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import roundelay
from benchmarks import full_size
from benchmarks.common import table
from benchmarks.datasets import imagenet
from benchmarks.datasets.trouble import whole_number
from benchmarks.networks.resnet import resnet
from roundelay.errors import JobError

DEPTHS = (18, 50)
LAST = 10
"""Epochs of which the highest accuracy is reported."""


def job(seed: int) -> roundelay.Job:
    depth, rows = whole_number("DEPTH", 50), full_size.rows(256)
    if depth not in DEPTHS:
        raise JobError("DEPTH", got=str(depth), expected="18 or 50", remedy="Correct the variable.")
    train, test = imagenet.both(full_size.folder("imagenet"), whole_number("SIDE", imagenet.SIDE))
    return roundelay.Job(
        model=resnet(depth, int(train.labels.max()) + 1),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        batches=full_size.batches(train, rows, seed),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, weight_decay=1e-4),
        scheduler=full_size.drops((30, 60, 90), 0.1, len(train) // rows),
        evaluate=full_size.accuracy(full_size.held(test)),
    )


def reported(curves: Path) -> dict[str, list[float]]:
    """Rule to the figure of each run, from a comparison's curves; a run of fewer epochs has diverged and has none."""
    runs: dict[tuple[str, str], list[float]] = {}
    with curves.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["quantity"] == "accuracy":
                runs.setdefault((line["rule"], line["seed"]), []).append(float(line["value"]))
    epochs, found = max(map(len, runs.values()), default=0), dict[str, list[float]]()
    for (rule, _), accuracies in runs.items():
        if len(accuracies) == epochs:
            found.setdefault(rule, []).append(max(accuracies[-LAST:]))
    return found


def main() -> None:
    found = reported(Path(sys.argv[1]) / "curves.csv")
    rows = [[rule, f"{statistics.fmean(best):.2%}", f"{len(best)}"] for rule, best in found.items()]
    print(table(["rule", f"accuracy, best of the last {LAST} epochs", "runs"], rows))


if __name__ == "__main__":
    main()
