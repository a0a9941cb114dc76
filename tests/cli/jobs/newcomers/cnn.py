"""A newcomer's job: a convolutional network, a DataLoader, an accuracy beside the loss."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import roundelay


def job(seed: int) -> roundelay.Job:
    """16 batches of 8 x 8 pictures."""
    pictures, labels = torch.randn(256, 1, 8, 8), torch.randint(10, (256,))
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16, 10),
    )

    def loss(outputs, batch):  # type: ignore[no-untyped-def]
        return {
            "loss": functional.cross_entropy(outputs, batch[1]),
            "accuracy": (outputs.argmax(1) == batch[1]).float().mean(),
        }

    return roundelay.Job(
        model=model,
        loss=loss,
        batches=DataLoader(TensorDataset(pictures, labels), batch_size=16, shuffle=True),
        optimizer=lambda named: torch.optim.Adam(named, lr=1e-3),
    )
