"""A lower precision: what is cast, what is not, and that every mode and rule still computes what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

import roundelay
from roundelay.errors import CaptureError, PlanError
from roundelay.frontend import RngKey
from roundelay.ir.clip import Clip
from roundelay.job import Named
from roundelay.lower.partition import partition
from roundelay.planner.prove_plan import prove
from roundelay.session.training import Length, Session
from tests.equivalence.cells import VARIANTS, bench
from tests.lower.plans import plan_of

MOMENTUM: Callable[[Named], Optimizer] = partial(SGD, lr=0.05, momentum=0.9)
CELLS = [
    ("mlp", "1f1b", "memory"),
    ("batchnorm", "pipeoptim improved recompute", "memory"),
    ("gpt2", "async mixed", "shm"),
    ("skip", "spectrain improved mixed", "gloo"),
    ("tied_head", "pipedream", "shm"),
    ("token_mean", "lookahead mixed", "memory"),
    ("lstm", "pipeoptim paper mixed", "memory"),
    ("gpt2", "zb-h1", "memory"),
    ("batchnorm", "zb-h1 recompute", "shm"),
    ("tied_head", "zb-v mixed", "gloo"),
    ("skip", "zb-v", "memory"),
]


@pytest.mark.parametrize(("model", "name", "transport"), CELLS)
def test_a_run_in_bfloat16_equals_its_reference(model: str, name: str, transport: str) -> None:
    place = bench(model)
    plan = replace(place.plan(VARIANTS[name], 3, 2, transport), precision="bf16", clip=Clip.parse("previous:1"))
    found = place.verify(plan, place.job(MOMENTUM))
    assert found.equal, found.difference


def small() -> roundelay.Job:
    """Two products with a normalisation between them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    data = [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(4)]
    return roundelay.Job(
        model=model,
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]),
        batches=lambda epoch: data,
        optimizer=partial(SGD, lr=0.1),
    )


@pytest.mark.parametrize("rule", ["gpipe", "zb-h1"])
def test_it_is_what_plain_pytorch_computes_under_autocast(rule: str) -> None:
    job = small()
    plain = small().model
    plan = roundelay.plan(job, workers=3, rule=rule, micro_batches=1, precision="bf16", cuts="equal")
    done = roundelay.train(job, plan=plan, steps=4)
    optimizer = SGD(plain.parameters(), lr=0.1)
    losses = []
    for x, y in job.batches(0):
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(plain(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert [update.loss for update in done.updates] == losses
    for name, parameter in plain.named_parameters():
        assert parameter.dtype == done.snapshot.parameters[name].dtype == torch.float32
        assert torch.equal(done.snapshot.parameters[name], parameter.detach())


def test_messages_are_counted_as_they_are_and_the_optimizer_stays_in_single_precision() -> None:
    job = small()
    captured = roundelay.capture(job)
    plans = [
        roundelay.plan(job, captured=captured, rule="1f1b", workers=2, precision=p, cuts="linear")
        for p in ("fp32", "bf16")
    ]
    full, half = (made.edges[0] for made in plans)
    assert (full.forward_bytes, half.forward_bytes) == (8 * 4 + 8, 8 * 2 + 8)  # a row of eight, and its label
    assert (full.backward_bytes, half.backward_bytes) == (8 * 4, 8 * 2)
    assert plans[1].stages[0].tape_bytes < plans[0].stages[0].tape_bytes
    session = Session(replace(job, optimizer=MOMENTUM), captured, plans[1], 0, Length(steps=2))
    trained = session.run(notify=lambda event: None)
    received = trained.workers[1]["bytes_received"]
    assert sum(received.values()) == 2 * 4 * half.forward_bytes
    kept = [v for state in trained.snapshot.optimizer.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert [tensor.dtype for tensor in kept] == [torch.float32] * 6


def backward(mode: Any, then: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of the whole model as one stage in bfloat16, with weights ``then`` at the backward."""
    job = small()
    captured = roundelay.capture(job).lowering("bf16")
    stage = captured.stage(partition(captured.graph, [[captured.graph.ops[-1].name]]).stages[0])
    first = {n: p.detach() for n, p in job.model.named_parameters()}
    batch: Any = next(iter(job.batches(0)))
    outputs, tape = stage.forward(first, {}, captured.values(batch), RngKey(0, 0), mode=mode)
    return stage.backward(tape, {"loss": torch.ones_like(outputs["loss"])}, then)[1]


def test_mixed_reads_the_weights_of_the_backward_through_their_casts() -> None:
    """The first layer's gradient goes through the last one's weight, of which autocast has saved a copy."""
    now = {n: p.detach() for n, p in small().model.named_parameters()}
    then = now | {"2.weight": -now["2.weight"]}
    forwards, others = backward("mixed", now), backward("mixed", then)
    assert all(torch.equal(forwards[n], g) for n, g in backward("stash", now).items())
    assert all(torch.equal(forwards[n], g) for n, g in backward("stash", then).items())
    assert torch.equal(others["2.weight"], forwards["2.weight"])  # of activations alone
    assert torch.equal(others["0.weight"], -forwards["0.weight"])
    assert forwards["0.weight"].abs().sum() > 0


def test_a_count_is_not_rounded() -> None:
    """A loss in the lower precision is summed in single precision, and so is what it counts."""
    torch.manual_seed(0)
    data = [(torch.randn(257, 6), torch.zeros(257))]
    job = roundelay.Job(
        model=nn.Linear(6, 1),
        loss=lambda outputs, batch: (outputs.sum(), torch.tensor(len(outputs))),
        batches=lambda epoch: data,
        optimizer=partial(SGD, lr=0.1),
    )
    plan = roundelay.plan(job, workers=1, rule="1f1b", micro_batches=1, precision="bf16")
    done = roundelay.train(job, plan=plan, steps=1)
    assert [count for _, count in done.micro_losses.values()] == [257.0]


class Fills(nn.Module):
    """Writes a product into a tensor of single precision, which autocast does not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of six to rows of three."""
        made = self.layer(x)
        return torch.zeros(made.shape).masked_scatter(made > 0, made)


def test_a_model_that_autocast_cannot_compute_is_refused_in_words() -> None:
    job = replace(small(), model=Fills())
    roundelay.plan(job, workers=1, rule="1f1b")
    with pytest.raises(CaptureError, match=r"the model in bf16: got RuntimeError.*Leave --precision out"):
        roundelay.plan(job, workers=1, rule="1f1b", precision="bf16")


def test_a_precision_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(PlanError, match="precision of the plan: got 'fp8'"):
        prove(plan_of("1f1b", 2, 2, precision="fp8"))
    with pytest.raises(PlanError, match=r"precision of the plan: got bf16 with compile = true and backward mode mixed"):
        prove(plan_of("pipeoptim", 2, 2, precision="bf16", compile=True, backward="mixed"))
