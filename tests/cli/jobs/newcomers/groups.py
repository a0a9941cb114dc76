"""A newcomer's job: no weight decay for biases, a schedule with a warm-up, an evaluation."""

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR

import roundelay

DATA = [(torch.randn(16, 8), torch.randint(4, (16,))) for _ in range(8)]


def job(seed: int) -> roundelay.Job:
    """8 batches."""

    def optimizer(named):  # type: ignore[no-untyped-def]
        decayed = [parameter for name, parameter in named if parameter.ndim > 1]
        others = [parameter for name, parameter in named if parameter.ndim <= 1]
        return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2)

    def evaluate(model):  # type: ignore[no-untyped-def]
        return {"accuracy": float((model(DATA[0][0]).argmax(1) == DATA[0][1]).float().mean())}

    return roundelay.Job(
        model=nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=DATA,
        optimizer=optimizer,
        scheduler=lambda own: LambdaLR(own, lambda update: min(1.0, (update + 1) / 4)),
        evaluate=evaluate,
    )
