"""What the papers' rules have in common, and where they differ: identities that hold to the bit."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from roundelay.actor.machine import Run
from roundelay.errors import PlanError
from roundelay.ir.micro_batch import MicroBatch, stream
from roundelay.ir.rule import register_rule, rule_named, rules
from roundelay.job import Named
from roundelay.lower.emit import emit
from roundelay.lower.reading import read
from roundelay.planner.prove_plan import prove
from roundelay.runtime import predicted_weights
from roundelay.runtime.handlers import Context, do_forward
from roundelay.session.training import Length, Session
from roundelay.simulator import simulate
from roundelay.weight_prediction import predict
from tests.equivalence.cells import VARIANTS, Bench, Variant, allowed, bench
from tests.equivalence.deep import DEEP, every_other_on_the_last, only_the_last, own_rule
from tests.lower.plans import plan_of
from tests.zoo import MODELS, rows

Made = Callable[[Named], Optimizer]
MOMENTUM: Made = partial(SGD, lr=0.05, momentum=0.9)
STASHING = [name for name, variant in VARIANTS.items() if rule_named(variant.rule).stashes]
DELAYED = {"pipedream-2bw", "cdp-v1"}
"""Rules that read W[t-1] whatever D is."""


def trained(
    name: str, stages: int, micro_batches: int, optimizer: Made = MOMENTUM, steps: int = 5, **fields: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of a run of the small perceptron."""
    place = bench("mlp")
    place.restore()
    job = place.job(optimizer, **({"batches": lambda epoch: place.entry.batches(epoch, steps)} | fields))
    plan = place.plan(VARIANTS[name], stages, micro_batches)
    done = Session(job, place.captured, plan, 0, Length(steps=steps)).run(notify=lambda event: None)
    return [update.loss for update in done.updates], dict(done.snapshot.parameters)


def same(one: tuple[list[float], dict[str, torch.Tensor]], other: tuple[list[float], dict[str, torch.Tensor]]) -> bool:
    """Equal to the bit."""
    return one[0] == other[0] and all(torch.equal(tensor, other[1][name]) for name, tensor in one[1].items())


@pytest.mark.parametrize("optimizer", [MOMENTUM, partial(Adam, lr=2e-3)], ids=["sgdm", "adam"])
def test_cdp_v1_and_2bw_are_one_rule(optimizer: Made) -> None:
    one, other = (trained(name, 4, 4, optimizer) for name in ("cdp-v1", "pipedream-2bw"))
    assert same(one, other)
    assert not same(one, trained("cdp-v2", 4, 4, optimizer))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_second_rule_of_cdp_reads_what_1f1b_has(size: int) -> None:
    """i + j >= N + 1 is floor(max(0, g - lag) / N), with as many micro-batches as stages."""
    plan = plan_of("cdp-v2", size, size)
    run = simulate(plan, emit(read(plan)), stream([size] * 6))
    versions = {(i.worker, i.g): i.reads for i in run.intervals if i.opcode == "forward"}
    assert versions == {(k, g): max(0, g - (size - 1 - k)) // size for k in range(size) for g in range(6 * size)}
    assert same(trained("cdp-v2", 4, 4), trained("pipedream", 4, 4))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_within_one_batch_is_a_flush(name: str) -> None:
    """Nothing has been updated, so nothing is older, newer or predicted."""
    assert same(trained(name, 3, 4, steps=1), trained("gpipe", 3, 4, steps=1))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_shorter_than_one_batch_is_a_flush(name: str) -> None:
    """Two micro-batches of the four that a batch may have, fewer than there are stages."""
    two = [rows(bench("mlp").batches[0], 0, 2)]
    short, flushed = (trained(rule, 3, 4, steps=1, batches=lambda epoch: two) for rule in (name, "gpipe"))
    assert same(short, flushed)
    assert not same(short, trained("gpipe", 3, 4, steps=1))


@pytest.mark.parametrize("name", VARIANTS)
def test_without_a_learning_rate_all_rules_are_one(name: str) -> None:
    still: Made = partial(AdamW, lr=0.0)
    micro_batches = allowed(VARIANTS[name], 3, 1)
    assert same(trained(name, 3, micro_batches, still), trained("gpipe", 3, micro_batches, still))


@pytest.mark.parametrize("name", VARIANTS)
def test_one_stage_is_the_plain_optimizer(name: str) -> None:
    variant = VARIANTS[name]
    if variant.rule in DELAYED or variant.rule == "lookahead" or variant.predictor == "released-code":
        assert not same(trained(name, 1, 1), trained("gpipe", 1, 1))  # delayed, or a step ahead, by definition
    else:
        assert same(trained(name, 1, 1), trained("gpipe", 1, 1))


def test_a_look_ahead_of_plain_sgd_is_no_correction() -> None:
    """Without momentum there is nothing to look along."""
    plain: Made = partial(SGD, lr=0.05)
    assert same(trained("lookahead mixed", 4, 1, plain), trained("async mixed", 4, 1, plain))
    assert not same(trained("lookahead mixed", 4, 1), trained("async mixed", 4, 1))


@pytest.mark.parametrize("rule", ["pipedream-2bw", "cdp-v1", "cdp-v2"])
@pytest.mark.parametrize("stages", [3, 4, 6])
def test_with_too_few_micro_batches_the_first_version_that_is_not_there_is_named(rule: str, stages: int) -> None:
    prove(plan_of(rule, stages, stages - 1 if rule != "cdp-v2" else stages))
    few = stages - 2
    with pytest.raises(PlanError, match=rf"stage 0, forward of micro-batch {2 * few}: got version 0, its newest") as no:
        prove(plan_of(rule, stages, few))
    assert "expected version 1" in str(no.value)


def always(i: int, j: int, stages: int) -> bool:
    return True


@pytest.mark.parametrize("fresh", [only_the_last, every_other_on_the_last])
def test_any_table_of_fresh_and_previous_runs_and_verifies(
    fresh: Callable[[int, int, int], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roundelay.ir.rule._RULES", {rule.name: rule for rule in rules()})
    register_rule(own_rule("mine", fresh))
    place = bench("skip")
    found = place.verify(place.plan(Variant("mine", "none", "stash"), 3, 4))
    assert found.equal, found.difference


def test_a_table_that_asks_for_more_than_the_timing_allows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roundelay.ir.rule._RULES", {rule.name: rule for rule in rules()})
    register_rule(own_rule("mine", always))
    with pytest.raises(PlanError, match=r"stage 0, forward of micro-batch 3: got version 0, its newest"):
        prove(plan_of("mine", 3, 3))


@pytest.mark.parametrize("optimizer", [MOMENTUM, partial(Adam, lr=2e-3), partial(AdamW, lr=2e-3)])
def test_a_rehearsal_on_a_batch_of_equal_parts_is_exact_training(optimizer: Made) -> None:
    """Every part of the batch has the whole batch's gradient, so what is foreseen is what comes."""
    torch.manual_seed(0)
    widths = (6, 8, 8, 8, 3)
    layers = [nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in itertools.pairwise(widths)]
    one = [(torch.randn(1, 6).double(), torch.randint(0, 3, (1,))) for _ in range(6)]
    batches: list[Any] = [tuple(torch.cat([part] * 4) for part in batch) for batch in one]
    place = Bench(MODELS["mlp"], nn.Sequential(*layers).double(), batches)
    runs = []
    for name in ("rehearse recompute", "1f1b", "pipeoptim improved recompute"):
        place.restore()
        session = Session(place.job(optimizer), place.captured, place.plan(VARIANTS[name], 4, 4), 0, Length(steps=6))
        runs.append(session.run(notify=lambda event: None).snapshot.parameters)
    for name, tensor in runs[1].items():
        torch.testing.assert_close(runs[0][name], tensor, rtol=0, atol=1e-9)
    assert max((runs[2][name] - tensor).abs().max().item() for name, tensor in runs[1].items()) > 1e-5


def test_a_rehearsal_verifies_where_it_looks_two_updates_ahead_and_with_losses_of_sum_and_count() -> None:
    for model, micro_batches in (("mlp", 2), ("token_mean", 4)):
        place = bench(model)
        found = place.verify(place.plan(VARIANTS["rehearse mixed"], 4, micro_batches), place.job(MOMENTUM))
        assert found.equal, found.difference


@pytest.mark.parametrize("rule", ["pipedream", "pipedream-vertical", "pipedream-2bw", "cdp-v2", "async", "spectrain"])
def test_as_many_versions_are_held_as_the_rule_needs(rule: str) -> None:
    plan = plan_of(rule, 4, 4 if rule_named(rule).versions == "table" else 1)
    held = [w.versions_held_peak for w in simulate(plan, emit(read(plan)), stream([plan.micro_batches] * 9)).workers]
    expected = {
        "pipedream": [4, 3, 2, 1],
        "pipedream-vertical": [4, 4, 4, 4],
        "pipedream-2bw": [2, 2, 2, 2],
        "cdp-v2": [2, 2, 2, 1],
        "async": [1, 1, 1, 1],
        "spectrain": [2, 2, 3, 2],
    }
    assert held == expected[rule]


@pytest.mark.parametrize("name", ["pipedream-vertical", "pipedream-2bw", "cdp-v2", "pipedream"])
def test_a_running_stage_lets_old_versions_go(name: str) -> None:
    """It keeps for later forwards no more than the simulator counts; a stash is its tape's own."""
    place = bench("mlp")
    place.restore()
    job = place.job(MOMENTUM, batches=lambda epoch: place.entry.batches(epoch, 12))
    plan = place.plan(VARIANTS[name], 4, 4 if rule_named(name).versions == "table" else 1)
    kept: dict[int, list[int]] = {k: [] for k in range(4)}

    def watched(context: Context, run: Run) -> MicroBatch | None:
        header = do_forward(context, run)
        kept[context.worker].append(len(context.stage._older.kept))
        return header

    handlers = {k: {"forward": watched} for k in range(4)}
    Session(job, place.captured, plan, 0, Length(steps=12)).run(notify=lambda event: None, handlers=handlers)
    # behind a batch's last forward nothing older is read, which with M = D comes on stage 0 as the update does; and as
    # cdp-v2 reads W[t] as soon as it is there, what it reads is its newest
    expected = {"pipedream-vertical": [0, 1, 2, 3], "pipedream-2bw": [0, 1, 1, 1]}
    assert [max(kept[k]) for k in range(4)] == expected.get(name, [0, 0, 0, 0])


@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [
        ("lookahead mixed", 1),
        ("lookahead mixed", 4),
        ("rehearse mixed", 4),
        ("rehearse recompute", 4),
        ("pipeoptim improved mixed", 1),
        ("spectrain improved mixed", 1),
    ],
)
def test_a_running_stage_holds_as_many_predictions_as_the_simulator_counts(
    name: str, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted at the moment that one more is made: whatever it takes the place of must be gone by then."""
    alive: dict[int, list[weakref.ref[torch.Tensor]]] = {}
    most: dict[int, int] = {}

    def counted(optimizer: Optimizer, group: Any, weight: torch.Tensor, **rest: Any) -> torch.Tensor:
        predicted = predict(optimizer, group, weight, **rest)
        others = [ref for ref in alive.get(id(weight), []) if ref() is not None]
        alive[id(weight)] = [*others, weakref.ref(predicted)]
        stage = id(optimizer)  # each stage has its own
        most[stage] = max(most.get(stage, 0), len(alive[id(weight)]))
        return predicted

    monkeypatch.setattr(predicted_weights, "predict", counted)
    place = Bench(DEEP, batches=DEEP.batches(0, 9))  # all four stages have weights
    job = place.job(MOMENTUM)
    plan = place.plan(VARIANTS[name], 4, micro_batches)
    Session(job, place.captured, plan, 0, Length(steps=9)).run(notify=lambda event: None)
    held = [w.versions_held_peak for w in simulate(plan, emit(read(plan)), stream([plan.micro_batches] * 9)).workers]
    assert sorted(most.values()) == sorted(versions - 1 for versions in held if versions > 1)
