"""PipeOptim (2023), Table IV, groups 2 and 3: a residual LSTM on IMDb with AdamW or Adam, at full size.

    DATA=aclImdb OPTIMIZER=adam python -m roundelay compare benchmarks/pipeoptim/jobs/imdb.py \\
        --rules gpipe,pipedream,pipeoptim:paper:recompute --workers 4 --micro-batches 1 --epochs 50

Sect. V-B: batches of 256, rate 0.001, with Adam falling by a polynomial. The paper gives neither vocabulary nor sizes:
here 25,000 words, 8 layers of 128 units, the last 128 words of a review.
"""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F

import roundelay
from benchmarks import full_size
from benchmarks.datasets.trouble import whole_number
from benchmarks.networks.others import ResidualLSTM
from roundelay.errors import JobError

VOCABULARY, WIDTH, LAYERS, EPOCHS = 25_000, 128, 8, 50
OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def job(seed: int) -> roundelay.Job:
    name, rows, length = os.environ.get("OPTIMIZER", "adamw"), full_size.rows(256), whole_number("LENGTH", 128)
    if name not in OPTIMIZERS:
        raise JobError("OPTIMIZER", got=repr(name), expected=" or ".join(OPTIMIZERS), remedy="Correct the variable.")
    train, test = full_size.imdb_of(full_size.folder("aclImdb"), VOCABULARY, length)
    falling = full_size.polynomial(EPOCHS, len(train) // rows)
    return roundelay.Job(
        model=ResidualLSTM(VOCABULARY, WIDTH, LAYERS, 2),
        loss=lambda outputs, batch: F.cross_entropy(outputs, batch[1]),
        batches=full_size.batches(train, rows, seed),
        optimizer=lambda named: OPTIMIZERS[name](named, lr=1e-3),
        scheduler=falling if name == "adam" else None,
        evaluate=full_size.accuracy(full_size.held(test)),
    )
