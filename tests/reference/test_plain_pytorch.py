"""The reference over pieces of a captured model against the loop that everybody writes, where the rule is plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR

from roundelay.frontend import Captured, RngKey, capture
from roundelay.frontend.batch import num_rows, split
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.rule import rule_named
from roundelay.lower.partition import partition
from roundelay.reference import ReferenceResult, ReferenceStage, Setting, run_reference
from roundelay.reference.run_inputs import Named


class Small(nn.Module):
    """Three layers, one of them frozen in part, and a parameter that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        self.norm = nn.BatchNorm1d(8)
        self.idle = nn.Parameter(torch.ones(2))
        self.layers[2].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3]:
            x = layer(x)
        out: Tensor = self.layers[3:](self.norm(x))
        return out


def mean(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(outputs, batch[1])


def counted(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    terms = functional.cross_entropy(outputs, batch[1], ignore_index=2, reduction="none")
    return terms.sum(), (batch[1] != 2).sum()


def batches(sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in sizes]


@pytest.fixture(scope="module")
def captured() -> dict[str, Captured]:
    return {f.__name__: capture(Small(), f, batches([4])[0]) for f in (mean, counted)}


SIZES = [8, 7, 8, 6]


def by_reference(cap: Captured, depth: int, micro_batches: int, rule: str, **options: Any) -> ReferenceResult:
    ops, cuts = cap.graph.ops, cap.graph.cuts
    ends = [*(cuts[k * len(cuts) // depth] for k in range(1, depth)), len(ops) - 1]
    specs = partition(cap.graph, [[ops[end].name] for end in ends]).stages
    stages = [ReferenceStage([cap.stage(spec)], spec.parameters, spec.buffers) for spec in specs]
    stream = []
    for t, batch in enumerate(batches(SIZES)):
        parts = split(batch, micro_batches)
        for i, part in enumerate(parts):
            numbers = len(stream), t, i, len(parts), num_rows(part), num_rows(batch), 0, int(t == 3), 0
            stream.append([(MicroBatch(*numbers), cap.values(part))])
    model = Small()
    named, buffers = list(model.named_parameters()), dict(model.named_buffers())
    mode, labels = options.get("mode", "stash"), cap.graph.labels_per_row
    setting = Setting(rule_named(rule), "none", mode, labels_per_row=labels)
    return run_reference(
        setting, stages, named, [buffers], stream, options["optimizer"], options["scheduler"], lambda g: RngKey(0, g)
    )


def by_hand(loss: Any, micro_batches: int, optimizer: Any, scheduler: Any) -> tuple[Any, list[float], list[float]]:
    """The loop that everybody writes."""
    model = Small()
    opt = optimizer(list(model.named_parameters()))
    schedule, losses, counts = scheduler and scheduler(opt), [], []
    for batch in batches(SIZES):
        opt.zero_grad()
        total = 0.0
        for part in split(batch, micro_batches):
            made = loss(model(part[0]), part)
            value, count = made if isinstance(made, tuple) else (made, None)
            (value * (num_rows(part) / num_rows(batch)) if count is None else value).backward()
            losses.append(value.item())
            total += 0.0 if count is None else count.item()
            counts += [] if count is None else [float(count)]
        for parameter in model.parameters():
            if total and parameter.grad is not None:
                parameter.grad = parameter.grad / total
        opt.step()
        if schedule is not None:
            schedule.step()
    state = {n: opt.state[p] for n, p in model.named_parameters() if opt.state.get(p)}
    return (dict(model.named_parameters()), dict(model.named_buffers()), state), losses, counts


def sgdm(named: Named) -> SGD:
    return SGD(named, lr=0.1, momentum=0.9, weight_decay=0.01)


def adamw(named: Named) -> AdamW:
    """Two groups, as people make them."""
    matrices, vectors = ([p for _, p in named if (p.ndim > 1) == wide] for wide in (True, False))
    return AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 0.02}], lr=0.01)


SYNCHRONOUS = [  # D, M, rule, mode, optimizer, scheduler
    (1, 1, "pipedream", "stash", sgdm, None),
    (1, 1, "gpipe", "stash", adamw, lambda opt: StepLR(opt, 1, 0.5)),
    (3, 2, "gpipe", "recompute", sgdm, lambda opt: StepLR(opt, 2, 0.5)),
    (3, 3, "1f1b", "mixed", adamw, None),
]


@pytest.mark.parametrize("loss", [mean, counted])
@pytest.mark.parametrize("case", SYNCHRONOUS)
def test_a_synchronous_rule_equals_plain_pytorch_bit_for_bit(captured: Any, loss: Any, case: Any) -> None:
    """Weights, BatchNorm's statistics, optimizer state, losses and counts; a frozen and an unused parameter stay."""
    depth, micro_batches, rule, mode, optimizer, scheduler = case
    options = {"mode": mode, "optimizer": optimizer, "scheduler": scheduler}
    got = by_reference(captured[loss.__name__], depth, micro_batches, rule, **options)
    (parameters, buffers, state), losses, counts = by_hand(loss, micro_batches, optimizer, scheduler)
    assert list(got.losses.values()) == losses
    assert list(got.counts.values()) == counts
    assert got.parameters.keys() == parameters.keys()
    assert [n for n in parameters if not torch.equal(got.parameters[n], parameters[n])] == []
    assert [n for n in buffers if not torch.equal(got.buffers[0][n], buffers[n])] == []
    assert got.optimizer_state.keys() == state.keys()
    assert "idle" not in state
    for name, entries in state.items():
        assert [key for key in entries if not torch.equal(got.optimizer_state[name][key], entries[key])] == []
