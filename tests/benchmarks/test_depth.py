"""The comparison of depths computes by layers and whole batches what Roundelay computes by stages and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer

import roundelay
from benchmarks.depth.run import LINES, Line, cost
from benchmarks.depth.trial import DECAY, MOMENTUM, Net, Trial
from benchmarks.depth.trial import Optimizer as Formulas
from roundelay.ir.rule import NO_PREDICTOR
from roundelay.planning.explain_plan import explain

SHAPES = ((5, 8), (8, 8), (8, 8), (8, 3))
UPDATES = 9
MADE: dict[str, Callable[[Any], Optimizer]] = {
    "sgdm": partial(SGD, lr=0.05, momentum=MOMENTUM),
    "adam": partial(Adam, lr=0.01),
    "adamw": partial(AdamW, lr=0.01, weight_decay=DECAY),
}
RATES = {"sgdm": 0.05, "adam": 0.01, "adamw": 0.01}
RULES = [line for line in LINES if line.variant.cap > UPDATES and not line.variant.slowed]
"""All but the two lines that no rule of Roundelay's is."""


class Stack(nn.Module):
    """The layers of a `Net` as a module."""

    def __init__(self, weights: list[Tensor], residual: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(w.shape[0] - 1, w.shape[1], dtype=w.dtype) for w in weights)
        self.residual = residual
        for layer, weight in zip(self.layers, weights, strict=True):
            layer.weight.data.copy_(weight[:-1].T)
            layer.bias.data.copy_(weight[-1])

    def forward(self, x: Tensor) -> Tensor:
        for k, layer in enumerate(self.layers):
            inside, last = self.residual and k > 0, k == len(self.layers) - 1
            y = layer(functional.layer_norm(x, x.shape[-1:]) if inside else x)
            y = y if last else y.relu()
            x = x + y if inside and not last else y
        return x


def by_roundelay(
    line: Line, optimizer: str, residual: bool, weights: list[Tensor], data: list[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """The weights behind a training by Roundelay."""
    model = Stack(weights, residual)
    job = roundelay.Job(
        model=model,
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: data,
        optimizer=MADE[optimizer],
    )
    captured = roundelay.capture(job)
    named = {kind: [op.name for op in captured.graph.ops if kind in op.target] for kind in ("relu", "add", "linear")}
    ends = [named["relu"][0], *named["add"], named["linear"][-1]] if residual else named["relu"] + named["linear"][-1:]
    plan = roundelay.plan(
        job,
        captured=captured,
        cuts=[(end,) for end in ends],
        rule=line.rule,
        backward=line.backward,
        predictor=None if line.predictor == NO_PREDICTOR else line.predictor,
        micro_batches=len(SHAPES) if line.variant.full else 1,
    )
    roundelay.train(job, plan=plan, steps=UPDATES)
    return [torch.cat([layer.weight.T, layer.bias[None]]).detach() for layer in model.layers]


@pytest.mark.parametrize("residual", [False, True], ids=["plain", "residual"])
@pytest.mark.parametrize("line", RULES, ids=lambda line: line.variant.name)
def test_every_line_is_the_rule_that_it_says(line: Line, residual: bool) -> None:
    optimizer = list(MADE)[(RULES.index(line) + residual) % len(MADE)]
    torch.manual_seed(0)
    data = [(torch.randn(8, 5).double(), torch.randint(0, 3, (8,))) for _ in range(UPDATES)]
    net = Net(SHAPES, residual)
    start = net.start(2, torch.float64)
    trial = Trial(net, Formulas(optimizer, RATES[optimizer]), line.variant, start)
    with torch.no_grad():
        for x, y in data:
            trial.update(x.expand(2, -1, -1), y.expand(2, -1))
    for seed in range(2):
        theirs = by_roundelay(line, optimizer, residual, [w[seed] for w in start], data)
        for mine, other in zip(trial.weights(), theirs, strict=True):
            torch.testing.assert_close(mine[seed], other, rtol=0, atol=1e-9)


def test_a_rehearsal_holds_two_versions_and_never_waits() -> None:
    (line,) = (line for line in LINES if line.variant.name == "rehearse mixed M=D")
    assert cost(line, 8) == (2, pytest.approx(1.0))
    assert cost(LINES[0], 8) == (1, pytest.approx(8 / 15))


@pytest.mark.parametrize(
    ("rule", "micro_batches", "warned"),
    [
        ("pipeoptim", 1, True),
        ("pipeoptim", 7, False),
        ("async", 1, True),
        ("rehearse", None, False),
        ("1f1b", 1, False),
    ],
)
def test_a_plan_of_a_deep_pipeline_warns_where_training_was_seen_to_fail(
    rule: str, micro_batches: int | None, warned: bool
) -> None:
    data = [(torch.randn(8, 4), torch.randint(0, 4, (8,)))]
    job = roundelay.Job(
        model=nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))),
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: data,
        optimizer=MADE["adam"],
    )
    captured = roundelay.capture(job)
    plan = roundelay.plan(job, captured=captured, workers=8, cuts="equal", rule=rule, micro_batches=micro_batches)
    assert plan.micro_batches == micro_batches or plan.micro_batches == 8
    said = [line for line in explain(captured, plan) if line.startswith("warning: stage 0 runs 7 updates behind")]
    assert len(said) == warned
