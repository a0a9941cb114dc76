"""A small job with many epochs, hence many checkpoints; a file in the folder makes it fail where its name says."""

import resource
import time
from pathlib import Path

import torch
from torch import nn

import roundelay

EPOCHS, BATCHES = 6, 6


def fail(where: str) -> None:
    for path in Path().glob(f"{where}-*"):
        if path.name.endswith("memory"):
            torch.empty(1 << 50)
        raise RuntimeError("a deliberate mistake")


def full_disk(epoch: int) -> None:
    """From the epoch on that the file ``small`` names, and a first checkpoint, no file can grow beyond a few bytes."""
    small = Path("small")
    if small.exists() and epoch >= int(small.read_text()):
        while not Path("run/checkpoint/checkpoint.json").exists():  # its last file; a slow disk is long behind
            time.sleep(0.005)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


def batches(epoch: int):
    full_disk(epoch)
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(BATCHES):
        time.sleep(0.01)
        fail("read")
        yield {"x": torch.randn(8, 16, generator=generator), "y": torch.randn(8, 4, generator=generator)}


def loss(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    fail("loss")
    return nn.functional.mse_loss(outputs, batch["y"])


def job(seed: int) -> roundelay.Job:
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    return roundelay.Job(
        model=model,
        loss=loss,
        batches=batches,
        inputs=lambda batch: ((batch["x"],), {}),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
    )
