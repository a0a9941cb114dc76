"""A run has the reference's bits whatever carries its tensors, also through kernels that tell by addresses and strides.

Real ones do: which kernel a matrix product takes depends on where its operands begin, and the last bits on that.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import roundelay

ROWS, FIELDS = 9, 49


@torch.library.custom_op("roundelay_tests::where", mutates_args=())
def where(x: Tensor) -> Tensor:
    """Adds to ``x`` how far it begins behind a multiple of 64 bytes, and its first stride."""
    return x + x.data_ptr() % 64 + x.stride(0)


@where.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Late(nn.Module):
    """Reads one of its inputs behind the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.middle, self.late = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(FIELDS, 4)
        self.out = nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.relu(self.middle(torch.relu(self.early(x))))
        return self.out(h) + self.late(1e-3 * where(y))


def job(strided: bool) -> roundelay.Job:
    def batches(epoch: int) -> Iterator[tuple[Tensor, ...]]:
        draws = torch.Generator().manual_seed(epoch)
        for _ in range(4):
            yield tuple(torch.randn(ROWS, size, generator=draws) for size in (16, FIELDS * (1 + strided), 4))

    def inputs(batch: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (batch[0], batch[1][:, :: 1 + strided]), {}

    return roundelay.Job(
        model=Late(),
        loss=lambda outputs, batch: nn.functional.mse_loss(outputs, batch[2]),
        batches=batches,
        inputs=inputs,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.01),
    )


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
@pytest.mark.parametrize("strided", [False, True], ids=["views", "strided"])
def test_addresses_and_strides_are_the_same_whatever_carries_a_tensor(strided: bool, transport: str) -> None:
    torch.manual_seed(0)
    made = job(strided)
    plan = roundelay.plan(made, workers=3, rule="pipeoptim", micro_batches=3, transport=transport, cuts="equal")
    found = roundelay.verify(made, plan=plan, steps=4)
    assert not found.difference, found
    assert found.equal != strided, "plain PyTorch gives the operator another stride, which it adds"
