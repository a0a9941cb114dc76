"""Half precision with a loss scale: exact under every kind of rule, carried by the micro-batch, and never ignored."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from roundelay.actor.machine import Run
from roundelay.errors import DivergedError, PlanError
from roundelay.ir.loss_scale import LossScale
from roundelay.ir.micro_batch import MicroBatch
from roundelay.ir.plan import Plan
from roundelay.job import Named
from roundelay.lower.channels import channels_of
from roundelay.lower.reading import read
from roundelay.planner.prove_plan import prove
from roundelay.runtime.gradients import Gradients
from roundelay.runtime.stage_state import Stage
from roundelay.session.training import Length, Session, Trained
from tests.equivalence.cells import VARIANTS, Bench, bench
from tests.equivalence.test_clipping import used_norms
from tests.lower.plans import plan_of
from tests.zoo import MODELS, Batch

MOMENTUM: Callable[[Named], Optimizer] = partial(SGD, lr=0.05, momentum=0.9)
ADAM: Callable[[Named], Optimizer] = partial(Adam, lr=2e-3)
CELLS = [
    ("mlp", "1f1b", "memory", MOMENTUM),
    ("batchnorm", "pipeoptim improved recompute", "shm", ADAM),
    ("skip", "pipedream", "gloo", MOMENTUM),
    ("tied_head", "cdp-v2", "memory", ADAM),
    ("token_mean", "pipeoptim improved mixed", "memory", MOMENTUM),
    ("gpt2", "pipedream", "memory", ADAM),
    ("frozen", "gpipe", "shm", ADAM),
    ("mlp", "spectrain improved mixed", "memory", ADAM),
    ("tied_head", "zb-h1", "shm", MOMENTUM),
    ("batchnorm", "zb-h1 recompute", "memory", ADAM),
    ("token_mean", "zb-v mixed", "memory", MOMENTUM),
    ("gpt2", "zb-v", "gloo", ADAM),
]


def half(plan: Plan, scale: str, clip: str = "none") -> Plan:
    """The plan in half precision."""
    return replace(plan, precision="fp16", loss_scale=LossScale.parse(scale), clip=clip)


@pytest.mark.parametrize(("model", "name", "transport", "optimizer"), CELLS)
def test_a_run_in_half_precision_equals_its_reference(
    model: str, name: str, transport: str, optimizer: Callable[[Named], Optimizer]
) -> None:
    place = bench(model)
    found = place.verify(half(place.plan(VARIANTS[name], 3, 3, transport), "dynamic"), place.job(optimizer))
    assert found.equal, found.difference


OVERFLOWING = [
    ("1f1b", "none"),
    ("1f1b", "global:0.05"),
    ("gpipe", "previous:0.05"),
    ("pipedream", "none"),
    ("pipedream", "previous:0.05"),
    ("cdp-v2", "stage:0.05"),
    ("pipeoptim improved stash", "none"),
    ("pipeoptim paper mixed", "none"),
    ("pipeoptim released-code recompute", "previous:0.05"),
    ("lookahead mixed", "none"),
    ("rehearse mixed", "stage:0.05"),
    ("async recompute", "none"),
    ("zb-h1", "global:0.05"),
    ("zb-h1 mixed", "previous:0.05"),
    ("zb-v", "none"),
    ("zb-v recompute", "stage:0.05"),
]


@pytest.mark.parametrize(("name", "clip"), OVERFLOWING)
@pytest.mark.parametrize("sizes", [(3, 1), (3, 3)])
def test_an_overflow_is_skipped_and_halved_as_the_reference_does(name: str, clip: str, sizes: tuple[int, int]) -> None:
    """From a scale that is far too large, with rates that change at every update, a skipped one included."""
    if name == "cdp-v2":
        sizes = (3, 3)
    place = bench("mlp")
    plan = half(place.plan(VARIANTS[name], *sizes), "dynamic:1048576:2", clip)
    rates = {"scheduler": lambda optimizer: LambdaLR(optimizer, lambda update: 0.9**update)}
    job = place.job(MOMENTUM, batches=lambda epoch: place.batches * 4, **rates)
    found = place.verify(plan, job, steps=20)
    assert found.equal, found.difference
    assert 0 < max(worker["skipped"] for worker in found.workers.values()) < 20


@functools.cache
def small(factor: float = 1.0, width: float = 1.0) -> Bench:
    """Three layers; a loss, and inputs, multiplied by something, for which the first layer makes up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    with torch.no_grad():
        next(model.parameters()).div_(width)
    data: list[Batch] = [(torch.randn(4, 6) * width, torch.randint(0, 3, (4,))) for _ in range(24)]
    entry = replace(
        MODELS["mlp"],
        loss=lambda outputs, batch: functional.cross_entropy(outputs, batch[1]) * factor,
        inputs=None,
    )
    return Bench(entry, model, data)


def trained(place: Bench, plan: Plan, steps: int, lr: float = 0.1) -> Trained:
    """A run from the first weights on."""
    place.restore()
    session = Session(place.job(partial(SGD, lr=lr, momentum=0.9)), place.captured, plan, 0, Length(steps=steps))
    return session.run(notify=lambda event: None)


def planned(place: Bench, rule: str, scale: str, micro_batches: int = 1, clip: str = "none") -> Plan:
    """A plan of three stages in half precision."""
    name = {"pipeoptim": "pipeoptim improved recompute"}.get(rule, rule)
    return half(place.plan(VARIANTS[name], 3, micro_batches), scale, clip)


@pytest.mark.parametrize("rule", ["gpipe", "1f1b", "zb-h1", "zb-v"])
def test_it_is_plain_pytorch_with_a_grad_scaler(rule: str) -> None:
    place = small()
    done = trained(place, planned(place, rule, "dynamic:1073741824:3"), 24)
    place.restore()
    plain = copy.deepcopy(place.model)
    optimizer = SGD(plain.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=3)
    losses, scales = [], []
    for x, y in place.batches:
        with torch.autocast("cpu", torch.float16):
            loss = functional.cross_entropy(plain(x), y)
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert [update.loss for update in done.updates] == losses
    assert [update.loss_scale for update in done.updates] == scales
    assert {True, False} <= {later > scale for scale, later in pairwise(scales) if later != scale}  # both ways
    for name, parameter in plain.named_parameters():
        assert torch.equal(done.snapshot.parameters[name], parameter.detach()), name


@pytest.mark.parametrize("rule", ["1f1b", "zb-v", "pipedream"])
def test_small_gradients_vanish_without_a_scale_and_last_with_one(rule: str) -> None:
    """A loss so small that half precision has no gradient for it, and a rate that makes up for it."""
    place, usual = small(factor=2.0**-25), small()
    full = replace(planned(usual, rule, "none"), precision="fp32")
    wanted = trained(usual, full, 12).snapshot.parameters
    without, made = (trained(place, planned(place, rule, n), 12, 0.1 * 2.0**25) for n in ("1", "65536"))
    for name, weight in place.state.items():
        assert torch.equal(without.snapshot.parameters[name], weight)
        assert (made.snapshot.parameters[name] - weight).norm() > 0.01
        torch.testing.assert_close(made.snapshot.parameters[name], wanted[name], atol=0.02, rtol=0.02)


@pytest.mark.parametrize("rule", ["1f1b", "zb-h1", "pipedream", "pipeoptim"])
def test_as_long_as_nothing_over_or_underflows_a_scale_changes_no_bit(rule: str) -> None:
    place = small()
    clip = "previous:0.1"
    made = [trained(place, planned(place, rule, n, 2, clip), 12) for n in ("4096", "8192", "dynamic:16384:5")]
    assert not any(worker["skipped"] for one in made for worker in one.workers.values())
    for name, weight in made[0].snapshot.parameters.items():
        assert torch.equal(weight, made[1].snapshot.parameters[name])
        assert torch.equal(weight, made[2].snapshot.parameters[name])


def test_norms_are_those_of_unscaled_gradients() -> None:
    place = small()
    norms = []
    for scale in ("4096", "8192"):
        place.restore()
        plan = planned(place, "1f1b", scale, clip="global:0.1")
        norms.append(used_norms(Session(place.job(MOMENTUM), place.captured, plan, 0, Length(steps=4))))
    assert norms[0] == norms[1]
    assert all(0.01 < norm < 10 for norm in norms[0][0] if norm is not None)
    assert None not in norms[0][0]


def test_under_a_rule_that_flushes_all_stages_skip_and_under_others_each_for_itself() -> None:
    """Large inputs make the first layer's gradient overflow where the others' do not."""
    place = small(width=2000.0)
    skipped = {}
    for rule in ("1f1b", "zb-h1", "pipedream"):
        found = place.verify(planned(place, rule, "8192"), place.job(partial(SGD, lr=1e-6)), steps=6)
        assert found.equal, found.difference
        skipped[rule] = [found.workers[k]["skipped"] for k in range(3)]
    assert skipped["pipedream"] == [6, 0, 0]
    assert skipped["1f1b"] == skipped["zb-h1"] == [6, 6, 6]


def test_each_micro_batch_is_divided_by_its_own_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale doubles behind every batch that carried one scale alone, so others carry two."""
    place = small()
    plan = planned(place, "pipedream", "dynamic:256:1", 3)
    assert place.verify(plan, steps=12).equal
    carried = trained(place, plan, 12).micro_scales
    assert any(carried[3 * t] != carried[3 * t + 2] for t in range(12))
    newest: dict[int, float] = {}
    forward, backward = Stage.forward, Stage.backward

    def noting(stage: Stage, run: Run, header: MicroBatch, *rest: Any) -> Any:
        newest[id(stage)] = header.loss_scale
        return forward(stage, run, header, *rest)

    def last(stage: Stage, run: Run, grads: Any, scale: float) -> Any:
        return backward(stage, run, grads, newest[id(stage)])

    monkeypatch.setattr(Stage, "forward", noting)
    monkeypatch.setattr(Stage, "backward", last)
    assert not place.verify(plan, steps=12).equal


def test_a_run_that_does_not_skip_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    place = small()
    plan = planned(place, "1f1b", "dynamic:1073741824")
    assert place.verify(plan, steps=4).equal
    monkeypatch.setattr(Gradients, "drop", lambda gradients: None)
    with pytest.raises(DivergedError, match="the loss of stage 2"):  # weights are no numbers any more
        place.verify(plan, steps=4)


@pytest.mark.parametrize("rule", ["1f1b", "pipedream"])
def test_gradients_that_no_scale_makes_finite_end_the_run(rule: str) -> None:
    def bad(outputs: Tensor, batch: Any) -> Tensor:
        return (outputs.float() * 0.0).sqrt().sum() + outputs.float().mean()

    usual = small()
    place = Bench(replace(usual.entry, loss=bad), usual.model, usual.batches * 4)
    with pytest.raises(DivergedError, match=r"the gradients of batch .*scaled down to"):
        trained(place, planned(place, rule, "dynamic:1"), 96)


def test_only_rules_that_flush_wait_for_the_news() -> None:
    kinds = {
        rule: {channel.kind for channel in channels_of(read(half(plan_of(rule, 3, 2), "dynamic")))}
        for rule in ("gpipe", "1f1b", "zb-h1", "pipedream", "pipeoptim")
    }
    assert [rule for rule, found in kinds.items() if "grad-norm" in found] == ["gpipe", "1f1b", "zb-h1"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"precision": "fp16"}, "loss_scale of the plan: got none with precision fp16"),
        ({"precision": "bf16", "loss_scale": "1024"}, "loss_scale of the plan: got 1024 with precision bf16"),
        ({"loss_scale": "dynamic"}, "loss_scale of the plan: got dynamic with precision fp32"),
        ({"precision": "fp16", "loss_scale": "1000"}, "loss_scale of the plan: got '1000'"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        prove(plan_of("1f1b", 2, 2, **changes))
