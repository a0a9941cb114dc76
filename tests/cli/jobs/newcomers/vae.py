"""A newcomer's job: a variational autoencoder, which draws in its forward and returns three tensors."""

import torch
from torch import nn
from torch.nn import functional

import roundelay


class Vae(nn.Module):
    """16 numbers to 4 and back."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(16, 8), nn.Linear(4, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decode(z), mean, log_variance


def job(seed: int) -> roundelay.Job:
    """16 batches."""
    data = [torch.randn(16, 16) for _ in range(16)]

    def loss(outputs, batch):  # type: ignore[no-untyped-def]
        again, mean, log_variance = outputs
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return functional.mse_loss(again, batch) + 0.1 * divergence

    return roundelay.Job(
        model=Vae(),
        inputs=lambda batch: ((batch,), {}),
        loss=loss,
        batches=data,
        optimizer=lambda named: torch.optim.Adam(named, lr=1e-3),
    )
