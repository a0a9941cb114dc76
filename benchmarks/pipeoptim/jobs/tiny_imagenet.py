"""PipeOptim (2023), Table IV, group 1, and Table VI: Tiny-ImageNet with SGDM, at full size.

    DATA=tiny-imagenet-200 NETWORK=resnet101 python -m roundelay compare benchmarks/pipeoptim/jobs/tiny_imagenet.py \\
        --rules gpipe,pipedream,spectrain:paper:recompute,pipeoptim:paper:recompute --workers 4 --micro-batches 1 \\
        --epochs 70 --time-to accuracy=0.66

NETWORK is alexnet, resnet101 or inception_v3. Sect. V-B: batches of 56, momentum 0.9, weight decay 5e-4, rate 0.01, a
tenth of it from epoch 40 on and a hundredth from 60. The rule that accumulates has a command of its own, see the
README.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import roundelay
from benchmarks import full_size
from benchmarks.datasets import tiny_imagenet
from benchmarks.networks.inception import inception_v3
from benchmarks.networks.others import alexnet
from benchmarks.networks.resnet import resnet

CLASSES = 200
NETWORKS = {
    "alexnet": lambda: alexnet(CLASSES),
    "resnet101": lambda: resnet(101, CLASSES),
    "inception_v3": lambda: inception_v3(CLASSES),
}


def job(seed: int) -> roundelay.Job:
    model, rows = full_size.network(NETWORKS, "resnet101"), full_size.rows(56)
    train, test = full_size.tiny_imagenet_of(full_size.folder("tiny-imagenet-200"), tiny_imagenet.SIDE)
    return roundelay.Job(
        model=model,
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        batches=full_size.batches(train, rows, seed),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01, momentum=0.9, weight_decay=5e-4),
        scheduler=full_size.drops((40, 60), 0.1, len(train) // rows),
        evaluate=full_size.accuracy(full_size.held(test)),
    )
