"""PipeOptim (2023), Table IV, group 2: CIFAR-100 with AdamW, at full size.

    DATA=cifar-100-binary NETWORK=vgg16 python -m roundelay compare benchmarks/pipeoptim/jobs/cifar100.py \\
        --rules gpipe,pipedream,pipeoptim:paper:recompute --workers 4 --micro-batches 1 --epochs 120

NETWORK is vgg16 or googlenet. Sect. V-B: batches of 128, rate 0.001, a tenth of it from epoch 90 on. How the networks
are fitted to images of 32 x 32 is not said: here VGG-16's head has 512 units, GoogLeNet begins with one convolution
and keeps their size, and images are cropped and mirrored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import roundelay
from benchmarks import full_size
from benchmarks.datasets import cifar
from benchmarks.networks.inception import googlenet
from benchmarks.networks.others import vgg16

NETWORKS = {"vgg16": lambda: vgg16(100, small=True), "googlenet": lambda: googlenet(100, small=True)}


def job(seed: int) -> roundelay.Job:
    model = full_size.network(NETWORKS, "vgg16")
    rows = full_size.rows(128)
    train, test = full_size.cifar_of(full_size.folder("cifar-100-binary"), cifar.CIFAR_100)
    return roundelay.Job(
        model=model,
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        batches=full_size.batches(train, rows, seed),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        scheduler=full_size.drops((90,), 0.1, len(train) // rows),
        evaluate=full_size.accuracy(full_size.held(test)),
    )
