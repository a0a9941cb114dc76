"""Face recognition with as many classes as people: OneFlow's case (Sect. 6.3.1, Figs. 11 and 12).

The last layer has a row for every identity, and is larger than all others together. So its rows are divided over the
devices, and with them the softmax; the convolutions before it have a part of the images on each device. The model says
nothing of that; `face_recognition.toml` does.

    roundelay train examples/face_recognition.py --signatures examples/face_recognition.toml --workers 1 --rule 1f1b
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import roundelay

IDENTITIES, SIDE, FEATURES = 4000, 16, 128
BATCHES, ROWS = 100, 32


class Recogniser(nn.Module):
    """From images (rows, 1, SIDE, SIDE) and identities (rows,) to the loss."""

    def __init__(self, identities: int = IDENTITIES) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.GroupNorm(4, 64),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * (SIDE // 4) ** 2, FEATURES),
        )
        self.head = nn.Linear(FEATURES, identities, bias=False)

    def forward(self, images: Tensor, identities: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.backbone(images)), identities)


def faces(epoch: int, identities: int = IDENTITIES) -> Iterator[tuple[Tensor, Tensor]]:
    """Made faces, since none may be fetched: one picture for each identity, with noise."""
    generator = torch.Generator().manual_seed(0)
    portraits = torch.randn(identities, 1, SIDE, SIDE, generator=generator)
    generator.manual_seed(epoch + 1)
    for _ in range(BATCHES):
        who = torch.randint(identities // 20, (ROWS,), generator=generator)  # few, so that they are soon known
        yield portraits[who] + 0.5 * torch.randn(ROWS, 1, SIDE, SIDE, generator=generator), who


def job(seed: int) -> roundelay.Job:
    """The job."""
    return roundelay.Job(
        model=Recogniser(),
        inputs=lambda batch: (batch, {}),
        loss=lambda loss, batch: loss,
        batches=faces,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9),
    )
