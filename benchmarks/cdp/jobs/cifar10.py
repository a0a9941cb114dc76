"""Cyclic Data Parallelism (2024), Table 2 (a): a residual network on CIFAR-10, at full size.

    DATA=cifar-10-batches-bin DEPTH=18 python -m roundelay compare benchmarks/cdp/jobs/cifar10.py \\
        --rules 1f1b,cdp-v1,cdp-v2 --workers 4 --micro-batches 4 --cuts roofline --epochs 100 --seeds 5

Sect. 5: batches of 128, SGD with momentum 0.9, rate 0.05 times 0.2 at epochs 30, 60 and 90, weight decay 5e-4 with 18
layers and 1e-3 with 50.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import roundelay
from benchmarks import full_size
from benchmarks.datasets import cifar
from benchmarks.datasets.trouble import whole_number
from benchmarks.networks.resnet import BLOCKS, resnet
from roundelay.errors import JobError

DECAY = {18: 5e-4, 50: 1e-3}


def job(seed: int) -> roundelay.Job:
    depth, rows = whole_number("DEPTH", 18), full_size.rows(128)
    if depth not in DECAY:
        raise JobError("DEPTH", got=str(depth), expected="18 or 50", remedy=f"The network knows {sorted(BLOCKS)}.")
    train, test = full_size.cifar_of(full_size.folder("cifar-10-batches-bin"), cifar.CIFAR_10)
    return roundelay.Job(
        model=resnet(depth, 10, small=True),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        batches=full_size.batches(train, rows, seed),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, weight_decay=DECAY[depth]),
        scheduler=full_size.drops((30, 60, 90), 0.2, len(train) // rows),
        evaluate=full_size.accuracy(full_size.held(test)),
    )
