"""Whether a batch may be cut, as its first batch shows: innocent jobs are not misjudged, others are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from roundelay.frontend import capture
from roundelay.planner.source import Divisibility
from roundelay.planning.batch_divisibility import batch_divisibility, counts_add_up

Loss = Callable[[Any, Any], Any]


class Layered(nn.Module):
    """Two layers, and anything between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu, *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.parts = nn.Linear(6, 16), nn.Linear(16, 4), nn.ModuleList(parts)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        """Rows x 4."""
        hidden = self.between(self.first(x))
        for part in self.parts:
            hidden = part(hidden)
        made: Tensor = self.last(hidden)
        return made


class Images(nn.Module):
    """A residual block with BatchNorm, one of them over all batches so far."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.n, self.m = nn.BatchNorm2d(8), nn.BatchNorm2d(8, momentum=None)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Rows x 4."""
        hidden = torch.relu(self.n(self.a(x)))
        hidden = torch.relu(self.m(self.b(hidden)) + hidden)
        made: Tensor = self.head(hidden.mean((2, 3)))
        return made


class Tokens(nn.Module):
    """An embedding, a layer over positions, and a head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(20, 16), layer, nn.Linear(16, 20)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        """Logits, or with labels the loss beside them."""
        hidden = self.layer(self.embed(x))
        logits = self.head(hidden[0] if isinstance(hidden, tuple) else hidden)
        if labels is None:
            return logits
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def entropy(outputs: Tensor, batch: Any) -> Tensor:
    """Mean over rows, or rows and positions."""
    return F.cross_entropy(outputs.flatten(0, -2), batch[-1].flatten())


def zeroed(model: Layered) -> Layered:
    """Every row has the same loss at first."""
    nn.init.zeros_(model.last.weight)
    nn.init.zeros_(model.last.bias)
    return model


def classed(model: nn.Module, batch: Any, loss: Loss = entropy, micro_batches: int = 4) -> Divisibility:
    return batch_divisibility(capture(model, loss, batch), [batch], micro_batches)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def rows(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(8, *(shape or (6,))), torch.randint(4, (8,))


NOISES: dict[str, Callable[[Tensor], Tensor]] = {
    "rand_like": lambda h: h + torch.rand_like(h),
    "randn": lambda h: h + torch.randn(h.size(0), 16),
    "of no row": lambda h: h + torch.randn(16),
    "uniform_": lambda h: h + torch.empty_like(h).uniform_(),
    "rrelu": lambda h: F.rrelu(h, training=True),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.3, training=True),
    "dropout of features": lambda h: F.dropout1d(h[:, :, None].expand(-1, -1, 3), 0.3, training=True).mean(-1),
    "dropout": lambda h: F.dropout(h, 0.5),
    "bernoulli": lambda h: h * torch.bernoulli(torch.sigmoid(h)),
    "gumbel": lambda h: h * F.gumbel_softmax(h, dim=-1),
    "multinomial": lambda h: h + F.one_hot(torch.multinomial(F.softmax(h, -1), 2)[:, 0], 16),
    "normal": lambda h: torch.distributions.Normal(h, 1.0).rsample(),
}


@pytest.mark.parametrize("name", NOISES)
def test_draws_of_the_model_make_no_job_another(name: str) -> None:
    assert classed(Layered(NOISES[name]), rows()) == Divisibility("mean")


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "an encoder layer": lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True),
    "an LSTM with dropout": lambda: nn.LSTM(16, 16, 2, dropout=0.3, batch_first=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_over_positions_keep_rows_apart(name: str) -> None:
    tokens = torch.randint(20, (8, 12))
    assert classed(Tokens(LAYERS[name]()), (tokens, tokens)) == Divisibility("mean")


LOSSES: dict[str, Loss] = {
    "smoothed": lambda o, b: F.cross_entropy(o, b[1], label_smoothing=0.1),
    "squares": lambda o, b: F.mse_loss(o, F.one_hot(b[1], 4).float()),
    "absolute": lambda o, b: F.l1_loss(o, F.one_hot(b[1], 4).float()),
    "sum and count": lambda o, b: (F.cross_entropy(o, b[1], reduction="sum"), len(b[1])),
    "metrics": lambda o, b: {"loss": F.cross_entropy(o, b[1]), "right": (o.argmax(1) == b[1]).float().mean()},
    "labels left out": lambda o, b: F.cross_entropy(o, b[1].where(b[1] > 1, -100)),
    "weighed classes": lambda o, b: F.cross_entropy(o, b[1], torch.tensor([1.0, 2.0, 3.0, 4.0])),
    "it draws": lambda o, b: F.cross_entropy(F.dropout(o, 0.2), b[1]),
    "it draws much": lambda o, b: F.cross_entropy(F.dropout(30 * o, 0.9), b[1]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_means_of_every_kind_are_seen_to_be_means(name: str) -> None:
    assert classed(Layered(), rows(), LOSSES[name]) == Divisibility("mean")


def test_a_model_that_returns_its_own_loss_and_one_in_16_bits() -> None:
    tokens = torch.randint(20, (8, 12))
    batch = {"x": tokens, "labels": tokens.where(tokens > 6, -100)}
    assert classed(Tokens(nn.Identity()), batch, lambda o, _: o["loss"]) == Divisibility("mean")
    x, y = rows()
    assert classed(Layered().bfloat16(), (x.bfloat16(), y)) == Divisibility("mean")


def test_batch_norm_is_told_apart_from_another_loss() -> None:
    x, y = rows(3, 8, 8)
    assert classed(Images(), (x, y)) == Divisibility("statistics")
    untracked = nn.BatchNorm1d(16, track_running_stats=False)
    assert classed(Layered(torch.relu, untracked), rows()) == Divisibility("statistics")
    summed = classed(Images(), (x, y), lambda o, b: F.cross_entropy(o, b[1], reduction="sum"))
    assert summed.kind == "other"


OTHERS: dict[str, Loss] = {
    "a sum": lambda o, b: F.cross_entropy(o, b[1], reduction="sum"),
    "rows against rows": lambda o, b: F.cross_entropy(o @ o.t(), torch.arange(len(o))),
    "without the batch's mean": lambda o, b: F.cross_entropy(o - o.mean(0), b[1]),
    "a mean of its own": lambda o, b: (
        (F.cross_entropy(o, b[1], reduction="none") * (b[1] > 0)).sum() / (b[1] > 0).sum()
    ),
    "labels left out, and another term": lambda o, b: (
        F.cross_entropy(o, b[1].where(b[1] > 0, -100)) + 0.1 * o.square().mean()
    ),
    "a sum, and it draws": lambda o, b: F.cross_entropy(F.dropout(o, 0.2), b[1], reduction="sum"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_losses_that_are_no_mean_over_parts_are_seen(name: str) -> None:
    seen = classed(Layered(), (torch.randn(8, 6), torch.tensor([0, 0, 0, 1, 2, 3, 1, 2])), OTHERS[name])
    assert seen.kind == "other"
    assert " parts" in seen.why


def test_a_head_of_zeros_hides_nothing() -> None:
    """All rows have the same loss then, and a mean over some of them is that over all."""
    batch = torch.randn(8, 6), torch.tensor([0, 1, 0, 1, 2, 3, 1, 2])
    assert classed(zeroed(Layered()), batch, OTHERS["a mean of its own"]).kind == "other"
    assert classed(zeroed(Layered()), batch) == Divisibility("mean")
    tokens = torch.randint(20, (8, 12))
    own = Tokens(nn.Identity())
    nn.init.zeros_(own.head.weight)
    nn.init.zeros_(own.head.bias)
    labels = {"x": tokens, "labels": tokens.where(tokens > 6, -100)}
    assert classed(own, labels, lambda o, _: o["loss"] * 1.0).kind == "other"  # its gradient is 1 in any case


class Gated(nn.Module):
    """Adds to every row something of the others, by a gate that is closed at first."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(6, 4), nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Of (N, 6): (N, 4)."""
        hidden: Tensor = self.layer(x)
        return hidden + self.gate * (hidden - hidden.mean(0)) / hidden.std(0)


@pytest.mark.parametrize("shape", [(), (1,), (4,)])
def test_a_gate_of_zero_hides_nothing(shape: tuple[int, ...]) -> None:
    assert classed(Gated(*shape), rows()).kind == "other"


def test_unevenness_is_seen_where_losses_are_nearly_alike() -> None:
    """By the gradients: the losses differ by less than what counts as rounding."""
    model = Layered()
    with torch.no_grad():
        model.last.weight.mul_(1e-5)
        model.last.bias.mul_(1e-5)
    batch = torch.randn(8, 6), torch.tensor([0, 1, 1, 1, 2, 3, 1, 2])
    seen = classed(model, batch, OTHERS["a mean of its own"])
    assert "gradient" in seen.why


def test_time_first_and_what_cannot_be_cut() -> None:
    tokens = torch.randint(20, (12, 4))
    assert classed(Tokens(nn.LSTM(16, 16)), (tokens, tokens.roll(1, 0))).kind == "other"
    dropping = nn.LSTM(16, 16, 2, dropout=0.3)  # what it drew for the whole batch would hide the cut
    assert classed(Tokens(dropping), (tokens, tokens.roll(1, 0))).kind == "other"
    assert "fails alone" in classed(Layered(), rows(), lambda o, b: F.cross_entropy(o.view(8, 4), b[1])).why
    assert "1 row," in classed(Layered(), (torch.randn(1, 6), torch.tensor([1]))).why
    uneven = {"x": torch.randn(8, 6), "edges": torch.zeros(2, 3)}
    captured = capture(Layered(), lambda o, b: o.mean() + b["edges"].sum(), uneven, lambda b: ((b["x"],), {}))
    seen = batch_divisibility(captured, [uneven], 4)
    assert seen.kind == "whole"
    assert "different numbers of rows" in seen.why


def test_counts_of_halves() -> None:
    x, y = rows()

    def counted(count: Loss) -> tuple[float, float] | None:
        return counts_add_up(capture(Layered(), lambda o, b: (o.sum(), count(o, b)), (x, y)), (x, y))

    assert counted(lambda o, b: len(o)) == (4.0, 4.0)  # a few rows show it
    assert counted(lambda o, b: 1.0) == (1.0, 2.0)
    assert counted(lambda o, b: max(len(o), 6)) == (8.0, 12.0)  # the whole batch decides
    assert counted(lambda o, b: b[1][4:].numel()) == (4.0, 0.0)
    assert counts_add_up(capture(Layered(), lambda o, b: (o.sum(), len(o)), (x[:1], y[:1])), (x[:1], y[:1])) is None
