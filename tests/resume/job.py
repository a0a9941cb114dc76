"""A small job with dropout, running statistics, a schedule of rates and short batches, for runs that are killed."""

import resource
import time
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

import roundelay

EPOCHS, BATCHES = 3, 10


def held(number: int) -> None:
    """In the run, not beyond the batch that the file ``hold`` names, as long as it is there."""
    with suppress(FileNotFoundError):
        while Path("run").exists() and number >= int(Path("hold").read_text() or 0):
            time.sleep(0.005)


def full_disk(number: int) -> None:
    """From the batch on that the file ``small`` names, and a first checkpoint, no file can grow beyond a few bytes."""
    small = Path("small")
    if small.exists() and number >= int(small.read_text()):
        while not Path("full/checkpoint/checkpoint.json").exists():  # its last file; a slow disk is long behind
            time.sleep(0.005)
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, resource.RLIM_INFINITY))


def batches(epoch: int):
    pause = float(Path("pause").read_text()) if Path("pause").exists() else 0.0
    generator = torch.Generator().manual_seed(epoch)
    for number in range(BATCHES):
        time.sleep(pause)
        held(epoch * BATCHES + number)
        full_disk(epoch * BATCHES + number)
        rows = 8 if number == BATCHES - 1 else 12
        yield torch.randn(rows, 16, generator=generator), torch.randn(rows, 4, generator=generator)


def job(seed: int) -> roundelay.Job:
    model = nn.Sequential(
        nn.Linear(16, 48),
        nn.BatchNorm1d(48),
        nn.ReLU(),
        nn.Linear(48, 48),
        nn.Dropout(0.2),
        nn.GELU(),
        nn.Linear(48, 4),
    )
    return roundelay.Job(
        model=model,
        loss=lambda outputs, batch: nn.functional.mse_loss(outputs, batch[1]),
        batches=batches,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.97**update),
    )
