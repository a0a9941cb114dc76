"""Replicas of the pipeline: under every rule, whatever the data, they compute what the one-process reference does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.optimizer import register_optimizer_step_pre_hook

from roundelay.errors import PlanError, UsageError
from roundelay.ir.exchange import Phase
from roundelay.ir.plan import Plan
from roundelay.ir.rule import rules
from roundelay.lower.channels import channels_of
from roundelay.lower.reading import read
from roundelay.proof.tamper_ways import EXCHANGE_WAYS, WAYS
from roundelay.session.training import Length, Session, Trained
from tests.equivalence.cells import VARIANTS, Bench, allowed, bench
from tests.zoo import ZOO, Batch, Entry

BY_RULE = {variant.rule: name for name, variant in VARIANTS.items()}
RULES = [rule.name for rule in rules() if rule.name in BY_RULE]
MODELS = ("mlp", "batchnorm", "tied_head", "skip", "llama", "token_mean")
EDGES = [
    ("1f1b", "memory"),
    ("pipeoptim improved mixed", "shm"),
    ("pipedream", "gloo"),
    ("zb-v", "shm"),
    ("cdp-v2", "gloo"),
]


def plan_of(
    place: Bench, name: str, stages: int, micro_batches: int, replicas: int, transport: str = "memory", **fields: Any
) -> Plan:
    """A plan of a variant with so many replicas, as read from a file."""
    variant = VARIANTS[name]
    plan = place.plan(variant, stages, allowed(variant, stages, micro_batches), transport)
    return Plan.parse(replace(place.replicated(plan, replicas), **fields).text())


def held(place: Bench, plan: Plan, **options: Any) -> None:
    found = place.verify(plan, **options)
    assert found.equal, found.difference


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_computes_what_its_reference_does(rule: str, replicas: int) -> None:
    place = bench(MODELS[(RULES.index(rule) + replicas) % len(MODELS)])
    held(place, plan_of(place, BY_RULE[rule], 2, 2, replicas))


@pytest.mark.parametrize(("name", "transport"), EDGES)
def test_it_does_between_processes(name: str, transport: str) -> None:
    place = bench("batchnorm")
    held(place, plan_of(place, name, 2, 1, 2, transport))


class Decaying(SGD):
    """Writes to gradients, as optimizers do that clip or centre them in their step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                parameter.grad.add_(parameter.detach(), alpha=0.1)
        return super().step(closure)


def _halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in (p for p in group["params"] if p.grad is not None):
            parameter.grad.mul_(0.5)


def _wrapped(named: Any) -> torch.optim.Optimizer:
    made = SGD(named, lr=0.05, momentum=0.9)
    step = made.step

    def halving(closure: Any = None) -> Any:
        _halve(made)
        return step(closure)

    made.step = halving  # type: ignore[method-assign]
    return made


def _followed(named: Any) -> torch.optim.Optimizer:
    made = AdamW(named, lr=0.01)
    made.register_step_post_hook(lambda optimizer, args, kwargs: optimizer.zero_grad(set_to_none=False))
    return made


WRITING: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "one's own": lambda named: Decaying(named, lr=0.05),
    "foreach": lambda named: SGD(named, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "its step wrapped": _wrapped,
    "a hook behind its step": _followed,
}


@pytest.mark.parametrize("transport", ["memory", "shm"])
@pytest.mark.parametrize("optimizer", WRITING)
def test_an_optimizer_may_write_to_gradients_that_others_read(optimizer: str, transport: str) -> None:
    place = bench("mlp")
    plans = [plan_of(place, "1f1b", 1, 1, 2, transport), plan_of(place, "pipedream", 2, 1, 3, transport)]
    for layout, rule in (("dp", "cdp-v1"), ("dp", "cdp-v2"), ("dp", "1f1b"), ("mp", "cdp-v1"), ("zero", "cdp-v1")):
        plans.append(place.in_layout(layout, rule, 3, 2, transport))
    for plan in plans:
        found = place.verify(plan, place.job(WRITING[optimizer]))
        assert found.equal, (plan.layout, plan.rule, found.difference)


def test_a_hook_of_all_optimizers_may_write_to_them_too() -> None:
    hook = register_optimizer_step_pre_hook(_halve)
    try:
        place = bench("mlp")
        held(place, plan_of(place, "1f1b", 1, 1, 2, "shm"))
    finally:
        hook.remove()


@pytest.mark.parametrize("name", ["1f1b", "pipeoptim improved recompute", "zb-h1", "pipedream-2bw", "rehearse mixed"])
@pytest.mark.parametrize("rows", [(1, 3, 1, 2, 4), (4, 1, 1, 4, 1)])
def test_a_batch_with_fewer_rows_than_replicas_leaves_some_without_any(name: str, rows: tuple[int, ...]) -> None:
    entry = ZOO["mlp"]
    full = entry.batches(0, len(rows))
    short = [tuple(part[:count] for part in batch) for batch, count in zip(full, rows, strict=True)]
    place = Bench(entry, None, [tuple(part[:4] for part in full[0]), *short][1:])  # type: ignore[arg-type]
    for replicas in (2, 3):
        held(place, plan_of(place, name, 2, 2, replicas), steps=len(rows))


@pytest.mark.parametrize(
    "fields",
    [
        {"clip": "stage:0.1"},
        {"clip": "global:0.1"},
        {"clip": "previous:0.1"},
        {"ema": 0.9},
        {"precision": "fp16", "loss_scale": "dynamic:65536:2"},
        {"precision": "fp16", "loss_scale": "dynamic:65536:2", "clip": "global:0.1"},
        {"precision": "bf16"},
        {"recompute": ("all",)},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["1f1b", "pipeoptim improved stash"])
def test_whatever_else_the_plan_says(name: str, fields: dict[str, Any]) -> None:
    place = bench("mlp")
    if fields.get("clip", "").startswith("global") and name != "1f1b":
        fields = fields | {"clip": "previous:0.1"}
    if fields.get("recompute") and name != "1f1b":
        fields = {}
    held(place, plan_of(place, name, 2, 2, 2, **fields))


class Partly(nn.Module):
    """Two heads of which the loss reads one, a frozen layer, and weights of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3, dtype=torch.float64)
        self.norm, self.lost = nn.BatchNorm1d(7), nn.Linear(7, 2)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(torch.tanh(self.frozen(torch.relu(self.first(x)))))
        return self.last(hidden.double()), self.lost(hidden).detach()


def _partly_loss(outputs: Any, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs[0], batch[1]) + 0.0 * outputs[1].sum()  # type: ignore[index]


def partly() -> Bench:
    torch.manual_seed(0)
    batches: list[Batch] = [(torch.randn(6, 5), torch.randint(3, (6,))) for _ in range(5)]
    entry = Entry("partly", lambda seed: Partly(), lambda *args, **more: batches, _partly_loss, buffers=True)
    return Bench(entry, Partly(), batches)


@pytest.mark.parametrize("stages", [1, 3])
def test_parameters_without_a_gradient_are_left_out_of_the_exchange(stages: int) -> None:
    place = partly()
    plan = plan_of(place, "1f1b", stages, 1, 2)
    assert {name for exchange in plan.exchanges for name in exchange.unused} == {"lost.weight", "lost.bias"}
    assert {"float64", "float32"} == {dtype for exchange in plan.exchanges for dtype in exchange.dtypes}
    held(place, plan)


def trained(place: Bench, plan: Plan, optimizer: Callable[..., Any], steps: int = 4) -> Trained:
    place.restore()
    session = Session(place.job(optimizer), place.captured, plan, 0, Length(steps=steps))
    return session.run(notify=lambda event: None)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.05, momentum=0.9), partial(AdamW, lr=1e-3)])
@pytest.mark.parametrize("model", ["mlp", "token_mean", "tied_head"])
def test_they_train_what_one_replica_with_as_many_micro_batches_trains(
    model: str, optimizer: Callable[..., Any], replicas: int
) -> None:
    """Dropout masks included: a micro-batch has the same number."""
    entry = ZOO[model]
    double = entry.build(0).double()
    batches = [_double(batch) for batch in entry.batches(0, 5)]
    place = Bench(entry, double, batches)
    one = trained(place, place.plan(VARIANTS["1f1b"], 2, 2 * replicas), optimizer)
    several = trained(place, plan_of(place, "1f1b", 2, 2, replicas), optimizer)
    assert sorted(several.micro_losses) == sorted(one.micro_losses)
    for number, (loss, count) in one.micro_losses.items():
        assert several.micro_losses[number] == pytest.approx((loss, count), rel=1e-10)
    for name, weight in one.snapshot.parameters.items():
        torch.testing.assert_close(several.snapshot.parameters[name], weight, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(several.updates, one.updates, strict=True):
        assert (ours.update, ours.rows, ours.loss) == (
            theirs.update,
            theirs.rows,
            pytest.approx(theirs.loss, rel=1e-10),
        )


def _double(batch: Batch) -> Batch:
    def of(part: torch.Tensor) -> torch.Tensor:
        return part.double() if part.is_floating_point() else part

    return {n: of(p) for n, p in batch.items()} if isinstance(batch, dict) else tuple(map(of, batch))


@pytest.mark.parametrize("transport", ["memory", "shm", "gloo"])
@pytest.mark.parametrize(("stages", "replicas"), [(1, 2), (2, 2), (1, 3)])
def test_every_worker_sends_the_bytes_that_the_plan_says(transport: str, stages: int, replicas: int) -> None:
    place, steps = bench("mlp"), 3
    plan = plan_of(place, "1f1b", stages, 1, replicas, transport)
    done = trained(place, plan, partial(SGD, lr=0.1), steps)
    planned = {exchange.stage: exchange for exchange in plan.exchanges}
    for channel in channels_of(read(plan)):
        if channel.kind != "weight-gradient":
            continue
        for position, port in enumerate(channel.sources):
            predicted = steps * sum(planned[port.stage].bytes_sent(replicas, position))
            assert done.workers[port.worker]["bytes_sent"][str(channel.id)] == predicted
    gradients = sum(p.numel() * p.element_size() for p in place.model.parameters() if p.requires_grad)
    total = sum(sum(e.bytes_sent(replicas, i)) for e in plan.exchanges for i in range(replicas))
    assert total == 2 * (replicas - 1) * (gradients + 8 * stages), "a ring's all-reduce, and a count for each stage"


@pytest.mark.parametrize("way", [*WAYS, *EXCHANGE_WAYS])
@pytest.mark.parametrize("name", ["1f1b", "pipeoptim improved stash", "zb-v"])
def test_tampering_with_one_replica_is_found(name: str, way: str) -> None:
    place = bench("mlp")
    found = place.verify(plan_of(place, name, 2, 2, 3), tamper=way)
    assert not found.equal
    assert "in replica " in found.difference


def test_without_replicas_no_exchange_can_be_tampered_with() -> None:
    place = bench("mlp")
    for way, replicas in (("box", 1), ("stale-shard", 1), ("exchange-order", 2)):
        with pytest.raises(UsageError, match=r"at least [23], whose tensors are summed"):
            place.verify(plan_of(place, "1f1b", 2, 2, replicas), tamper=way)


def _moved(plan: Plan) -> Plan:
    """The first stage's replicas on each other's workers."""
    first, *others = plan.stages
    return replace(plan, stages=(replace(first, workers=first.workers[::-1]), *others))


def test_stages_of_several_replicas_on_one_worker_are_refused() -> None:
    place = bench("mlp")
    with pytest.raises(PlanError, match="stages of several holders: stage 0 as holder 1, stage 3 as holder 0"):
        place.verify(_moved(plan_of(place, "zb-v", 4, 2, 2)))
    held(place, _moved(plan_of(place, "1f1b", 2, 2, 2)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: replace(plan, replicas=3), "3 names, one for each replica"),
        (
            lambda plan: replace(plan, exchanges=()),
            "got none; expected weight-gradient of stage 0 by .*, weight-gradient of stage 1",
        ),
        (
            lambda plan: replace(plan, exchanges=plan.exchanges[::-1]),
            "got weight-gradient of stage 1 by .*, weight-gradient",
        ),
        (
            lambda plan: replace(
                plan, exchanges=(replace(plan.exchanges[0], phases=(Phase.parse("all-gather(0)"),)), plan.exchanges[1])
            ),
            "reduce-scatter",
        ),
        (lambda plan: replace(plan, replicas=0), "at least 1"),
    ],
)
def test_a_plan_whose_replicas_do_not_fit_is_refused(change: Callable[[Plan], Plan], message: str) -> None:
    place = bench("mlp")
    plan = change(plan_of(place, "1f1b", 2, 2, 2))
    with pytest.raises(PlanError, match=message):
        place.verify(plan)
