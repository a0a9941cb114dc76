"""Optimizers and schedules as data: the same steps to the last bit, on any part of the parameters; else refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as schedules

import roundelay
from roundelay.errors import JobError, PlanError, RoundelayError
from roundelay.job import Named, OptimizerFactory, SchedulerFactory
from roundelay.runtime.optimizer.plain_optimizer import (
    CLASSES,
    PlainOptimizer,
    decoded,
    encoded,
    optimizer_of,
    plain_optimizer,
    scheduler_of,
)
from roundelay.runtime.optimizer.stage_optimizer import (
    RateTable,
    build_optimizer,
    build_scheduler,
    narrow,
    no_group_empty,
)
from tests.api.jobs import adam, make, mlp

UPDATES = 12
NOTES = {"params", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
"""What schedulers note in groups for themselves."""


def named(seed: int = 0) -> Named:
    """The parameters of a small model."""
    return list(mlp(seed).named_parameters())


def by_name(kind: Any, **options: Any) -> OptimizerFactory:
    """Biases have no weight decay, and another rate."""

    def made(pairs: Named) -> torch.optim.Optimizer:
        biases, weights = ([(n, p) for n, p in pairs if n.endswith("bias") is yes] for yes in (True, False))
        return kind([{"params": weights, "lr": 0.02}, {"params": biases, "weight_decay": 0.0}], **options)  # type: ignore[no-any-return]

    return made


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    """Linear warm-up, then a cosine, one for each group."""
    cosine = [lambda u: min((u + 1) / 4, 0.5 + 0.5 * math.cos(u / 9)), lambda u: 0.9**u]
    return schedules.LambdaLR(optimizer, [cosine[i % 2] for i in range(len(optimizer.param_groups))])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    warm = schedules.LinearLR(optimizer, 0.1, total_iters=3)
    return schedules.SequentialLR(optimizer, [warm, schedules.CosineAnnealingLR(optimizer, 7)], [3])


SCHEDULES: list[SchedulerFactory | None] = [
    *(None, warm_up, chained),
    *(partial(schedules.OneCycleLR, max_lr=0.1, total_steps=UPDATES + 1), partial(schedules.ConstantLR, factor=1.0)),
]
OPTIMIZERS: list[OptimizerFactory] = [
    *(by_name(torch.optim.AdamW, weight_decay=0.1), by_name(torch.optim.SGD, momentum=0.9, weight_decay=0.01)),
    *(partial(torch.optim.AdamW, lr=3e-3), adam),
    lambda pairs: torch.optim.SGD([p for _, p in pairs], lr=0.05, momentum=0.9, nesterov=True),
    lambda pairs: torch.optim.Adam([{"params": [p], "lr": 0.01 * (i + 1)} for i, (_, p) in enumerate(pairs)]),
]


def travelled(make_one: OptimizerFactory, schedule: SchedulerFactory | None) -> PlainOptimizer:
    """An optimizer that has been bytes."""
    data = encoded(plain_optimizer(make_one, schedule, named(), UPDATES))
    assert decoded(data) == plain_optimizer(make_one, schedule, named(), UPDATES)
    return decoded(data)


def trained(
    make_one: OptimizerFactory, schedule: SchedulerFactory | None, pairs: Named, own: set[str], updates: int = UPDATES
) -> dict[str, Any]:
    """Weights and state after some updates of some of the parameters, as a stage makes them."""
    optimizer = build_optimizer(make_one, pairs)
    narrow(optimizer, {n: p for n, p in pairs if n in own}, pairs)
    scheduler = build_scheduler(schedule, optimizer)
    seen: list[Any] = []
    for update in range(updates):
        for name, parameter in pairs:
            if name in own:
                draw = torch.Generator().manual_seed(1000 * update + sum(map(ord, name)))
                parameter.grad = torch.randn(parameter.shape, generator=draw)
        seen.append([{k: v for k, v in g.items() if k not in NOTES} for g in optimizer.param_groups])
        with no_group_empty(optimizer):
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
    states = {n: dict(optimizer.state.get(p, {})) for n, p in pairs if n in own}
    return {"weights": {n: p.detach() for n, p in pairs if n in own}, "states": states, "options": seen}


def assert_equal(one: Any, two: Any) -> None:
    """Both are the same, tensors bit for bit, numbers in their type too."""
    assert type(one) is type(two)
    if isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one:
            assert_equal(one[key], two[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_equal(a, b)
    else:
        assert torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make_one", OPTIMIZERS)
def test_it_steps_as_the_jobs_own_on_all_parameters_and_on_those_of_a_stage(
    make_one: OptimizerFactory, schedule: SchedulerFactory | None
) -> None:
    plain = travelled(make_one, schedule)
    again, table = optimizer_of(plain), scheduler_of(plain)
    assert (table is None) == (schedule is None)
    names = [name for name, _ in named()]
    for own in ({*names}, {*names[:3]}, {names[-1]}, set[str]()):
        wanted = trained(make_one, schedule, named(), own)
        assert_equal(trained(again, table, named(), own), wanted)
        alone = [(n, p) for n, p in named() if n in own]  # a machine that has one stage has no others
        found = trained(again, table, alone, own)
        for options in (of for every in (found["options"], wanted["options"]) for step in every for of in step):
            options.pop("param_names", None)
        assert_equal(found, wanted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rates_ahead_are_the_jobs(schedule: SchedulerFactory | None) -> None:
    plain = travelled(OPTIMIZERS[0], schedule)
    own, again = (RateTable(a, b, named()) for a, b in (
        (OPTIMIZERS[0], schedule), (optimizer_of(plain), scheduler_of(plain))))  # fmt: skip
    assert [again.at(update) for update in range(UPDATES)] == [own.at(update) for update in range(UPDATES)]


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_the_list_travels_with_its_state(name: str) -> None:
    options = {"Adagrad": {"initial_accumulator_value": 0.3}, "RMSprop": {"momentum": 0.5, "centered": True}}
    make_one = partial(CLASSES[name], lr=0.01, **options.get(name, {}))
    plain = travelled(make_one, warm_up)
    everything = {n for n, _ in named()}
    wanted = trained(make_one, warm_up, named(), everything)
    assert_equal(trained(optimizer_of(plain), scheduler_of(plain), named(), everything), wanted)


def test_a_table_is_as_short_as_the_schedule_allows_and_its_last_rate_holds() -> None:
    constant = plain_optimizer(OPTIMIZERS[2], partial(schedules.ConstantLR, factor=1.0), named(), 10_000)
    assert len(encoded(constant)) < 1200
    stepwise = plain_optimizer(OPTIMIZERS[0], partial(schedules.StepLR, step_size=4, gamma=0.5), named(), UPDATES)
    assert [len(steps.starts) for steps in stepwise.steps] == [3, 3]
    assert stepwise.steps[0].starts == (0, 4, 8)
    alike = plain_optimizer(OPTIMIZERS[5], partial(schedules.LambdaLR, lr_lambda=lambda u: 0.0), named(), UPDATES)
    assert len(alike.steps) == 1
    assert stepwise.steps[0].at(10**6) == stepwise.steps[0].values[-1]


def test_a_run_with_it_has_the_weights_of_the_jobs_own() -> None:
    def job() -> roundelay.Job:
        return make(mlp(), optimizer=OPTIMIZERS[0], scheduler=warm_up)

    plain = travelled(OPTIMIZERS[0], warm_up)
    sent = replace(job(), optimizer=optimizer_of(plain), scheduler=scheduler_of(plain))
    runs = []
    for one in (job(), sent):
        roundelay.train(one, workers=2, rule="pipeoptim", micro_batches=2, steps=UPDATES, transport="memory")
        runs.append({n: p.detach().clone() for n, p in one.model.named_parameters()})
    assert_equal(*runs)
    assert not torch.equal(runs[0]["0.weight"], mlp().get_parameter("0.weight"))


class Mine(torch.optim.SGD):
    """A class of the person's."""


class Wrapping(torch.optim.AdamW):
    """A class of the person's under the name of torch's."""


Wrapping.__name__ = "AdamW"


def with_hook(pairs: Named) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(pairs, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def with_attribute(pairs: Named) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(pairs, lr=0.1)
    optimizer.inner = torch.optim.SGD(pairs, lr=0.1)  # type: ignore[attr-defined]
    return optimizer


def with_state(pairs: Named) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(pairs, lr=0.1, momentum=0.9)
    optimizer.state[pairs[0][1]]["momentum_buffer"] = torch.ones_like(pairs[0][1])
    return optimizer


def with_step(pairs: Named) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(pairs, lr=0.1)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    return optimizer


@pytest.mark.parametrize(
    ("make_one", "schedule", "words"),
    [
        (partial(Mine, lr=0.1), None, "Mine: got a class of tests.runtime.test_plain_optimizer"),
        (partial(Wrapping, lr=0.1), None, "AdamW: got a class of tests.runtime.test_plain_optimizer"),
        (with_hook, None, "SGD: got hooks on its steps"),
        (with_attribute, None, "SGD: got attribute 'inner'"),
        (with_state, None, "SGD: got a state of '0.weight' before the first step"),
        (with_step, None, "SGD: got a step of its own"),
        (partial(torch.optim.AdamW, lr=torch.tensor(0.1)), None, "got option 'lr' of type Tensor"),
        (partial(torch.optim.SGD, lr=0.1), schedules.ReduceLROnPlateau, "got a ReduceLROnPlateau"),
    ],
)
def test_what_cannot_travel_is_refused_by_name(make_one: Any, schedule: Any, words: str) -> None:
    with pytest.raises(JobError) as raised:
        plain_optimizer(make_one, schedule, named(), UPDATES)
    assert words in str(raised.value)
    assert "machines that join get data, and no Python" in str(raised.value)


def sample() -> bytes:
    return encoded(plain_optimizer(OPTIMIZERS[0], warm_up, named(), 3))


def changed(change: Callable[[Any], None]) -> bytes:
    raw = msgspec.msgpack.decode(sample())
    change(raw)
    return msgspec.msgpack.encode(raw)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw.update(name="LBFGS"), "'LBFGS'"),
        (lambda raw: raw.update(name="os.system"), "'os.system'"),
        (lambda raw: raw.update(more=1), "unknown field `more`"),
        (lambda raw: raw.update(groups=[]), "no groups"),
        (lambda raw: raw["groups"][0]["options"].update(params=1), "parameters among their options"),
        (lambda raw: raw["scheduled"][0].update(group=9), "a schedule of group 9"),
        (lambda raw: raw["scheduled"][0].update(steps=9), "a schedule of group 0"),
        (lambda raw: raw["scheduled"][0].update(option="step"), "a schedule of 'step'"),
        (lambda raw: raw["steps"][0].update(starts=[2, 1, 3]), "a schedule out of order"),
        (lambda raw: raw["steps"][0].update(values=[1.0]), "a schedule out of order"),
    ],
)
def test_bytes_that_are_no_optimizer_are_refused(change: Callable[[Any], None], words: str) -> None:
    with pytest.raises(PlanError) as raised:
        decoded(changed(change))
    assert words in str(raised.value)


@given(st.data())
def test_mutated_bytes_make_an_optimizer_or_are_refused(data: st.DataObject) -> None:
    own = bytearray(sample())
    for _ in range(data.draw(st.integers(1, 4))):
        own[data.draw(st.integers(0, len(own) - 1))] = data.draw(st.integers(0, 255))
    try:
        plain = decoded(bytes(own))
        optimizer = build_optimizer(optimizer_of(plain), named())
        build_scheduler(scheduler_of(plain), optimizer)
    except RoundelayError:
        return
    assert type(optimizer).__name__ in CLASSES


def test_a_model_without_parameters_of_the_optimizer_has_one_all_the_same() -> None:
    plain = travelled(OPTIMIZERS[0], warm_up)
    optimizer = build_optimizer(optimizer_of(plain), [("other", nn.Parameter(torch.ones(2)))])
    assert [group["params"] for group in optimizer.param_groups] == [[], []]
    assert not optimizer.state
