"""Where a tensor's value later is another than the one for which the model was captured, the run stops and names it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import roundelay
from roundelay.errors import CaptureError, UserCodeError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)


class Asserts(Net):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        assert torch.isfinite(h).all(), f"not finite: {h.shape}"
        return self.b(h)


class Raises(Net):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        if x.max() > 100 or torch.isnan(h).any():
            raise ValueError(f"too large: {x.shape}")
        return self.b(h)


class Repairs(Net):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        if torch.isinf(h).any():
            h = h.clamp(-1, 1)
        return self.b(h)


class Warns(Net):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        if x.max() > 100:
            warnings.warn("large", stacklevel=1)
        return self.b(h)


def job(model: nn.Module, bad: float, at: int = 2) -> roundelay.Job:
    draws = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 8, generator=draws), torch.randint(4, (8,), generator=draws)) for _ in range(4)]
    data[at][0][0, 0] = bad
    return roundelay.Job(
        model=model,
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: data,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.parametrize(
    ("kind", "bad", "line"),
    [
        (Asserts, torch.nan, 'assert torch.isfinite(h).all(), f"not finite: {h.shape}"`: got False; expected True'),
        (Raises, 1e3, "if x.max() > 100 or torch.isnan(h).any():`: got True; expected False"),
        (Raises, torch.nan, "if x.max() > 100 or torch.isnan(h).any():`: got True; expected False"),
        (Repairs, torch.inf, "if torch.isinf(h).any():`: got True; expected False"),
    ],
)
def test_the_run_stops_before_that_update(kind: type[Net], bad: float, line: str, transport: str) -> None:
    losses: list[float] = []
    with pytest.raises(UserCodeError) as raised:
        roundelay.train(
            job(kind(), bad),
            steps=4,
            workers=2,
            micro_batches=2,
            cuts="equal",
            transport=transport,
            on_update=lambda event: losses.append(event.loss),
        )
    assert line in str(raised.value)
    assert len(losses) == 2


@pytest.mark.parametrize(("kind", "bad"), [(Warns, 1e3)])
def test_other_branches_are_refused(kind: type[Net], bad: float) -> None:
    with pytest.raises(CaptureError, match="no Python branch on tensor values"):
        roundelay.plan(job(kind(), bad), workers=2)


def test_the_first_batch_is_checked_too() -> None:
    with pytest.raises(UserCodeError, match="got False; expected True"):
        roundelay.plan(job(Asserts(), torch.nan, at=0), workers=2)


def test_trials_with_other_weights_are_not_checked() -> None:
    """A layer that begins with zeros is tried with others, to see whether rows depend on one another."""

    class Zero(Net):
        def forward(self, x: torch.Tensor) -> Any:
            out = self.b(self.a(x))
            if out.abs().max() > 1e-6:
                raise ValueError("not zero")
            return out

    model = Zero()
    torch.nn.init.zeros_(model.b.weight)
    torch.nn.init.zeros_(model.b.bias)
    assert roundelay.plan(job(model, 1.0), workers=2).micro_batches > 1
